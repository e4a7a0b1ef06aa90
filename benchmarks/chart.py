r"""Draws the step times that host_step.py measured: docs/steps-light.svg and docs/steps-dark.svg.

    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/host_step.py --tensorflow PYTHON \
        --jax PYTHON --json FILE
    python benchmarks/chart.py FILE

The figures of the current picture are in benchmarks/steps.json.
"""

import argparse
import json
import pathlib

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

DOCS = pathlib.Path(__file__).parents[1] / "docs"
WAYS = {
    "ours": "hpcstrat",
    "in buffers": "hpcstrat, gradients in buffers",
    "allreduce": "mpi4py by hand: Allreduce",
    "window": "mpi4py by hand: shared window",
    "DDP": "PyTorch DDP, gloo",
    "JAX": "JAX, shard_map",
    "TensorFlow": "TensorFlow, CentralStorageStrategy",
}
COLORS = {"light": ("#1f2328", "#0969da", "#afb8c1"), "dark": ("#e6edf3", "#4493f8", "#484f58")}


def draw(ranks, networks, path, text, ours, others):
    """One panel per network: a bar for each alternative that was measured, in milliseconds."""
    style = {"text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text}
    with mpl.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "steps", "font.size": 9}):
        figure, axes = plt.subplots(1, len(networks), figsize=(9, 2.6), layout="constrained")
        for axis, (network, seconds) in zip(axes, networks.items(), strict=True):
            ways = [way for way in WAYS if way in seconds]
            times = [1e3 * seconds[way] for way in ways]
            bars = axis.barh(
                range(len(ways)),
                times,
                color=[ours if way in ("ours", "in buffers") else others for way in ways],
            )
            axis.bar_label(bars, [f"{time:.3g}" for time in times], padding=3, color=text)
            axis.set_yticks(
                range(len(ways)),
                [WAYS[way] for way in ways] if axis is axes[0] else [""] * len(ways),
            )
            axis.invert_yaxis()
            axis.set_xlim(0, 1.25 * max(times))
            axis.set_xticks([])
            axis.tick_params(length=0)
            axis.spines[:].set_visible(False)
            layers, batch = network.split(", ")
            axis.set_title(f"{layers}\nbatch of {batch} a replica", fontsize=9)
        figure.supxlabel(
            f"milliseconds a training step on {ranks} ranks, medians; shorter is better", fontsize=9
        )
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=pathlib.Path, help="what host_step.py --json wrote")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=DOCS, help="where to draw (%(default)s)"
    )
    options = parser.parse_args()
    found = json.loads(options.figures.read_text())
    for name, colors in COLORS.items():
        draw(found["ranks"], found["seconds"], options.folder / f"steps-{name}.svg", *colors)


if __name__ == "__main__":
    main()
