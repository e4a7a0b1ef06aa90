"""The energies, and half of the particles at the end, in the colour of the slab that they left."""

import numpy as np


def draw(figure, box, start, end, history):
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    steps = range(1, len(history) + 1)
    energies = {"kinetic": history[:, 0], "potential": history[:, 1], "total": history.sum(axis=1)}
    for name, values in energies.items():
        left.plot(steps, values, label=name)
    left.set(xlabel="step", ylabel="energy of a particle")
    left.legend(frameon=False, loc="center right")
    slabs = np.floor(4 * start[:, 0] / box[0])
    for slab in range(4):
        x, y, _ = end[(slabs == slab) & (end[:, 2] < box[2] / 2)].T
        right.plot(x, y, marker=".", linestyle="", markersize=9, mew=0, alpha=0.7)
        right.axvline(box[0] * slab / 4, linestyle=":", linewidth=0.7, color="gray")
    right.set(xlabel="x", ylabel="y", aspect="equal", xlim=(0, box[0]), ylim=(0, box[1]))
