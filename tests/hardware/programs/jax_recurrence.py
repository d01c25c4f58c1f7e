"""A JAX program: a compiled step with a matrix product and a random key that travels with the state."""

from __future__ import annotations

import os

# Read when JAX starts. By default it takes three quarters of the GPU's memory, and a dump would carry all of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")

import jax
import jax.numpy as jnp

from tests.hardware.programs.recorder import Recorder

SIDE = 512


@jax.jit  # type: ignore[untyped-decorator]  # JAX is not installed where types are checked
def advance(x: jax.Array, weights: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step: the new state, the new key, and a checksum of all bits of the state."""
    key, noise_key = jax.random.split(key)
    x = jnp.tanh(x @ weights) + 0.01 * jax.random.normal(noise_key, x.shape)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # A sum of integers modulo 2**32 does not depend on the order in which threads add.
    return x, key, bits.sum(dtype=jnp.uint32)


def main() -> None:
    """Iterate and note the checksum, and one value, each step."""
    recorder = Recorder("JAX recurrence")
    if jax.default_backend() != "gpu":
        raise SystemExit("JAX does not see a GPU")
    key, weights_key, x_key = jax.random.split(jax.random.key(7), 3)
    weights = jax.random.normal(weights_key, (SIDE, SIDE)) * (1.5 / SIDE**0.5)
    x = jax.random.normal(x_key, (SIDE, SIDE))
    for step in range(recorder.steps):
        x, key, checksum = advance(x, weights, key)
        recorder.note(step, int(checksum), float(x[0, 0]))
        if step == 0:
            recorder.ready()


if __name__ == "__main__":
    main()
