"""`python -m hpcstrat info` and `check`, alone or under `mpirun`, and `timeline`."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Runs the program that the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hpcstrat", description="What hpcstrat finds on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, launcher, ranks and devices, and what is wrong with them")
    info.add_argument("--json", action="store_true", help="for programs")
    commands.add_parser("check", help="moves data between all ranks; exit status 1 on failure")
    timeline = commands.add_parser("timeline", help="what the steps of a timeline spend their time on")
    timeline.add_argument("trace", help="the file that HPCSTRAT_TIMELINE named")
    timeline.add_argument("--plot", metavar="FILE", help="draws it (.png, .svg, .pdf)")
    timeline.add_argument("--steps", type=int, default=4, metavar="N", help="steps in the picture; 4 by default")
    timeline.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    if options.command == "info":
        from hpcstrat._cli.info import info as show

        return show(options.json)
    if options.command == "timeline":
        from hpcstrat._cli.timeline import timeline as show_timeline

        return show_timeline(options.trace, options.plot, options.steps, options.json)
    from hpcstrat._cli.check import check

    return check()


if __name__ == "__main__":
    sys.exit(main())
