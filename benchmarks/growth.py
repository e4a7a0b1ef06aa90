"""Plots how the cost of an optimizer's step grows with parameters, variables and ranks.

    OMP_NUM_THREADS=1 python benchmarks/growth.py

Start it without mpirun: it runs growth_step.py under mpirun for each number of ranks. That times
SGD with momentum by `apply_gradients`, in turns with a hand-written Allreduce and an update on
every rank. It prints a Markdown table, in microseconds, and plots it in growth.png.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys

from rounds import header, row

HERE = pathlib.Path(__file__).parent
WAYS = ("ours", "Allreduce by hand")
KINDS = ("parameters", "variables", "ranks")


def measured(mpirun, rounds, ranks, models):
    """The seconds of each alternative for each model: (parameters, variables)."""
    command = [
        *shlex.split(mpirun),
        "-n",
        str(ranks),
        sys.executable,
        HERE / "growth_step.py",
        "--rounds",
        str(rounds),
    ]
    command += [f"{parameters}x{variables}" for parameters, variables in models]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def sweeps(options):
    """For each panel, its cases: ((parameters, variables, ranks), seconds of each alternative)."""
    ranks, middle = options.ranks, options.largest // 10
    sizes = [10**n for n in range(3, 8) if 10**n <= options.largest]
    models = [(size, 1) for size in sizes]
    models += [(middle, variables) for variables in (1, 3, 10, 30, 100, 300, 1000)]
    seconds = measured(options.mpirun, options.rounds, ranks, models)
    cases = [((*model, ranks), found) for model, found in zip(models, seconds, strict=True)]
    yield cases[: len(sizes)]
    yield cases[len(sizes) :]
    counts = [count for count in (1, 2, 3, 4, 6, 8) if count <= options.most_ranks]
    model = (middle, 10)
    yield [
        ((*model, count), measured(options.mpirun, options.rounds, count, [model])[0])
        for count in counts
    ]


def draw(panels, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 3.3), dpi=100, sharey=True, layout="constrained")
    for place, (axis, cases, kind) in enumerate(zip(axes, panels, KINDS, strict=True)):
        across = [case[place] for case, _ in cases]
        for number, (way, marker) in enumerate(zip(WAYS, "os", strict=True)):
            axis.plot(
                across, [1e3 * seconds[number] for _, seconds in cases], marker=marker, label=way
            )
        fixed = [
            f"{n:,} {name if n > 1 else name[:-1]}"
            for name, n in zip(KINDS, cases[0][0], strict=True)
            if name != kind
        ]
        axis.set(xscale="log", yscale="log", xlabel=kind)
        axis.set_title(", ".join(fixed), fontsize=10)
        axis.grid(alpha=0.3)
    axes[2].set_xticks(across, across)
    axes[2].minorticks_off()
    axes[0].set_ylabel("milliseconds a step")
    axes[0].legend()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=10, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument("--ranks", type=int, default=2, help="where they do not vary (%(default)s)")
    parser.add_argument("--most-ranks", type=int, default=8, help="where they do (%(default)s)")
    parser.add_argument(
        "--largest", type=int, default=10**7, help="number of parameters (%(default)s)"
    )
    parser.add_argument(
        "--mpirun", default="mpirun", help="with the options that it needs (%(default)s)"
    )
    parser.add_argument(
        "--plot", default=HERE / "growth.png", help="where to draw it (%(default)s)"
    )
    options = parser.parse_args()
    header(*KINDS, *(f"{way}, us" for way in WAYS), "ours / by hand")
    panels = []
    for cases in sweeps(options):
        for case, (ours, hand) in cases:
            row(
                *(f"{count:,}" for count in case),
                f"{1e6 * ours:,.0f}",
                f"{1e6 * hand:,.0f}",
                f"{ours / hand:.2f}",
            )
        panels.append(cases)
    draw(panels, options.plot)


if __name__ == "__main__":
    main()
