"""`python -m hpcstrat run`: starts a program on several ranks, through mpi4py's mpiexec."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hpcstrat._core import gpu
from hpcstrat._process import launchers
from hpcstrat._tools.launch import mpiexec, restarts
from hpcstrat._tools.launch.mpiexec import Job, LaunchError, say
from hpcstrat._tools.launch.policy import Policy

_HEAD_START_S = 10.0  # for rank 0's message, on a machine on which ranks start slowly
_EXAMPLES = """
  hpcstrat run train.py --epochs 3            one rank per GPU of this host, or else per core
  hpcstrat run -n 4 --bind train.py           each rank on the cores near its GPU
  hpcstrat run -n 4 --share-gpu train.py      four ranks on one GPU
  hpcstrat run -n 2 -m my.package             as python -m my.package
  hpcstrat run -n 2 - < train.py              a program from standard input; also -c CODE
"""


def add_parser(commands: Any) -> None:
    """Adds the command to those of `python -m hpcstrat`."""
    parser = commands.add_parser(
        "run",
        help="starts a program on several ranks",
        usage="%(prog)s [OPTIONS] PROGRAM [ARGUMENT ...]",
        description=(
            "Starts a program on several ranks, through the mpiexec of the MPI that mpi4py loads."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add, flag = parser.add_argument, {"action": "store_true"}
    ranks = (
        "ranks; by default one per GPU of this host, or else per core; "
        "in a Slurm job, the number of its tasks"
    )
    add("-n", type=_count, metavar="N", help=ranks)
    for option, what in (("-m", "a module"), ("-c", "Python code")):
        text = f"PROGRAM is {what}, as for python {option}"
        add(option, action="store_const", const=option, dest="option", help=text)
    add("--bind", help="each rank on the cores and the memory near its GPU", **flag)
    add("--share-gpu", help="several ranks on a GPU, inside an MPS daemon", **flag)
    add("--nccl", metavar="FILE", help="with --share-gpu, preload this libnccl.so.2")
    add("--tee", metavar="DIR", help="copy the whole output of each rank N to DIR/rank-N.log")
    add("--prefix", help="start each line with its rank, as in [rank 0]", **flag)
    again = "when a rank dies, start the ranks again, K times at most; see docs/resilience.md"
    add("--restarts", type=_count, default=0, metavar="K", help=again)
    fewer = "with --restarts, continue with as few as M ranks"
    add("--min-ranks", type=_count, metavar="M", help=fewer)
    add("--mpiexec", metavar="COMMAND", help="use this mpiexec, which may be given with options")
    add("--dry-run", help="print the command line that would start the ranks", **flag)
    program = "a Python file, a folder with __main__.py, an executable, or -"
    add("program", metavar="PROGRAM", help=program)
    add("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the program's own")


def run(options: argparse.Namespace) -> int:
    """Runs the program; returns its exit status, or 2 if no rank could be started."""
    try:
        _refuse_other_launchers(options)
        if options.nccl is not None and not options.share_gpu:
            raise LaunchError("--nccl goes with --share-gpu")
        if options.min_ranks is not None and not options.restarts:
            raise LaunchError("--min-ranks goes with --restarts")
        ranks = options.n or _default_ranks()
        if options.min_ranks is not None and options.min_ranks > ranks:
            raise LaunchError(f"--min-ranks is {options.min_ranks}, more than the {ranks} ranks")
        with _program(options) as program:
            job = Job(mpiexec.find_starter(options.mpiexec), program, options)
            if options.dry_run:
                print(job.command_line(ranks))
                return 0
            with job.passing_signals_on():
                policy = Policy(ranks, options.restarts, options.min_ranks or ranks)
                return restarts.run(job, policy)
    except LaunchError as error:
        say(str(error))
        return 2


def _program(options: argparse.Namespace) -> AbstractContextManager[list[str]]:
    """A block with the command of the program."""
    if options.program != "-" or options.option is not None:
        words = [options.program, *options.arguments]
        return contextlib.nullcontext(python_command(words, options.option))
    if options.dry_run:
        raise LaunchError(
            "--dry-run prints a command line to use later, when standard input is gone; name a file"
        )
    if sys.stdin is None:
        raise LaunchError("standard input, which the program - comes from, is closed")
    return _from_input(options.arguments)


def _count(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r:.50} is not a number from 1 to 9,999,999")
    return int(text)


def _default_ranks() -> int:
    if mpiexec.in_allocation():
        tasks = os.environ.get("SLURM_NTASKS", "")
        if not re.fullmatch("[1-9][0-9]{0,6}", tasks):
            what = (
                f"SLURM_NTASKS is {tasks!r:.50}"
                if tasks
                else "this Slurm job has no number of tasks"
            )
            raise LaunchError(
                f"{what}: give a number of tasks to sbatch or salloc, or here with -n"
            )
        return int(tasks)
    try:
        gpus = len(gpu.visible_gpus())
    except gpu.DriverError as error:
        raise LaunchError(f"{error}; -n N starts N ranks nevertheless") from None
    ranks = gpus or mpiexec.physical_cores()
    each = "GPU" if gpus else "core"
    say(f"-n {ranks}, one rank for each {each} of this host")
    return ranks


def _refuse_other_launchers(options: argparse.Namespace) -> None:
    """Exits under another launcher, each of whose processes would start a separate job."""
    words = [*([options.option] if options.option else []), options.program, *options.arguments]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        name, size = "torchrun", os.environ.get("WORLD_SIZE", "N")
        is_first = not re.fullmatch("0*[1-9][0-9]*", os.environ.get("RANK", ""))
        instead = f"hpcstrat run -n {size} {shlex.join(words)}"
    else:
        launcher = launchers.find()
        if launcher is None:
            return
        name, is_first = launcher.name, launcher.rank == 0
        size = options.n or launcher.size or "N"
        instead = f"{name.split()[0]} -n {size} python {shlex.join(words)}"
    if is_first:
        say(
            f"{name} has started this process already; start the ranks with one launcher: "
            f"`{instead}`"
        )
    else:
        time.sleep(_HEAD_START_S)  # the launcher ends all ranks when the first fails
    os._exit(2)  # sys.exit would end the job as a rank's error does, with more output


# ---- the command of a program


def python_command(words: Sequence[str], option: str | None) -> list[str]:
    """The command of a program that was named as for `python`; other programs stay unchanged.

    Args:
        words: the program and its arguments.
        option: `-m` or `-c` of `python`, or None for a file.

    Raises:
        LaunchError: there is no such file and no such program.
    """
    first = words[0]
    if option is not None:
        return [sys.executable, option, *words]
    if first == "python":
        return [sys.executable, *words[1:]]
    is_source = first.endswith((".py", ".pyz")) or os.path.isdir(first)
    if os.path.exists(first) and (is_source or not os.access(first, os.X_OK)):
        return [sys.executable, *words]
    if not first.endswith(".py") and shutil.which(first) is not None:
        return list(words)
    raise LaunchError(f"there is no file {first!r}, and no program of this name")


@contextlib.contextmanager
def _from_input(arguments: Sequence[str]) -> Iterator[list[str]]:
    """A block with the command of a Python program that is read from standard input once."""
    # In a Slurm job, in the working directory, which its other nodes see too.
    folder = os.curdir if mpiexec.in_allocation() else None
    with tempfile.NamedTemporaryFile(prefix="hpcstrat-", suffix=".py", dir=folder) as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        read = 'file=$1; shift; exec "$0" - "$@" <"$file"'
        yield ["sh", "-c", read, sys.executable, os.path.abspath(file.name), *arguments]
