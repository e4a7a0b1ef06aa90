"""Draws the results of other examples, for their option `--plot FILE`.

The suffix of the file is the format. docs/gallery.md shows the pictures. Fonts and colours are
matplotlib's settings, from the file that MATPLOTLIBRC names, if set.
"""

import contextlib

import numpy as np
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]


@contextlib.contextmanager
def _figure(path):
    """A figure to draw on; writes it to the file at the end."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    yield figure
    figure.savefig(path)


def _show(figure, rows, columns, images, **options):
    """Draws images of 8 x 8 pixels in a grid; places without an image stay empty."""
    grid = figure.subplots(rows, columns).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, image in zip(grid, images, strict=False):
        axes.imshow(image.reshape(8, 8), **options)
    return grid


def kmeans(path, totals, centres):
    """The sum of squared distances in each iteration, and the final centres as images."""
    with _figure(path) as figure:
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3, 4))[0]
        axes = left.subplots()
        axes.semilogx(range(1, len(totals) + 1), totals, marker="o", markersize=3)
        axes.set(xlabel="iteration", ylabel="sum of squared distances")
        axes.xaxis.set_major_formatter("{x:.0f}")
        _show(right, -(-len(centres) // 5), 5, centres, cmap="gray_r")


def pca(path, directions, coordinates, digits):
    """Four components as images, and some digits in the plane of the first two."""
    with _figure(path) as figure:
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 2))[0]
        grid = _show(left, 2, 2, directions.T, cmap="RdBu", vmin=-0.4, vmax=0.4)
        for i, axes in enumerate(grid[: directions.shape[1]], start=1):
            axes.set_title(f"component {i}", fontsize="medium")
        axes = right.subplots()
        for digit in range(10):
            x, y = coordinates[:300][digits[:300] == digit].T
            axes.plot(x, y, marker=f"${digit}$", linestyle="")
        axes.set(xlabel="component 1", ylabel="component 2")


def monte_carlo(path, paths, plain, plain_error, price, error):
    """The price by the number of paths, in two ways, with 95 % intervals: arrays of shape (n,)."""
    with _figure(path) as figure:
        axes = figure.subplots()
        for values, errors, name in (
            (plain, plain_error, "plain"),
            (price, error, "control variate"),
        ):
            (line,) = axes.semilogx(paths, values, label=name)
            bounds = values - 1.96 * errors, values + 1.96 * errors
            axes.fill_between(paths, *bounds, color=line.get_color(), alpha=0.3, linewidth=0)
        axes.set(xlabel="paths", ylabel="price", xlim=(paths[0], paths[-1]))
        axes.legend(frameon=False, title="price and 95 % interval")


def learning(path, history, test_accuracy):
    """The loss and the accuracy of each epoch: `history` is a list of these pairs."""
    epochs = range(1, len(history) + 1)
    losses, accuracies = np.transpose(history)
    with _figure(path) as figure:
        left, right = figure.subplots(1, 2)
        left.semilogy(epochs, losses, marker="o", markersize=3)
        left.set(xlabel="epoch", ylabel="loss", xticks=epochs)
        right.plot(epochs, accuracies, marker="o", markersize=3, label="training")
        right.plot(epochs[-1], test_accuracy, marker="*", markersize=10, linestyle="", label="test")
        right.set(xlabel="epoch", ylabel="accuracy", xticks=epochs)
        right.legend(frameon=False, loc="lower right")
