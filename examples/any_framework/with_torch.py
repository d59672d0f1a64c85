"""A job for a worker whose Python has PyTorch: a gradient, on a GPU if one is free, else on the CPU.

    python with_torch.py

`GPULAYER_ACCELERATOR` says what the job was granted; the tensors are made there.
"""

import json

import gpulayer as gl


@gl.remote(accelerator="any", frameworks={"torch": ">=2.0"})
def slope(points: int) -> dict[str, object]:
    """The derivative of k·sin(x) over x, summed over k and x from 1 to `points`, by automatic differentiation."""
    import os

    import torch

    granted = os.environ["GPULAYER_ACCELERATOR"]
    device = torch.device("cuda" if granted in ("cuda", "rocm") else granted)
    k = torch.arange(1, points + 1, dtype=torch.float32, device=device)
    x = k.clone().requires_grad_()
    (k * torch.sin(x)).sum().backward()
    return {
        "framework": f"torch {torch.__version__}",
        "device": str(x.device),
        "value": float(x.grad.sum().item()),
    }


if __name__ == "__main__":
    print(json.dumps(slope.delay(50).result()))
