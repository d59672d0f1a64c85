"""Detection: which devices a machine has, and what they do now.

Drivers are asked in a child process, never in the worker itself.
"""
