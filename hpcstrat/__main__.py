"""`python -m hpcstrat`, or `hpcstrat`: `run` starts ranks, `info` says what they find."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable

import hpcstrat
from hpcstrat._run import run


def main() -> int:
    """Does what the command line asks for; returns the exit status."""
    is_script = os.path.basename(sys.argv[0]) == "hpcstrat"
    parser = argparse.ArgumentParser(
        prog="hpcstrat" if is_script else "python -m hpcstrat",
        description="Starts programs on several ranks; says what hpcstrat finds on a machine.",
    )
    parser.add_argument("--version", action="version", version=f"hpcstrat {hpcstrat.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "info", help="versions, MPI, ranks and devices, and what is wrong with them"
    )
    parser_of_run = commands.add_parser(
        "run",
        help="starts a program on several ranks, with the mpiexec of the MPI that mpi4py loads",
        usage="%(prog)s -n N [OPTIONS] [-m | -c] PROGRAM [ARGUMENT ...]",
        allow_abbrev=False,
    )
    add = parser_of_run.add_argument
    add("-n", type=_number(1), required=True, metavar="N", help="the number of ranks")
    again = "start all ranks again while the status is not 0, K times at most; 0 by default"
    add("--restarts", type=_number(0), default=0, metavar="K", help=again)
    add("--mpiexec", metavar="COMMAND", help='another mpiexec, or options: "mpiexec -prepend-rank"')
    for option, what in (("-m", "a module"), ("-c", "Python code")):
        text = f"PROGRAM is {what}, as for python {option}"
        add(option, action="store_const", const=[option], dest="python_option", help=text)
    parser_of_run.set_defaults(python_option=[])
    add("program", metavar="PROGRAM", help="a Python file, or a folder with __main__.py")
    add("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the program's own")
    options = parser.parse_args()
    if options.command == "run":
        return run(options)
    from hpcstrat._info import info

    return info()


def _number(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch("[0-9]{1,7}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r:.50} is not a number from {least} up")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main())
