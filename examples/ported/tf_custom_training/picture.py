"""Loss and accuracy of each epoch, of the images learned from and of the test images."""

import numpy as np


def draw(figure, *history):
    losses, accuracies, test_losses, test_accuracies = np.transpose(history)
    epochs = range(1, len(history) + 1)
    for axes, name, training, test in zip(
        figure.subplots(1, 2),
        ("loss", "accuracy"),
        (losses, accuracies),
        (test_losses, test_accuracies),
        strict=True,
    ):
        axes.plot(epochs, training, marker="o", markersize=4, label="training")
        axes.plot(epochs, test, marker="s", markersize=4, label="test")
        axes.set(xlabel="epoch", ylabel=name, xticks=epochs)
        axes.legend(frameon=False)
