"""Tests of the documentation: its examples run, its links lead somewhere, and it names everything that there is."""
