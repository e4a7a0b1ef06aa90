"""The launcher that started this process, told from its environment alone."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from dataclasses import dataclass

_MARK = "_HPCSTRAT_PROCESS"  # tells the processes that a rank starts its process id and its job
# 2(x3): 2 tasks on each of 3 nodes.
_SLURM_TASKS = re.compile(r"(?P<tasks>[0-9]{1,18})(?:\(x(?P<nodes>[0-9]{1,18})\))?")
_MOST_NODES, _MOST_TASKS = 1 << 20, 1 << 24
"""A variable with more than these is an error, and no list is made of it."""
RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Variables that hold a rank; the first that is set counts."""


@dataclass(frozen=True)
class Launcher:
    """What the launcher tells about this process, before MPI starts.

    Attributes:
        name: for messages, e.g. `"mpirun of Open MPI"` or `"srun"`.
        rank: this process's index among all of the job.
        size: the number of processes, or None if the launcher does not tell (bare PMIx).
        local_rank: this process's index on its host, or None if the launcher does not tell.
        local_size: the number of processes on this host, or None if the launcher does not tell.
    """

    name: str
    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def alone(self) -> bool:
        """Whether the launcher started only one process."""
        return self.size == 1

    def describe(self) -> str:
        """Describes what it did, for messages."""
        if self.size is None:
            return f"{self.name} started this process as rank {self.rank}"
        return f"{self.name} started {self.size} processes"


def find() -> Launcher | None:
    """The launcher of this process, or None if it was started by hand.

    `mpirun` comes before `srun`, because on a cluster it starts its daemons, and so the ranks,
    through `srun`.

    Raises:
        RuntimeError: a variable is not as launchers set it.
    """
    if (size := _number("OMPI_COMM_WORLD_SIZE")) is not None:
        local = _number("OMPI_COMM_WORLD_LOCAL_RANK"), _number("OMPI_COMM_WORLD_LOCAL_SIZE")
        return Launcher("mpirun of Open MPI", _rank("OMPI_COMM_WORLD_RANK", size), size, *local)
    step_size = _step_number("SLURM_STEP_NUM_TASKS")
    if (size := _number("PMI_SIZE")) is not None:
        rank = _rank("PMI_RANK", size)
        if "MPI_LOCALRANKID" in os.environ or "HYDI_CONTROL_FD" in os.environ:
            local = _number("MPI_LOCALRANKID"), _number("MPI_LOCALNRANKS")
            intel = any(name.startswith("I_MPI_") and name != "I_MPI_ROOT" for name in os.environ)
            return Launcher(f"mpirun of {'Intel MPI' if intel else 'MPICH'}", rank, size, *local)
        # A step of srun may have PMI's variables as well, from its plug-in: `srun --mpi=pmi2`.
        if step_size is not None:
            return Launcher("srun", rank, size, _number("SLURM_LOCALID"), _step_tasks_here())
        local = _number("PMI_LOCAL_RANK"), _number("PMI_LOCAL_SIZE")
        return Launcher("a PMI launcher", rank, size, *local)
    rank = _number("PMIX_RANK")
    if rank is not None and "PRTE_LAUNCHED" in os.environ:
        return Launcher("prterun (PMIx)", rank)
    if step_size is not None:
        rank = _number("SLURM_PROCID") or 0  # above the size in a step of several components
        return Launcher("srun", rank, step_size, _number("SLURM_LOCALID"), _step_tasks_here())
    return None if rank is None else Launcher("a PMIx launcher", rank)


def gives_program() -> bool:
    """Whether this program comes from standard input, and that from the launcher itself."""
    # Python's own name for a program that it reads there; not with -c or -m, at a prompt or in a
    # notebook.
    if getattr(sys.modules.get("__main__"), "__file__", None) != "<stdin>":
        return False
    # A shell between the two may give each rank a program:
    # `mpirun -n 2 sh -c 'python - < prog.py'`.
    try:
        return stat.S_ISFIFO(os.fstat(0).st_mode) and find_process() == os.getppid()
    except OSError:  # the program has closed it
        return False


def mark_children() -> None:
    """From now on the processes that this rank starts know that they are not ranks (`is_child`)."""
    os.environ[_MARK] = f"{os.getpid()} {_job()}"


def is_child() -> bool:
    """Whether a rank started this process: it has the launcher's variables, but is not a rank."""
    # Not imported: a process that multiprocessing has started has the module already.
    multiprocessing = sys.modules.get("multiprocessing.process")
    if is_importing_child() or (
        multiprocessing is not None and multiprocessing.parent_process() is not None
    ):
        return True
    process, _, job = os.environ.get(_MARK, "").partition(" ")
    # Same job, other process: the variables were inherited. Other job: started by another launcher.
    if process and process != str(os.getpid()) and job == _job():
        return True
    # A child gets the number of the connection to the launcher, but mostly not the connection.
    return "PMIX_NAMESPACE" not in os.environ and bool(os.environ.get("PMI_FD")) and not _job()


def is_importing_child() -> bool:
    """Whether `multiprocessing` spawned this process, which still imports its parent's script."""
    # Not imported, as in `is_child`.
    multiprocessing = sys.modules.get("multiprocessing.process")
    return multiprocessing is not None and hasattr(multiprocessing.current_process(), "_inheriting")


def _job() -> str:
    """What tells this job from one that a rank of it starts; empty if nothing does."""
    if job := os.environ.get("PMIX_NAMESPACE"):
        return job
    # The socket itself: its number is the same in nearly every rank of every job.
    with contextlib.suppress(OSError, OverflowError):
        connection = os.fstat(_number("PMI_FD") or -1)
        if stat.S_ISSOCK(connection.st_mode):
            return str(connection.st_ino)
    return ""


def find_process() -> int | None:
    """The launcher's process that started this one, perhaps through shells and other wrappers.

    It is the nearest ancestor without the rank's variables, or of another user, as Slurm's is.
    `None` if the system does not show it.
    """
    # Wrappers between launcher and rank have the rank's variables too, so they are skipped.
    marks = [f"{name}={os.environ[name]}".encode() for name in RANK_NAMES if name in os.environ][:1]
    process = os.getppid()
    while marks and process > 1:
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if marks[0] not in file.read().split(b"\0"):
                    return process
            process = parent_of(process)
        except PermissionError:
            # Another user's process, such as Slurm's daemon: not one of our wrappers.
            return process
        except OSError:
            return None
    return None


def is_on_terminal() -> bool:
    """Whether the launcher's standard error, which gets this process's, is a terminal."""
    process = find_process()
    if process is None:
        return False
    try:
        with open(f"/proc/{process}/comm") as file:
            # The proxy is between MPICH's `mpirun` and the ranks of a host.
            if file.read().startswith("hydra_pmi_proxy"):
                process = parent_of(process)
        return os.readlink(f"/proc/{process}/fd/2").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:  # it has ended, or is another user's
        return False


def parent_of(process: int) -> int:
    """The process that started this one, or has adopted it; OSError if this one has ended."""
    return int(_fields_of(process)[1])


def is_there(process: int) -> bool:
    """Whether this process is alive."""
    try:
        return _fields_of(process)[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _fields_of(process: int) -> list[bytes]:
    """Its state, parent and so on, from /proc; OSError if it has ended."""
    with open(f"/proc/{process}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _expand_tasks(tasks: str) -> list[int]:
    """How many tasks each node runs, in the order of the nodes.

    Args:
        tasks: for instance `"2(x3),1"`.

    Raises:
        ValueError: it is not such a list, or has too many.

    >>> _expand_tasks("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    total, wrong = 0, f"{tasks!r:.200} is not a list of numbers of tasks"
    for part in tasks.split(","):
        if (match := _SLURM_TASKS.fullmatch(part)) is None:
            raise ValueError(f"{wrong}: {part!r:.50} is not like 2 or 2(x3)")
        count, nodes = int(match["tasks"]), int(match["nodes"] or 1)
        total += count * nodes
        if len(counts) + nodes > _MOST_NODES or total > _MOST_TASKS:
            raise ValueError(
                f"{wrong}: it has more than {_MOST_TASKS} tasks, or than {_MOST_NODES} nodes"
            )
        counts += [count] * nodes
    return counts


def _number(name: str) -> int | None:
    """The variable as a number, None if it is not set; RuntimeError if it is not a number."""
    if not (value := os.environ.get(name, "")):
        return None
    if not re.fullmatch(r"[0-9]{1,18}", value):
        # Not `None`: two processes would be rank 0.
        raise _wrong(name, value, "a number from 0 up")
    return int(value)


def _rank(name: str, size: int) -> int:
    """The variable as a rank, 0 where it is not set; RuntimeError if it is none of this size."""
    rank = _number(name) or 0
    if rank >= size:
        raise _wrong(name, str(rank), f"below {size}, the number of ranks")
    return rank


def _wrong(name: str, value: str, allowed: str) -> RuntimeError:
    return RuntimeError(
        f"the environment variable {name} is {value!r:.50}; it must be {allowed}, as the launcher "
        "sets it"
    )


def _step_number(name: str) -> int | None:
    """As `_number`, but None outside a step of `srun`: the batch script has the variables too."""
    step = _number("SLURM_STEP_ID")
    special_steps = 0xFFFFFFF0  # from here up: the batch script, an interactive shell and the like
    return None if step is None or step >= special_steps else _number(name)


def _step_tasks_here() -> int | None:
    """The number of the step's tasks on this node; None if Slurm does not tell."""
    node, name = _number("SLURM_NODEID"), "SLURM_STEP_TASKS_PER_NODE"
    if not (value := os.environ.get(name, "")):
        return None
    try:
        tasks = _expand_tasks(value)
    except ValueError as error:
        raise RuntimeError(
            f"the environment variable {name}: {error}; it must be as srun sets it"
        ) from error
    return tasks[node] if node is not None and node < len(tasks) else None
