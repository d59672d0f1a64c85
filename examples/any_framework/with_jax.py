"""A job for a worker whose Python has JAX: an integral, compiled, on a GPU if one is free, else on the CPU.

    python with_jax.py

JAX sees the granted devices and no others.
"""

import json

import gpulayer as gl


@gl.remote(accelerator="any", frameworks={"jax": ">=0.4.30"})
def bell(half_width: float, steps: int) -> dict[str, object]:
    """The area below exp(-x²) from -half_width to half_width, by the trapezoidal rule."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def area(x: jax.Array) -> jax.Array:
        return jnp.trapezoid(jnp.exp(-(x**2)), x)

    value = area(jnp.linspace(-half_width, half_width, steps))
    [device] = value.devices()
    return {
        "framework": f"jax {jax.__version__}",
        "device": f"{device.platform}:{device.id}",
        "value": float(value),
    }


if __name__ == "__main__":
    print(json.dumps(bell.delay(1.5, 2001).result()))
