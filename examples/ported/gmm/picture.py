"""The test set in the colours of its clouds, and each component's ellipses of 1 and 2 sigma."""

from matplotlib.patches import Ellipse  # pyright: ignore[reportMissingImports]


def draw(figure, points, clouds, means, variances):
    figure.set_size_inches(5, 3)
    axes = figure.subplots()
    for i, (mean, variance) in enumerate(zip(means, variances, strict=True)):
        axes.plot(*points[clouds == i].T, marker=".", linestyle="", color=f"C{i}")
        for sigmas in (1, 2):
            width, height = 2 * sigmas * variance**0.5
            axes.add_patch(Ellipse(mean, width, height, fill=False, edgecolor=f"C{i}"))
    axes.set(xlabel="x", ylabel="y", aspect="equal")
