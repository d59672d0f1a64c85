"""A stand-in for the NVIDIA driver's library, and the scenarios that drive it."""
