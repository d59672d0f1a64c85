"""One tensor operation on the device that this process may see: `python -I verify.py KIND` prints the outcome as JSON.

It computes the sum of the squares below a thousand with whichever framework is there. Stdlib only outside of the
frameworks themselves, for Python 3.8 or newer.
"""

import json
import sys

COUNT = 1000
EXPECTED = sum(n * n for n in range(COUNT))
NAMES = {"cuda": "cuda", "rocm": "cuda", "mps": "mps", "cpu": "cpu"}


def by_torch(kind):
    # type: (str) -> tuple[str, str, int]
    import torch

    values = torch.arange(COUNT, dtype=torch.int32 if kind == "mps" else torch.int64, device=NAMES[kind])
    return "torch", torch.__version__, int((values * values).sum().item())


def by_cupy(kind):
    # type: (str) -> tuple[str, str, int]
    if kind not in ("cuda", "rocm"):
        raise ImportError("cupy has no such device")
    import cupy

    values = cupy.arange(COUNT, dtype=cupy.int64)
    return "cupy", cupy.__version__, int((values * values).sum())


def by_jax(kind):
    # type: (str) -> tuple[str, str, int]
    import jax

    device = jax.devices("gpu" if kind in ("cuda", "rocm") else kind)[0]
    values = jax.device_put(jax.numpy.arange(COUNT, dtype=jax.numpy.int32), device)
    return "jax", jax.__version__, int((values * values).sum())


def by_mlx(kind):
    # type: (str) -> tuple[str, str, int]
    if kind != "mps":
        raise ImportError("mlx has no such device")
    import mlx.core as mx

    values = mx.arange(COUNT, dtype=mx.int32)
    return "mlx", mx.__version__, int(mx.sum(values * values).item())


def by_numpy(kind):
    # type: (str) -> tuple[str, str, int]
    if kind != "cpu":
        raise ImportError("numpy has no such device")
    import numpy

    values = numpy.arange(COUNT, dtype=numpy.int64)
    return "numpy", numpy.__version__, int((values * values).sum())


def verify(kind):
    # type: (str) -> dict[str, object]
    """The first framework that is installed decides; what it raises is the outcome."""
    for attempt in (by_torch, by_cupy, by_jax, by_mlx, by_numpy):
        try:
            framework, version, total = attempt(kind)
        except ImportError:
            continue
        except Exception as error:  # noqa: BLE001 - whatever a framework raises is what there is to tell
            return {
                "ok": False,
                "text": f"{attempt.__name__[3:]}: {type(error).__name__}: {error}",
            }
        ok = total == EXPECTED
        text = f"{framework} {version}"
        return {"ok": ok, "text": text if ok else f"{text} computed {total}, not {EXPECTED}"}
    return {"ok": None, "text": "no framework here computes on it"}


if __name__ == "__main__":
    print(json.dumps(verify(sys.argv[1])))
