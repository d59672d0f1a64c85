"""Measurements, side by side with a peer in one run where there is one. Nothing here is asserted; tests bound counts."""
