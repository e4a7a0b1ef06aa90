"""Record TensorFlow's values of cases:  python record.py GOLDEN.json CASES_DIR --only metrics

Needs tensorflow-cpu 2.15, and not hpcstrat. N replicas are N logical CPUs of one process. See README.md.
"""
import argparse
import json
import os
import pathlib
import types

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf

from compare import load, same

RANKS = 1, 2, 3, 4


def with_gradient(loss):
    """`loss(labels, predictions)` that also returns the gradient of its sum with respect to the predictions."""
    def losses_and_gradient(labels, predictions, **options):
        predictions = tf.convert_to_tensor(predictions)
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            losses = loss(tf.convert_to_tensor(labels), predictions, **options)
        return losses, tape.gradient(losses, predictions)
    return losses_and_gradient


def softmax_cross_entropy(labels, logits):
    if labels.shape.rank == logits.shape.rank:
        return tf.nn.softmax_cross_entropy_with_logits(tf.cast(labels, logits.dtype), logits)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def sigmoid_cross_entropy(labels, logits):
    return tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(labels, logits.dtype), logits)


def squared_error(labels, predictions):
    return tf.math.squared_difference(predictions, tf.cast(labels, predictions.dtype))


def huber(labels, predictions, delta=1.0):
    """Of each element, where Keras takes the mean over the last axis."""
    return tf.keras.losses.huber(labels[..., None], predictions[..., None], delta)


def take_numpy(optimizer):
    """Lets `apply_gradients` take NumPy arrays, which Keras's own cannot send to other replicas."""
    apply_gradients = optimizer.apply_gradients

    def converting(self, pairs, **options):
        return apply_gradients(self, [(tf.convert_to_tensor(g), v) for g, v in pairs], **options)

    optimizer.apply_gradients = converting


class ConfusionMatrix(tf.keras.metrics.MeanIoU):
    def result(self):
        return self.total_cm


def namespace():
    """TensorFlow under hpcstrat's names, as far as cases that are recorded by this program need them."""
    losses = {loss.__name__: with_gradient(loss)
              for loss in (softmax_cross_entropy, sigmoid_cross_entropy, squared_error, huber)}
    names = {name: getattr(tf.distribute, name) for name in (
        "get_replica_context", "DistributedValues", "DistributedDataset", "InputContext", "in_cross_replica_context", "has_strategy", "get_strategy", "ReduceOp", "InputOptions",
        "InputReplicationMode", "RunOptions")}
    metrics = {name: thing for name, thing in vars(tf.keras.metrics).items() if not name.startswith("_")}
    return types.SimpleNamespace(
        **names, Variable=tf.Variable, VariableAggregation=tf.VariableAggregation,
        VariableSynchronization=tf.VariableSynchronization, TensorSpec=tf.TensorSpec,
        data=tf.data, nn=tf.nn, asnumpy=lambda x: x,
        IndexedSlices=lambda values, indices, dense_shape=None: tf.IndexedSlices(
            tf.constant(values), tf.constant(indices), dense_shape and tf.constant(dense_shape)),
        optimizers=tf.keras.optimizers, metrics=types.SimpleNamespace(**metrics, ConfusionMatrix=ConfusionMatrix),
        losses=types.SimpleNamespace(**losses, compute_average_loss=tf.nn.compute_average_loss,
                                     scale_regularization_loss=tf.nn.scale_regularization_loss))


def build(strategy, n):
    devices = [f"CPU:{i}" for i in range(n)]
    if strategy == "mirrored":
        return tf.distribute.MirroredStrategy(devices)
    if strategy == "one_device":
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.experimental.CentralStorageStrategy(devices, "CPU:0")


def overridden(values, overrides, case, n):
    """The values with what `overrides.json` says instead of them."""
    found = {}
    for label, value in values.items():
        for rule in overrides:
            if rule["case"] in (case, "*") and rule.get("label", label) == label and n in rule.get("n", RANKS):
                if rule.get("when", value) == value:
                    value = None if rule.get("drop") else rule["value"]
                    value = value["by_n"][str(n)] if isinstance(value, dict) and "by_n" in value else value
        if value is not None:
            found[label] = value
    return found


def written(golden):
    """The text of `golden.json`: a line for each case and number of ranks."""
    cases = [f"{json.dumps(case)}: {{\n" + ",\n".join(f" {json.dumps(n)}: {json.dumps(values)}"
             for n, values in by_n.items()) + "}" for case, by_n in sorted(golden.items())]
    return "{\n" + ",\n".join(cases) + "\n}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("golden", type=pathlib.Path)
    parser.add_argument("cases_dir", type=pathlib.Path)
    parser.add_argument("--only", required=True, help="record the cases whose id contains this")
    parser.add_argument("--check", action="store_true", help="write nothing; list what differs from the file")
    options = parser.parse_args()
    tf.get_logger().setLevel("ERROR")
    take_numpy(tf.keras.optimizers.Optimizer)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * max(RANKS))
    golden = json.loads(options.golden.read_text())
    overrides = json.loads(options.golden.with_name("overrides.json").read_text())
    for name, strategy, case in load(options.cases_dir):
        if options.only not in name or strategy not in ("central", "mirrored", "one_device"):
            continue
        for n in (1,) if strategy == "one_device" else getattr(case, "ns", None) or RANKS:
            built = build(getattr(case, "oracle", None) or strategy, n)
            values = overridden(json.loads(json.dumps(case(namespace(), built))), overrides, name, n)
            if options.check:
                known = golden.get(name, {}).get(str(n))
                print(name, n, "as recorded" if same(known, values) else f"differs: {values} and {known}")
            else:
                golden.setdefault(name, {})[str(n)] = values
                print(name, n, len(values), "labels")
    if not options.check:
        options.golden.write_text(written(golden))


if __name__ == "__main__":
    main()
