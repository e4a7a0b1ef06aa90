"""The MPI library: compared with the launcher, and started without blocking Python's threads."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from typing import Any, NoReturn

from hpcstrat._process import launchers, segments

_DEFAULTS = {
    # Otherwise Open MPI 5 prints an error for every shared window.
    "OMPI_MCA_osc": "^ucx",
    # It takes a second to start and serves only one-sided messages between hosts.
    "OMPI_MCA_btl": "^ofi",
}
_OF_OPEN_MPI = ("mpirun of Open MPI", "prterun (PMIx)")
_OF_MPICH = ("mpirun of MPICH", "mpirun of Intel MPI")
_MPICHS = ("MPICH", "MVAPICH", "MVAPICH2", "Intel MPI")


def load() -> Any:
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


def start(mpi: Any) -> None:
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
    # As mpi4py's import would do it; if the user has switched that off, its thread level expresses
    # no preference.
    level = "multiple" if not rc.initialize else rc.thread_level if rc.threads else "single"
    # Not by mpi4py, which keeps the interpreter lock while all ranks wait for each other: no other
    # thread could say so, or end that.
    library, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    status = library.MPI_Init_thread(
        None, None, getattr(mpi, f"THREAD_{level.upper()}"), ctypes.byref(provided)
    )
    if status:
        raise RuntimeError(
            f"hpcstrat cannot connect the ranks: MPI_Init_thread returned {status}; look at what "
            "MPI printed"
        )
    if rc.errors == "exception":  # as mpi4py does where it starts MPI
        mpi.COMM_SELF.Set_errhandler(mpi.ERRORS_RETURN)
        mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)
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
        refuse(launcher, mpi, "is another")


def _check_shared_memory(launcher: launchers.Launcher | None, mpi: Any) -> None:
    """Refuses a missing or full `/dev/shm`: MPI's start would end in its own errors or a bus error.

    The limit is measured: MPICH 5 always starts with 24 MiB for 2 ranks, 32 MiB for 4 and 56 MiB
    for 8. It takes 5.2 MiB per rank, and yet can end in a segmentation fault with up to 7 per rank.
    """
    if not os.access(segments.FOLDER, os.W_OK):
        vendor, version = mpi.get_vendor()
        # Even for one rank; Open MPI and MPICH 4 can use another folder.
        if vendor == "MPICH" and version >= (5,):
            what = "cannot be written to" if os.path.exists(segments.FOLDER) else "does not exist"
            raise RuntimeError(
                f"{segments.FOLDER} {what}, and MPI (MPICH {'.'.join(map(str, version))}) does not "
                "start without it. Give a container one (`--shm-size=1g`; as root, `mount -t tmpfs "
                "tmpfs /dev/shm`), or use Open MPI, which does not need it"
            )
        return
    ranks = 0 if launcher is None else launcher.local_size or 0
    if ranks < 2:  # one alone shares no memory; or the launcher does not tell
        return
    system = os.statvfs(segments.FOLDER)
    free, needed = system.f_bavail * system.f_frsize / 2**20, max(16 + 4 * ranks, 7 * ranks)
    if free < needed and not _is_mpi_starting():
        raise RuntimeError(
            f"{segments.FOLDER} has {free:.0f} MiB left, and MPI takes up to {needed} MiB of it "
            f"for the {ranks} ranks of this host; with less it can end in a bus error. Give a "
            f"container more (`--shm-size=1g`), or see what fills it (`ls -l {segments.FOLDER}`)"
        )


def _is_mpi_starting() -> bool:
    """Whether a rank is starting MPI: it has found enough memory for all, and taken some of it."""
    launcher = launchers.find_process()
    return launcher is not None and segments.is_mpi_starting(launcher)


def _speaks_pmix() -> bool:
    """Whether the MPI library was built with PMIx: Open MPI's launcher can then start its ranks."""
    try:
        with open("/proc/self/maps") as maps:
            return any("libpmix" in line for line in maps)
    except OSError:
        return True


def refuse(launcher: launchers.Launcher, mpi: Any, what: str) -> NoReturn:
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
