"""A training step under TensorFlow's CentralStorageStrategy; host_step.py starts it.

    python benchmarks/tensorflow_step.py REPLICAS

One process, with a logical CPU device for each replica, variables on the first, and TensorFlow's
default number of threads. Each line of standard input is a command in JSON, answered by a line on
standard output:

    {"layers": [64, 32, 10], "batch": 32}    makes a network                      null
    {"steps": 200}                           trains it                            the seconds taken
    {"save": "weights.npz"}                  saves its weights and biases there   null
"""

import json
import os
import sys
import time

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import networks
import tensorflow as tf


def make_step(strategy, layers, batch):
    """A training step, and the variables that it changes."""
    with strategy.scope():
        weights = [tf.Variable(value) for value in networks.initial(layers)]
        optimizer = tf.keras.optimizers.legacy.SGD(networks.RATE, networks.MOMENTUM)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            hidden = x
            for w, b in zip(weights[:-2:2], weights[1:-2:2], strict=True):
                hidden = tf.nn.relu(hidden @ w + b)
            loss = tf.reduce_sum((hidden @ weights[-2] + weights[-1] - y) ** 2) / (2 * batch)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    def of_replica(context):
        return tuple(
            tf.constant(array)
            for array in networks.data(layers, batch, context.replica_id_in_sync_group)
        )

    x, y = strategy.experimental_distribute_values_from_function(of_replica)

    @tf.function
    def step(x, y):
        strategy.run(replica_step, args=(x, y))

    return lambda: step(x, y), weights


def main():
    replicas = int(sys.argv[1])
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
    )
    devices = [f"/cpu:{i}" for i in range(replicas)]
    strategy = tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")
    for line in sys.stdin:
        command, answer = json.loads(line), None
        if "layers" in command:
            step, weights = make_step(strategy, command["layers"], command["batch"])
        elif "steps" in command:
            begin = time.perf_counter()
            for _ in range(command["steps"]):
                step()
            answer = time.perf_counter() - begin
        else:
            np.savez(command["save"], *(weight.numpy() for weight in weights))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
