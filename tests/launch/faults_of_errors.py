"""Faults that end a rank: its own exit, a signal, an exception, a call that does not match."""

from fault import CLOSED, HERE, LEFT, WAIT, Fault


def ended(program, *says, ranks=2, **others):
    """A rank that ends by itself, without an error."""
    return Fault(program + WAIT, says, ranks=ranks, **others)


# What the launcher prints if it notices the end before the watchdog does.
CLOSED_OR_LAUNCHER = rf"{CLOSED}|BAD TERMINATION|[Ss]ignal|PMI|exited|terminated"

# Python's lines, unless the program prints other ones.
CRASHED = r"Fatal Python error: (Segmentation fault|Aborted)\n(.*\n)+.*program_\w+\.py"

ENDS = {
    "os._exit(0)": ended("if last: os._exit(0)", CLOSED_OR_LAUNCHER),
    "os._exit(0) of rank 0": ended("if rank == 0: os._exit(0)", CLOSED_OR_LAUNCHER),
    "os._exit(5)": ended("if last: os._exit(5)", CLOSED_OR_LAUNCHER),
    "SIGKILL": ended("if last: os.kill(os.getpid(), signal.SIGKILL)", CLOSED_OR_LAUNCHER, ranks=3),
    "SIGKILL of rank 0": ended(
        "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)", CLOSED_OR_LAUNCHER
    ),
    "SIGKILL while the others compute": Fault(
        "if last: os.kill(os.getpid(), signal.SIGKILL)\ncompute()", [CLOSED_OR_LAUNCHER], ranks=2
    ),
    "SIGSEGV": ended("if last: ctypes.string_at(0)", CLOSED_OR_LAUNCHER, CRASHED),
    "SIGABRT": ended("if last: os.abort()", CLOSED_OR_LAUNCHER, CRASHED),
    "SIGSEGV where the program writes such faults to a file": ended(
        "import faulthandler\nfaulthandler.enable(open('faults', 'w'))\nif last: "
        "ctypes.string_at(0)",
        r"\A(?![^\0]*Fatal Python error)",
    ),
    "SIGTERM": ended("if last: os.kill(os.getpid(), signal.SIGTERM)", CLOSED_OR_LAUNCHER),
    "SIGINT": ended(
        "if last: os.kill(os.getpid(), signal.SIGINT)", r"\[rank 1\] KeyboardInterrupt"
    ),
    "SIGTERM of all": ended("if rank == 0: os.kill(mpirun(), signal.SIGTERM)\ntime.sleep(1000)"),
    "Ctrl-C": ended("if rank == 0: os.kill(mpirun(), signal.SIGINT)\ntime.sleep(1000)"),
    "Ctrl-C twice": ended(
        "if rank == 0:\n    for _ in range(2): os.kill(mpirun(), signal.SIGINT); "
        "time.sleep(0.2)\ntime.sleep(1000)"
    ),
    "Ctrl-C in a call": ended("if rank == 0: os.kill(mpirun(), signal.SIGINT); time.sleep(1000)"),
    "sys.exit(3)": ended("if last: sys.exit(3)", f"rank 1 {LEFT}"),
    "sys.exit(3) of rank 0": ended("if rank == 0: sys.exit(3)", f"rank 0 {LEFT}"),
    "sys.exit(0)": ended("if last: sys.exit()", f"rank 1 {LEFT}"),
    "sys.exit(3) of all": Fault("sys.exit(3)", status=3, ranks=2),
    "exit(code=3) of all": Fault("exit(code=3)", status=3, ranks=2),
    "an early end": Fault(
        "if not last:\n    for _ in range(3): hs.barrier()",
        [rf"hpcstrat: rank [01] waits in barrier\(\), at {HERE}<module>; rank 2 {LEFT}"],
    ),
}


def raised(program, error, rank=1, ranks=2, **others):
    """An exception of one rank: its traceback comes first."""
    says, first = [rf"\[rank {rank}\] {error}"], rf"\[rank {rank}\] (Traceback|Exception in thread)"
    return Fault(program, says, first, ranks=ranks, **others)


IN_RUN = """
def step():
    if last: {}
    return hs.get_replica_context().all_reduce("SUM", np.ones(3))
"""

ERRORS = {
    "an exception": raised(
        "if last: raise ValueError('the cause')" + WAIT, "ValueError: the cause", rank=2, ranks=3
    ),
    "an exception of rank 0": raised(
        "if rank == 0: raise ValueError('the cause')" + WAIT, "ValueError: the cause", rank=0
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
    "an exception of all": raised("raise ValueError('the cause')", "ValueError: the cause", rank=0),
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
        "if last: threading.Thread(target=lambda: 1 / 0).start()\ntime.sleep(60)" + WAIT,
        "ZeroDivisionError",
    ),
    "an exception in a replica function": raised(
        IN_RUN.format("1 / 0") + "strategy.run(step)", "ZeroDivisionError"
    ),
    "an exception in the function of merge_call": raised(
        "strategy.run(lambda: hs.get_replica_context().merge_call(lambda s: 1 / (not last)))"
        + WAIT,
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
    "an exception in a dataset": raised(
        """
        def rows():
            for i in range(100):
                if i == 50 and last: raise OSError("no such row")
                yield np.float32(i)
        dataset = hs.data.Dataset.from_generator(rows).batch(6)
        for batch in strategy.experimental_distribute_dataset(dataset): pass
        """,
        "OSError: no such row",
    ),
    "an exception while saving": raised(
        "hs.checkpoint.Checkpoint(v=hs.Variable(1.0)).save('/proc/nothing/saved')",
        r"\w+Error: .*Checkpoint\.save of /proc/nothing/saved",
        rank=0,
    ),
    "a KeyboardInterrupt": raised("if last: raise KeyboardInterrupt" + WAIT, "KeyboardInterrupt"),
    "endless recursion": raised("def f(): f()\nif last: f()" + WAIT, "RecursionError"),
    "want of memory": raised("if last: bytearray(1 << 60)" + WAIT, "MemoryError"),
    "an exception after MPI has ended": Fault(
        "hs.barrier()\nMPI.Finalize()\nif last: raise ValueError('late')",
        [r"ValueError: late"],
        ranks=2,
    ),
    "an exception that one rank catches": Fault(
        IN_RUN.format("raise KeyError('of one')")
        + "with contextlib.suppress(KeyError): strategy.run(step)\nhs.barrier()\nprint('went on')",
        [
            r"\[rank 2\] KeyError: 'of one'",
            r"\[rank 2\] .* on rank 2 and was caught, but other ranks did not raise there",
        ],
    ),
}


def differs(usual, odd, *says):
    """Calls that do not match: all ranks raise, and the error names the call of each of them."""
    program = f"ones = np.ones((2, 3), np.float32)\nv = strategy.run(lambda: ones)\n{odd} if last else {usual}"
    error = "hpcstrat.*ReplicaMismatchError: "
    return Fault(program + WAIT, [error, *says], r"\[rank 0\] Traceback")


def differs_but(usual, odd):
    """The same, caught: the job continues, under `HPCSTRAT_CHECK=1` if values differ."""
    program = f"""
    ones = np.ones(3)
    with strategy.scope():
        v, optimizer = hs.Variable(ones), hs.optimizers.SGD(1.0)
    def made(value):
        with strategy.scope(): hs.Variable(value)
    for _ in range(3):
        try:
            {odd} if last else {usual}
        except hs.ReplicaMismatchError as error:
            assert all(f"rank {{other}}: " in str(error) for other in range(2)), error
            assert not hs.any_rank(False)
            print("caught")
    assert (v.numpy() == 1).all()
    v.assign_add(ones)
    print("sum", strategy.reduce("SUM", strategy.run(lambda: v + 0), None))
    """
    prints = [r"\A(caught\n){3}sum \[4\. 4\. 4\.\]\n\Z"]
    return Fault(program, prints=prints, status=0, ranks=2, env={"HPCSTRAT_CHECK": "1"})


REDUCE = "strategy.reduce('SUM', v, None)"

MISMATCHES = {
    "another call": differs(
        REDUCE,
        "hs.barrier()",
        rf"ranks 0, 1: Strategy\.reduce\(SUM.*, at {HERE}<module>",
        rf"rank 2: barrier\(\), at {HERE}",
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
    "caught: another call": differs_but("v.assign(ones)", "v.assign_sub(ones)"),
    "caught: other values assigned": differs_but("v.assign(ones)", "v.assign(ones + 1)"),
    "caught: another initial value": differs_but("made(ones)", "made(ones + 1)"),
    "caught: other gradients": differs_but(
        "optimizer.apply_gradients([(0 * ones, v)])", "optimizer.apply_gradients([(ones, v)])"
    ),
}
