"""Runs a ported program and draws what its `main()` returns, with its `picture.py`.

    mpirun -n 4 python examples/ported/draw.py kmeans kmeans.svg

The suffix of the file is the format; further arguments go to the program. Fonts and colours are
matplotlib's settings, from the file that MATPLOTLIBRC names, if set.
"""

import argparse
import importlib
import pathlib
import sys

import hpcstrat as hs


def save(path, draw, values):
    """Draws values that are on the host, and writes the file."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(8, 3), layout="constrained")
    draw(figure, *values)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description="Draws the result of a ported program.")
    parser.add_argument("name", help="the program's folder")
    parser.add_argument("file", help="the picture")
    options, rest = parser.parse_known_args()

    sys.path.insert(0, str(pathlib.Path(__file__).parent / options.name))
    sys.argv = ["after.py", *rest]
    values = importlib.import_module("after").main()
    draw = importlib.import_module("picture").draw
    hs.on_lead(save, options.file, draw, hs.asnumpy(values))


if __name__ == "__main__":
    main()
