"""The systems that the benchmarks run side by side: one file a system, the same questions asked of each.

`<system>_peer.py` is imported by the system's own worker and by its client, in an environment of its own, so it uses
the standard library and that system alone. `asked.py` is the client's side of the conversation, `contest.py` the
benchmark's, `environments.py` makes the environments.
"""
