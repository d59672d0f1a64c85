"""Measurements, side by side with a peer in one run where there is one; nothing is asserted, tests bound counts."""
