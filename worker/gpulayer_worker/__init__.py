"""The worker: what a machine has, claiming, processes, logs and outputs. It knows the broker and nothing above."""
