"""`python -m hpcstrat info` and `python -m hpcstrat check`, alone or under `mpirun`."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Runs the program that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hpcstrat", description="What hpcstrat finds on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, launcher, ranks and devices, and what is wrong with them")
    info.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("check", help="moves data between all ranks; exit status 1 where that fails")
    options = parser.parse_args()
    if options.command == "info":
        from hpcstrat._cli.info import info as show

        return show(options.json)
    from hpcstrat._cli.check import check

    return check()


if __name__ == "__main__":
    sys.exit(main())
