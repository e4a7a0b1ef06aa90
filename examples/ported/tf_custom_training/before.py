"""TensorFlow's tutorial "Custom training with tf.distribute.Strategy" (tensorflow.org, Apache-2.0).

    python examples/ported/tf_custom_training/before.py

A convolutional network with Adam and an L2 penalty, trained by a loop of its own; each epoch is
followed by a test and a checkpoint, and the last checkpoint is restored without the strategy.
Digits of 8 x 8 pixels in place of Fashion-MNIST. NumPy draws weights and order, from a fixed seed.
"""

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf  # pyright: ignore[reportMissingModuleSource]

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


strategy = tf.distribute.MirroredStrategy()
train, test = load_data()
train_dataset = tf.data.Dataset.from_tensor_slices(train).batch(GLOBAL_BATCH_SIZE)
test_dataset = tf.data.Dataset.from_tensor_slices(test).batch(GLOBAL_BATCH_SIZE)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)
test_dist_dataset = strategy.experimental_distribute_dataset(test_dataset)


def create_model(seed):
    penalty = tf.keras.regularizers.L2(L2)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(8, 3, activation="relu", kernel_regularizer=penalty),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu", kernel_regularizer=penalty),
            tf.keras.layers.Dense(10, kernel_regularizer=penalty),
        ]
    )
    model.build((None, 8, 8, 1))
    model.set_weights(list(initial_weights(seed)))
    return model


with strategy.scope():
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    test_loss = tf.keras.metrics.Mean()
    train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    model = create_model(seed=0)
    optimizer = tf.keras.optimizers.Adam(0.005)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, model=model)


def compute_loss(labels, predictions, model_losses):
    losses = loss_object(labels, predictions)
    loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)
    return loss + tf.nn.scale_regularization_loss(tf.add_n(model_losses))


def train_step(images, labels):
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions, model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    train_accuracy.update_state(labels, predictions)
    return loss


def test_step(images, labels):
    predictions = model(images, training=False)
    test_loss.update_state(loss_object(labels, predictions))
    test_accuracy.update_state(labels, predictions)


@tf.function
def distributed_train_step(batch):
    losses = strategy.run(train_step, args=batch)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


@tf.function
def distributed_test_step(batch):
    strategy.run(test_step, args=batch)


def main():
    folder = tempfile.mkdtemp()
    history = []
    for epoch in range(EPOCHS):
        total_loss, num_batches = 0.0, 0
        for batch in train_dist_dataset:
            total_loss += distributed_train_step(batch)
            num_batches += 1
        for batch in test_dist_dataset:
            distributed_test_step(batch)
        checkpoint.save(os.path.join(folder, "epoch"))
        metrics = train_accuracy, test_loss, test_accuracy
        history.append([total_loss / num_batches, *[metric.result() for metric in metrics]])
        print(LINE.format(epoch + 1, *history[-1]))
        for metric in metrics:
            metric.reset_states()

    eval_accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    new_model = create_model(seed=1)
    new_checkpoint = tf.train.Checkpoint(model=new_model)
    new_checkpoint.restore(tf.train.latest_checkpoint(folder)).expect_partial()
    for images, labels in test_dataset:
        eval_accuracy(labels, new_model(images, training=False))
    print(f"restored without the strategy: test accuracy {eval_accuracy.result():.4f}")
    return history


if __name__ == "__main__":
    main()
