"""Loss and accuracy after each epoch."""

import numpy as np


def draw(figure, *history):
    losses, accuracies, test_accuracies = np.transpose(history)
    epochs = range(len(history))
    left, right = figure.subplots(1, 2)
    left.plot(epochs, losses, marker="o", markersize=4)
    left.set(xlabel="epoch", ylabel="loss", xticks=epochs)
    right.plot(epochs, accuracies, marker="o", markersize=4, label="training")
    right.plot(epochs, test_accuracies, marker="s", markersize=4, label="test")
    right.set(xlabel="epoch", ylabel="accuracy", xticks=epochs)
    right.legend(frameon=False)
