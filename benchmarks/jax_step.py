"""A training step under JAX; host_step.py starts it next to its ranks.

    python benchmarks/jax_step.py REPLICAS

One process, with a CPU device for each replica, the batch sharded over them by `shard_map`,
gradients summed by `psum`, the whole step compiled. The commands are those of tensorflow_step.py.
"""

import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[1]}"
import jax
import networks
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

REPLICAS = int(sys.argv[1])
MESH = Mesh(jax.devices(), ("replica",))
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec("replica")


def make_step(layers, batch):
    """A training step, and a function that returns the weights."""

    def loss(weights, x, y):
        hidden = x
        for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            hidden = jax.nn.relu(hidden @ w + b)
        return ((hidden @ weights[-2] + weights[-1] - y) ** 2).sum() / (2 * batch)

    def replica_step(weights, velocities, x, y):
        # For inputs that every replica has in common, the gradient is summed over the replicas: it
        # includes the `psum`.
        found = jax.grad(loss)(weights, x, y)
        velocities = [
            networks.MOMENTUM * v - networks.RATE * g
            for v, g in zip(velocities, found, strict=True)
        ]
        return [w + v for w, v in zip(weights, velocities, strict=True)], velocities

    step = jax.jit(
        jax.shard_map(
            replica_step,
            mesh=MESH,
            in_specs=(EVERYWHERE, EVERYWHERE, SPLIT, SPLIT),
            out_specs=(EVERYWHERE, EVERYWHERE),
        ),
        donate_argnums=(0, 1),
    )
    weights = [
        jax.device_put(value, NamedSharding(MESH, EVERYWHERE)) for value in networks.initial(layers)
    ]
    state = [weights, [jax.numpy.zeros_like(value) for value in weights]]
    parts = zip(
        *(networks.data(layers, batch, replica) for replica in range(REPLICAS)), strict=True
    )
    x, y = (jax.device_put(np.concatenate(part), NamedSharding(MESH, SPLIT)) for part in parts)

    def run():
        # Steps that were not waited for can use up the threads of the CPU devices, and then none of
        # them can end.
        state[:] = jax.block_until_ready(step(*state, x, y))

    return run, lambda: state[0]


def main():
    for line in sys.stdin:
        command, answer = json.loads(line), None
        if "layers" in command:
            step, weights = make_step(command["layers"], command["batch"])
        elif "steps" in command:
            begin = time.perf_counter()
            for _ in range(command["steps"]):
                step()
            answer = time.perf_counter() - begin
        else:
            np.savez(command["save"], *map(np.asarray, weights()))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
