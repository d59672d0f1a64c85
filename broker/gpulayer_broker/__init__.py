"""The queue: jobs, requirements, matching, the Lua library, the Dramatiq broker, artifacts and the embedded server.

The ground floor. It imports no other component of GPUlayer.
"""
