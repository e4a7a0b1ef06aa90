"""TensorFlow's custom training tutorial with NumPy or CuPy, on any number of replicas.

    mpirun -n 4 python examples/ported/tf_custom_training/after.py

The strategy, the datasets, the loop, the metrics and the checkpoints keep their lines; `tf` is
`hs`, and nothing is compiled. What Keras's layers and the tape did is written out: the model is a
list of variables, `forward` computes the scores and `backward` the gradients, and `xp` is NumPy or
CuPy.
"""

import os
import pathlib
import tempfile

import numpy as np

import hpcstrat as hs

EPOCHS = 4
GLOBAL_BATCH_SIZE = 64
L2 = 1e-4
LINE = "epoch {}: loss {:.5f}, accuracy {:.4f}; test loss {:.5f}, accuracy {:.4f}"
SHAPES = (3, 3, 1, 8), (8,), (72, 32), (32,), (32, 10), (10,)


def initial_weights(seed):
    """Normal by He et al. (2015), biases zero."""
    random = np.random.default_rng(seed)
    for shape in SHAPES:
        scale = (2 / np.prod(shape[:-1])) ** 0.5 if len(shape) > 1 else 0
        yield (scale * random.standard_normal(shape)).astype(np.float32)


def load_data():
    """1437 images of shape (8, 8, 1) with their digits, and 360 to test."""
    images, digits = np.load(pathlib.Path(__file__).parents[2] / "digits.npz").values()
    order = np.random.default_rng(0).permutation(len(images))
    images = (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return (images[:1437], digits[order][:1437]), (images[1437:], digits[order][1437:])


strategy = hs.MirroredStrategy()
xp = strategy.xp
train, test = load_data()
train_dataset = hs.data.Dataset.from_tensor_slices(train).batch(GLOBAL_BATCH_SIZE)
test_dataset = hs.data.Dataset.from_tensor_slices(test).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model(seed):
    return [hs.Variable(value) for value in initial_weights(seed)]


def forward(xp, model, images):
    """The scores of the digits, of shape (n, 10), and what `backward` needs of each layer."""
    kernel, b1, w2, b2, w3, b3 = [variable.value() for variable in model]
    n = len(images)
    patches = xp.stack([images[:, i : i + 6, j : j + 6, 0] for i in range(3) for j in range(3)], -1)
    windows = (patches @ kernel.reshape(9, 8) + b1).reshape(n, 3, 2, 3, 2, 8)
    windows = windows.transpose(0, 1, 3, 5, 2, 4).reshape(n, 3, 3, 8, 4)
    pooled = xp.maximum(windows.max(axis=-1), 0).reshape(n, 72)
    hidden = xp.maximum(pooled @ w2 + b2, 0)
    return hidden @ w3 + b3, (patches, windows, pooled, hidden)


def backward(xp, model, layers, d_scores):
    """The gradients of the model's variables, summed over the images."""
    kernel, _, w2, _, w3, _ = [variable.value() for variable in model]
    patches, windows, pooled, hidden = layers
    d_hidden = d_scores @ w3.T * (hidden > 0)
    d_pooled = (d_hidden @ w2.T * (pooled > 0)).reshape(windows.shape[:-1])
    is_largest = windows.argmax(axis=-1)[..., None] == xp.arange(4)
    d_windows = (d_pooled[..., None] * is_largest).reshape(-1, 3, 3, 8, 2, 2)
    d_outputs = d_windows.transpose(0, 1, 4, 2, 5, 3).reshape(-1, 8)
    yield (patches.reshape(-1, 9).T @ d_outputs).reshape(kernel.shape)
    yield d_outputs.sum(axis=0)
    for inputs, d_outputs in (pooled, d_hidden), (hidden, d_scores):
        yield inputs.T @ d_outputs
        yield d_outputs.sum(axis=0)


with strategy.scope():
    test_loss = hs.metrics.Mean()
    train_accuracy = hs.metrics.SparseCategoricalAccuracy()
    test_accuracy = hs.metrics.SparseCategoricalAccuracy()
    model = create_model(seed=0)
    optimizer = hs.optimizers.Adam(0.005)
    checkpoint = hs.checkpoint.Checkpoint(optimizer=optimizer, model=model)


def compute_loss(labels, predictions, model_losses):
    losses, gradient = hs.losses.softmax_cross_entropy(labels, predictions)
    loss = hs.losses.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)
    loss += hs.losses.scale_regularization_loss(sum(model_losses))
    return loss, gradient / GLOBAL_BATCH_SIZE


def train_step(images, labels):
    predictions, layers = forward(xp, model, images)
    model_losses = [L2 * (kernel**2).sum() for kernel in model[::2]]
    loss, d_scores = compute_loss(labels, predictions, model_losses)
    gradients = list(backward(xp, model, layers, d_scores))
    for gradient, kernel in zip(gradients[::2], model[::2], strict=True):
        gradient += 2 * L2 / strategy.num_replicas_in_sync * kernel.value()
    optimizer.apply_gradients(zip(gradients, model, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(images, labels):
    predictions, _ = forward(xp, model, images)
    test_loss.update_state(hs.losses.softmax_cross_entropy(labels, predictions)[0])
    test_accuracy.update_state(labels, predictions)


def main():
    folder = hs.on_lead(tempfile.mkdtemp)
    history = []
    for epoch in range(EPOCHS):
        total_loss, num_batches = 0.0, 0
        for batch in train_dist_dataset:
            losses = strategy.run(train_step, args=batch)
            total_loss += strategy.reduce("SUM", losses, axis=None)
            num_batches += 1
        for batch in test_dist_dataset:
            strategy.run(test_step, args=batch)
        checkpoint.save(os.path.join(folder, "epoch"))
        metrics = train_accuracy, test_loss, test_accuracy
        history.append([total_loss / num_batches, *[metric.result() for metric in metrics]])
        print(LINE.format(epoch + 1, *history[-1]))
        for metric in metrics:
            metric.reset_state()

    eval_accuracy = hs.metrics.SparseCategoricalAccuracy()
    new_model = create_model(seed=1)
    new_checkpoint = hs.checkpoint.Checkpoint(model=new_model)
    new_checkpoint.restore(os.path.join(folder, "epoch"), partial=True)
    for images, labels in test_dataset:
        eval_accuracy(labels, forward(np, new_model, images)[0])
    print(f"restored without the strategy: test accuracy {eval_accuracy.result():.4f}")
    return history


if __name__ == "__main__":
    main()
