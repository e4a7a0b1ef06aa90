"""Some of the points, in their clusters' colours, and the centres."""


def draw(figure, points, labels, centres):
    figure.set_size_inches(5, 3)
    axes = figure.subplots()
    for i in range(len(centres)):
        x, y = points[::250][labels[::250] == i].T
        axes.plot(x, y, marker=".", markersize=4, linestyle="")
    axes.plot(*centres.T, marker="X", markersize=11, linestyle="", color="#d4d13b", mec="black")
    axes.set(xlabel="x", ylabel="y", aspect="equal")
