"""`python -m hpcstrat run`: starts a program on several ranks, through mpi4py's mpiexec."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hpcstrat._process import driver, launchers, worlds
from hpcstrat._tools.launch import mpiexec, restarts
from hpcstrat._tools.launch.job import Job
from hpcstrat._tools.launch.mpiexec import LaunchError
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
    parser.add_argument(
        "-n",
        type=_count,
        metavar="N",
        help="ranks; by default one per GPU of this host, or else per core; "
        "in a Slurm job, the number of its tasks",
    )
    for option, what in (("-m", "a module"), ("-c", "Python code")):
        parser.add_argument(
            option,
            action="store_const",
            const=option,
            dest="option",
            help=f"PROGRAM is {what}, as for python {option}",
        )
    parser.add_argument(
        "--bind", action="store_true", help="each rank on the cores and the memory near its GPU"
    )
    parser.add_argument(
        "--share-gpu", action="store_true", help="several ranks on a GPU, inside an MPS daemon"
    )
    parser.add_argument(
        "--nccl", metavar="FILE", help="with --share-gpu, preload this libnccl.so.2"
    )
    parser.add_argument(
        "--tee", metavar="DIR", help="copy the whole output of each rank N to DIR/rank-N.log"
    )
    parser.add_argument(
        "--prefix", action="store_true", help="start each line with its rank, as in [rank 0]"
    )
    parser.add_argument(
        "--restarts",
        type=_count,
        default=0,
        metavar="K",
        help="when a rank dies, start the ranks again, K times at most; see docs/resilience.md",
    )
    parser.add_argument(
        "--min-ranks",
        type=_count,
        metavar="M",
        help="with --restarts, continue with as few as M ranks",
    )
    parser.add_argument(
        "--mpiexec", metavar="COMMAND", help="use this mpiexec, which may be given with options"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command line that would start the ranks"
    )
    parser.add_argument(
        "program",
        metavar="PROGRAM",
        help="a Python file, a folder with __main__.py, an executable, or -",
    )
    parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the program's own"
    )


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
            job, variables = _job(program, options)
            if options.dry_run:
                print(_command_line(job, ranks, variables(ranks), options))
                return 0
            with job.passing_signals_on():
                policy = Policy(ranks, options.restarts, options.min_ranks or ranks)
                return restarts.run(job, policy, variables)
    except LaunchError as error:
        _say(str(error))
        return 2


def _say(text: str) -> None:
    print(f"hpcstrat run: {text}", file=sys.stderr)


def _program(options: argparse.Namespace) -> AbstractContextManager[list[str]]:
    """A block with the command of the program."""
    if options.program != "-" or options.option is not None:
        words = [options.program, *options.arguments]
        return contextlib.nullcontext(mpiexec.python_command(words, options.option))
    if options.dry_run:
        raise LaunchError(
            "--dry-run prints a command line to use later, when standard input is gone; name a file"
        )
    if sys.stdin is None:
        raise LaunchError("standard input, which the program - comes from, is closed")
    return mpiexec.from_input(options.arguments)


def _job(
    program: list[str], options: argparse.Namespace
) -> tuple[Job, Callable[[int], dict[str, str]]]:
    """The job, and a function that returns the variables for a number of ranks."""
    if options.bind:
        program = mpiexec.bind(program)
    starts = 0

    def rank_command() -> list[str]:
        nonlocal starts
        starts += 1
        if not (options.tee or options.prefix):
            return program
        return mpiexec.copy_output(program, options.tee, options.prefix, appends=starts > 1)

    def around() -> AbstractContextManager[dict[str, str]]:
        # A new MPS daemon for each start: when its ranks die, it may no longer serve others.
        return mpiexec.mps_daemon(options.nccl) if options.share_gpu else contextlib.nullcontext({})

    if mpiexec.in_allocation():
        mpirun = _slurm_mpirun(options.mpiexec)
        # No variables for threads: Slurm decides which cores of which node a task gets.
        return (
            Job(
                lambda ranks, environment: mpiexec.allocation_command(rank_command()),
                signal.SIGTERM,
                (),
                around,
            ),
            lambda ranks: {"SLURM_NTASKS": str(ranks)} | mpirun,
        )
    starter = mpiexec.find(options.mpiexec)

    def command(ranks: int, environment: dict[str, str]) -> list[str]:
        return starter.command(ranks, rank_command(), environment)

    return (
        Job(command, starter.vendor.end_signal, starter.vendor.kept, around),
        lambda ranks: worlds.thread_variables(
            worlds.share_of_cores([worlds.own_cores()] * ranks, 0)
        ),
    )


def _command_line(
    job: Job, ranks: int, environment: dict[str, str], options: argparse.Namespace
) -> str:
    words = job.command(ranks, environment)
    if options.share_gpu:
        words = mpiexec.share_gpus(words, options.nccl)
    return shlex.join([*(f"{name}={value}" for name, value in environment.items()), *words])


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
        gpus = len(driver.visible_gpus())
    except driver.DriverError as error:
        raise LaunchError(f"{error}; -n N starts N ranks nevertheless") from None
    ranks = gpus or mpiexec.physical_cores()
    each = "GPU" if gpus else "core"
    _say(f"-n {ranks}, one rank for each {each} of this host")
    return ranks


def _slurm_mpirun(named: str | None) -> dict[str, str]:
    """The variable that names the mpirun to start-ranks; empty without one: it then uses srun."""
    try:
        return {"MPIRUN": shlex.join(mpiexec.find(named).words)}
    except LaunchError:
        if named is not None:
            raise
        return {}


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
        _say(
            f"{name} has started this process already; start the ranks with one launcher: "
            f"`{instead}`"
        )
        sys.stderr.flush()
    else:
        time.sleep(_HEAD_START_S)  # the launcher ends all ranks when the first fails
    os._exit(2)  # sys.exit would end the job as a rank's error does, with more output
