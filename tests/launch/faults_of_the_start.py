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
LEFT_EARLY = r"rank 1 left the program by sys\.exit\({}\) before the ranks were connected|Process name: \[.*,1\]"
CHILD = (
    r"hpcstrat cannot connect the ranks: a rank has started this process \(\d+\), so it is not a rank\. "
    "Make strategies and collective calls only in the ranks: put them under `if __name__ == '__main__':`"
)


def early(program, error, rank=1, **others):
    """An exception before the ranks are connected: nothing of it is left in shared memory."""
    return replace(raised(program + CONNECT, error, rank, **others), begin=IMPORT)


def left(program, value, **others):
    """`sys.exit` with a status before the ranks are connected.

    Open MPI's launcher notices that itself.
    """
    return Fault(program + CONNECT, [LEFT_EARLY.format(value)], begin=IMPORT, ranks=2, **others)


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
    "early: sys.exit(3)": left("if last: sys.exit(3)", 3, status=3),
    "early: sys.exit of a text": left("if last: sys.exit('no data')", "'no data'", status=1),
    "early: exit(3)": left("if last: exit(3)", 3, status=3),
    "early: sys.exit(3) where MPI has started": left(
        "from mpi4py import MPI\nif last: sys.exit(3)", 3, status=3
    ),
    "early: sys.exit(3) of all": Fault("sys.exit(3)", status=3, begin=IMPORT, ranks=2),
    "early: sys.exit(3), caught": Fault(
        "def main():\n    try: sys.exit(3)\n    except SystemExit: pass\nmain()" + CONNECT,
        prints=[r"went on\n\Z"],
        status=0,
        begin=IMPORT,
        ranks=2,
    ),
    "early: sys.exit(3), caught, and no strategy": Fault(
        "def main():\n    try: sys.exit(3)\n    except SystemExit: pass\nmain()\nprint('through')",
        prints=[r"\Athrough\n\Z"],
        status=0,
        begin=IMPORT,
        ranks=2,
    ),
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
