"""Job processes: real ones, started, ended and killed."""
