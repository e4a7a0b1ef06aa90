"""The loss of each epoch, and where the second start goes on."""


def draw(figure, *losses):
    figure.set_size_inches(5, 3)
    axes = figure.subplots()
    half = len(losses) // 2
    axes.plot(range(half), losses[:half], marker="o", markersize=4, label="first start")
    axes.plot(
        range(half, len(losses)), losses[half:], marker="s", markersize=4, label="from the snapshot"
    )
    axes.axhline(0.01, linestyle=":", color="gray", label="noise in the data")
    axes.set(xlabel="epoch", ylabel="squared error", xticks=range(len(losses)), ylim=(0, None))
    axes.legend(frameon=False)
