"""Faults before the first strategy: the others wait in MPI, come later, or have not started."""

from dataclasses import replace

from fault import Fault
from faults_of_errors import raised

IMPORT = """
import sys, time
import hpcstrat as hs

rank, last = hs.rank(), hs.rank() == 1
"""
CONNECT = "\nhs.CentralStorageStrategy()\nprint('went on')\n"
CHILD = (
    r"hpcstrat cannot connect the ranks: a rank has started this process \(\d+\), so it is not a rank\. "
    "Make strategies and collective calls only in the ranks: put them under `if __name__ == '__main__':`"
)


def early(program, error, rank=1, **others):
    """An exception before the ranks are connected: nothing of it is left in shared memory."""
    return replace(raised(program + CONNECT, error, rank, **others), begin=IMPORT)


EARLY = {
    "early: an exception": early("if last: raise ValueError('the cause')", "ValueError: the cause"),
    "early: an exception of rank 0": early("if rank == 0: 1 / 0", "ZeroDivisionError", rank=0),
    "early: an import that fails": early(
        "if last: import no_such_module", "ModuleNotFoundError: .*no_such_module"
    ),
    "early: an exception while the others compute": early(
        "if last: raise ValueError('the cause')\ncompute()", "ValueError: the cause"
    ),
    "early: an exception where MPI has started": early(
        "from mpi4py import MPI\nif last: raise ValueError('the cause')", "ValueError: the cause"
    ),
    "early: an exception where mpi4py starts nothing": early(
        "import mpi4py\nmpi4py.rc.initialize = False\nif last: raise ValueError('the cause')",
        "ValueError: the cause",
    ),
    "early: an exception of all": early("open('/no/such/file')", "FileNotFoundError", rank=0),
    "early: a warning that is an error": early(
        "",
        "UserWarning: .*did you mean HPCSTRAT_CHECK",
        rank=0,
        env={"HPCSTRAT_CHEK": "1", "PYTHONWARNINGS": "error"},
    ),
    "early: sys.exit(3) of all": Fault("sys.exit(3)", status=3, begin=IMPORT, ranks=2),
    "early: a strategy in a child": Fault(
        """
        import subprocess
        hs.barrier()
        if last:
            child = subprocess.run([sys.executable, "-c", "import hpcstrat as hs; hs.barrier()"], timeout=60)
            assert child.returncode == 1
        hs.barrier()
        raise ValueError("the end")
        """,
        [CHILD, "ValueError: the end"],
        "Traceback",
        begin=IMPORT,
        ranks=2,
    ),
    "early: a spawned process without a main guard": Fault(
        """
        import multiprocessing
        strategy = hs.CentralStorageStrategy()
        if last:
            child = multiprocessing.get_context("spawn").Process(target=abs, args=(1,))
            child.start()
            child.join()
        hs.barrier()
        print("went on")
        """,
        [CHILD],
        CHILD,
        begin=IMPORT,
        ranks=2,
    ),
}
