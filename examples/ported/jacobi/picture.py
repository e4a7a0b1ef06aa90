"""The temperature of the plate, and how much it changed in each iteration."""


def draw(figure, plate, changes):
    left, right = figure.subplots(1, 2, width_ratios=(5, 3))
    image = left.imshow(plate, cmap="inferno", vmin=0, vmax=100)
    lines = left.contour(plate, levels=range(10, 100, 20), colors="white", linewidths=0.6)
    left.clabel(lines, fontsize="x-small")
    left.set(xlabel="column", ylabel="row")
    figure.colorbar(image, ax=left, label="degrees", shrink=0.8)
    right.loglog(range(1, len(changes) + 1), changes)
    right.set(xlabel="iteration", ylabel="largest change, degrees")
