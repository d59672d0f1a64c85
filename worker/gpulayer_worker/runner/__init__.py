"""What runs inside the job's own Python: standard library only, Python 3.8 or newer. Nothing here imports GPUlayer."""
