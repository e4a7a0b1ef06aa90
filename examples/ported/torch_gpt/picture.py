"""The loss, and to which earlier characters each character attends, in a head of a layer."""

import numpy as np


def draw(figure, history, written, weights):
    left, right = figure.subplots(1, 2, width_ratios=(4, 3))
    left.plot(*np.transpose(history), marker="o", markersize=4)
    left.set(xlabel="step", ylabel="loss per character")
    labels = [{"\n": "¶", " ": "·"}.get(character, character) for character in str(written)]
    right.imshow(weights[0])
    right.set_xticks(range(len(labels)), labels, fontsize=7)
    right.set_yticks(range(len(labels)), labels, fontsize=7)
    right.tick_params(length=0, pad=2)
