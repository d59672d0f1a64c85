"""A job for a worker whose Python has numpy: the highest frequency of a chain of masses.

    python with_numpy.py

It runs on the CPU; what comes back says with which version, on which device.
"""

import json

import gpulayer as gl


@gl.remote(frameworks={"numpy": ">=1.22"}, cpus=1)
def highest_frequency(masses: int) -> dict[str, object]:
    """The largest eigenvalue of the matrix of second differences."""
    import numpy as np

    chain = 2 * np.eye(masses) - np.eye(masses, k=1) - np.eye(masses, k=-1)
    return {
        "framework": f"numpy {np.__version__}",
        "device": "cpu",
        "value": float(np.linalg.eigvalsh(chain)[-1]),
    }


if __name__ == "__main__":
    print(json.dumps(highest_frequency.delay(200).result()))
