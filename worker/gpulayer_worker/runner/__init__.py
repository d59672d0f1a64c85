"""The part of GPUlayer that runs inside the Python of the jobs: standard library only, Python 3.8 or newer.

Nothing here imports GPUlayer. `main.py` is started by its path and loads its neighbours under the name
`gpulayer_runner`, so that neither this folder nor any of its module names can shadow a module of the user.
"""
