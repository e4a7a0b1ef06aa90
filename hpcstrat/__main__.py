"""`python -m hpcstrat`, or `hpcstrat`: `run`; `info`, `check`, also under `mpirun`."""

from __future__ import annotations

import argparse
import os
import signal
import sys

import hpcstrat
from hpcstrat._tools.launch.command import add_parser as add_run_parser
from hpcstrat._tools.launch.command import run


def main() -> int:
    """Runs the program that the command line asks for; returns the exit status."""
    try:
        return _main()
    except KeyboardInterrupt:
        print("hpcstrat: interrupted", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)  # so that a shell's script ends too
        return 128 + signal.SIGINT


def _main() -> int:
    is_script = os.path.basename(sys.argv[0]) == "hpcstrat"
    parser = argparse.ArgumentParser(
        prog="hpcstrat" if is_script else "python -m hpcstrat",
        description="Starts programs on several ranks; reports what hpcstrat finds on a machine.",
    )
    parser.add_argument("--version", action="version", version=f"hpcstrat {hpcstrat.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="versions, launcher, ranks and devices, and what is wrong with them"
    )
    info.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("check", help="moves data between all ranks; exit status 1 on failure")
    add_run_parser(commands)
    options = parser.parse_args()
    if options.command == "run":
        return run(options)
    if options.command == "info":
        from hpcstrat._tools.info import info as show

        return show(options.json)
    from hpcstrat._tools.check import check

    return check()


if __name__ == "__main__":
    sys.exit(main())
