"""Processes of jobs: how they start, and how their whole tree ends."""
