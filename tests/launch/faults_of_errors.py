"""Faults that end a rank: its own exit, a signal, an exception, a call that does not match."""

from dataclasses import replace

from fault import (
    BEGIN,
    CLOSED_OR_LAUNCHER,
    HERE,
    LEFT,
    WAIT,
    Fault,
    ended,
    raised,
)


def never(pattern):
    return rf"\A(?![^\0]*{pattern})"


# Python's lines, unless the program prints other ones.
CRASHED = r"Fatal Python error: (Segmentation fault|Aborted)\n(.*\n)+.*program_\w+\.py"

ENDS = {
    "os._exit(0)": ended("if last: os._exit(0)", CLOSED_OR_LAUNCHER),
    "SIGKILL of rank 0": ended("if rank == 0: die()", CLOSED_OR_LAUNCHER),
    "SIGKILL while the others compute": Fault(
        "if last: die()\ncompute()", [CLOSED_OR_LAUNCHER], ranks=2
    ),
    "SIGSEGV": ended("if last: ctypes.string_at(0)", CLOSED_OR_LAUNCHER, CRASHED),
    "SIGSEGV where the program writes such faults to a file": ended(
        "import faulthandler\nfaulthandler.enable(open('faults', 'w'))\nif last: "
        "ctypes.string_at(0)",
        never("Fatal Python error"),
    ),
    "SIGTERM": ended("if last: os.kill(os.getpid(), signal.SIGTERM)", CLOSED_OR_LAUNCHER),
    "SIGINT": ended(
        "if last: os.kill(os.getpid(), signal.SIGINT)", r"\[rank 1\] KeyboardInterrupt"
    ),
    "SIGTERM of all": ended("if rank == 0: os.kill(mpirun(), signal.SIGTERM)\ntime.sleep(1000)"),
    "Ctrl-C twice": ended(
        "if rank == 0:\n    for _ in range(2): os.kill(mpirun(), signal.SIGINT); "
        "time.sleep(0.2)\ntime.sleep(1000)"
    ),
    "sys.exit(3)": ended("if last: sys.exit(3)", f"rank 1 {LEFT}"),
    "sys.exit(0)": ended("if last: sys.exit()", f"rank 1 {LEFT}"),
    "sys.exit(0) in a dataset": Fault(
        """
        def rows():
            for i in range(100):
                if i == 50 and last: sys.exit()
                yield np.float32(i)
        dataset = hs.data.Dataset.from_generator(rows).batch(6)
        for batch in strategy.experimental_distribute_dataset(dataset): pass
        """,
        [r"\[rank 2\] SystemExit", r"\[rank 2\] .* this exception interrupted iterating over"],
        r"\[rank 2\] Traceback",
    ),
    "sys.exit(3) of all": Fault("sys.exit(3)", status=3, ranks=2),
    "an early end": Fault(
        "if not last:\n    for _ in range(3): hs.barrier()",
        [rf"hpcstrat: rank [01] waits in barrier\(\), at {HERE}<module>; rank 2 {LEFT}"],
    ),
}


TWO_LINES = r"ValueError: the cause\n\[rank \d\] in two lines\n"

ERRORS = {
    "an exception": raised(
        "if last: raise ValueError('the cause\\nin two lines')" + WAIT, TWO_LINES, rank=2, ranks=3
    ),
    "an exception while the others compute": raised(
        "if last: 1 / 0\ncompute()", "ZeroDivisionError"
    ),
    "an error of a GPU that is found as the program ends": raised(
        """
        class Gpu:
            def close(self):  # by which the others wait for this one
                if last: raise RuntimeError("an illegal address")
                time.sleep(1000)
        hs._transports.connection._connected["its GPU"] = Gpu()
        """,
        "RuntimeError: an illegal address",
    ),
    "an exception of all": Fault(
        "sys.stdout.write('an unfinished line')\nraise ValueError('the cause')",
        [r"\[rank 0\] ValueError: the cause", never(r"\[rank [12]\]")],
        r"\[rank 0\] Traceback",
        prints=["an unfinished line"],
    ),
    "an exception and its consequence, which comes first": Fault(
        """
        from hpcstrat._process import failure
        failure._CONSEQUENCE_DELAY = 30
        hs.barrier()
        if last:
            time.sleep(0.3)
            raise ValueError("the cause")
        error = RuntimeError("a peer has gone")
        failure.mark_as_consequence(error)
        raise error
        """,
        [r"\[rank 1\] ValueError: the cause", never("a peer has gone")],
        r"\[rank 1\] Traceback",
        ranks=2,
    ),
    "an exception that the program's own hook prints": Fault(
        "if last: raise ValueError('the cause')" + WAIT,
        [never("Traceback")],
        r"\[rank 1\] pretty ValueError",
        begin="sys.excepthook = lambda kind, *_: print('pretty', kind.__name__, file=sys.stderr)"
        + BEGIN,
        ranks=2,
    ),
    "a thread that ends the job": Fault(
        """
        from hpcstrat._process import failure
        end = threading.Thread(target=failure.end_job, args=("rank 0 waits\\nsince a minute",))
        if last: end.start()
        time.sleep(60)
        """,
        [r"\[rank 1\] since a minute"],
        r"\[rank 1\] rank 0 waits",
        status=1,
        ranks=2,
    ),
    "one rank that ends the job": Fault(
        "from hpcstrat._process import failure\nprint('before')\nfailure.end_job('it ends')",
        first="it ends",
        prints=[r"\Abefore\n\Z"],
        status=1,
        ranks=1,
    ),
    "the end of the program while a thread is in a call": raised(
        """
        from hpcstrat._transports.connection import connect
        if not last: compute()
        threading.Thread(target=hs.barrier, daemon=True).start()
        while not connect().calls.waiting.depth: time.sleep(0.01)
        """,
        "RuntimeError: the end of the program was called in the thread 'MainThread'",
    ),
    "an exception in a thread": raised(
        """
        def fail(): raise ValueError("the cause\\nin two lines")
        if last: threading.Thread(target=fail).start()
        time.sleep(60)
        """,
        TWO_LINES,
    ),
    "an exception in the function of merge_call": raised(
        """
        def merge(strategy, value):
            if last: 1 / 0
            return strategy.reduce("SUM", value, None)
        strategy.run(lambda: hs.get_replica_context().merge_call(merge, (np.ones(3),)))
        """,
        "ZeroDivisionError",
    ),
    "an exception in the function of an update": raised(
        """
        with strategy.scope(): v = hs.Variable(np.zeros(3))
        def update(v):
            if last: 1 / 0
            v.assign(np.ones(3))
        strategy.extended.update(v, update)
        """,
        "ZeroDivisionError",
    ),
    "an exception after MPI has ended": Fault(
        "hs.barrier()\nMPI.Finalize()\nif last: raise ValueError('late')",
        [r"ValueError: late"],
        ranks=2,
    ),
}


MISMATCHES = {
    "another call": Fault(
        """
        v = strategy.run(lambda: np.ones((2, 3), np.float32))
        hs.barrier() if last else strategy.reduce("SUM", v, None)
        """
        + WAIT,
        [
            "hpcstrat.*ReplicaMismatchError: ",
            rf"ranks 0, 1: Strategy\.reduce\(SUM.*, at {HERE}<module>",
            rf"rank 2: barrier\(\), at {HERE}",
        ],
        r"\[rank 0\] Traceback",
    ),
    "other calls and values, each caught on all ranks": Fault(
        """
        ones = np.ones(3)
        with strategy.scope(): v, optimizer = hs.Variable(ones), hs.optimizers.SGD(1.0)
        def made(value):
            with strategy.scope(): hs.Variable(value)
        def apply(value): optimizer.apply_gradients([(value, v)])
        for usual, odd in [
            (lambda: v.assign(ones), lambda: v.assign_sub(ones)),
            (lambda: v.assign(ones), lambda: v.assign(ones + 1)),
            (lambda: made(ones), lambda: made(ones + 1)),
            (lambda: apply(0 * ones), lambda: apply(ones)),
        ]:
            for _ in range(3):
                try: odd() if last else usual()
                except hs.ReplicaMismatchError as error:
                    assert all(f"rank {other}: " in str(error) for other in range(2)), error
                    assert not hs.any_rank(False)
                    print("caught")
                assert (v.numpy() == 1).all()
        v.assign_add(ones)
        print("sum", strategy.reduce("SUM", strategy.run(lambda: v + 0), None))
        """,
        prints=[r"\A(caught\n){12}sum \[4\. 4\. 4\.\]\n\Z"],
        status=0,
        ranks=2,
        env={"HPCSTRAT_CHECK": "1"},
    ),
    "another structure of results, checked": Fault(
        "strategy.run(lambda: list(range(rank)))" + WAIT,
        [
            r"rank 0: Strategy\.run\(HPCSTRAT_CHECK: returns \[\]\)",
            r"rank 2: .*returns \[\*, \*\]\)",
        ],
        r"\[rank 0\] Traceback",
        env={"HPCSTRAT_CHECK": "1"},
    ),
    "variables of two strategies": Fault(
        """
        other = hs.MirroredStrategy()
        with strategy.scope(): a = hs.Variable(1.0)
        with other.scope(): b = hs.Variable(1.0)
        (b if last else a).assign(2.0)
        hs.barrier()
        print("went on")
        """,
        [
            r"ranks 0, 1: Variable\.assign of .* of storage \d",
            r"rank 2: Variable\.assign of .* of storage \d",
        ],
        r"\[rank 0\] Traceback",
    ),
}

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
    "early: an exception while the others compute": early(
        "if last: raise ValueError('the cause')\ncompute()", "ValueError: the cause"
    ),
    "early: an exception where MPI has started": early(
        "from mpi4py import MPI\nif last: raise ValueError('the cause')", "ValueError: the cause"
    ),
    "early: an exception of all": early("open('/no/such/file')", "FileNotFoundError", rank=0),
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
