"""Faults by which ranks wait for one that does not come."""

from fault import (
    BARRIER,
    BEGIN,
    HERE,
    STALLED,
    WAIT,
    Fault,
    missing,
    silenced,
    silenced_root,
    silent,
    stalled,
    waits,
)

AT_THE_END = (
    r"  ranks 0, 1: waiting in call \d+, the end of the program\(\), at the end of the program"
)
SOON = {"HPCSTRAT_STALL_SECONDS": "0.3", "HPCSTRAT_TIMEOUT_SECONDS": "0.8"}
START = (
    r"hpcstrat: this rank has waited 0 s for the others to connect \(HPCSTRAT_STALL_SECONDS\), at "
)
NOT_ALL = "hpcstrat: the job ends: this rank has waited 1 s for the others to connect"


def begins(line):
    """The first lines, with this one before the strategy."""
    return BEGIN.replace("strategy =", f"{line}\nstrategy =")


def at_start(program, says, first="", **others):
    """Some ranks do not come to the first strategy."""
    return Fault(program, says, first, begin="import hpcstrat as hs\n", env=SOON, **others)


def refused(program, *says, **others):
    """All ranks raise an error of the start, which rank 0 tells."""
    return Fault(program, says, r"\[rank 0\] Traceback", **others)


STALLS = {
    "an endless loop": stalled("if last: compute()" + WAIT, BARRIER, missing("rank 2", "compute")),
    "an endless loop of rank 0": stalled(
        "if rank == 0: compute()" + WAIT,
        waits("ranks 1, 2", "barrier"),
        missing("rank 0", "compute"),
    ),
    "C code that holds Python, rank 0": silenced_root("if rank == 0: hold_python()" + WAIT),
    # Its watchdog comes to a word now and then; who reports depends on how often.
    "C code that holds Python again and again, rank 0": Fault(
        "if rank == 0:\n    while True: sum(range(6 * 10**7))" + WAIT,
        ["the job ends: (the ranks have been waiting|rank 0 has been silent) for"],
        r"\[rank [01]\] hpcstrat: (the ranks have been waiting|rank 0 has been silent) for",
        limits=(3, 6),
    ),
    "SIGSTOP": silenced("if last: stop()" + WAIT, BARRIER, silent("rank 2")),
    "SIGSTOP of rank 0": silenced_root("if rank == 0: stop()\nhs.barrier()" + WAIT),
    "SIGSTOP in the midst of calls": silenced(
        "for i in range(10**9):\n    if i == 2_000 and last: stop()\n    hs.any_rank(False)",
        waits("ranks 0, 1", "any_rank"),
        silent("rank 2"),
    ),
    "ranks that wait for their GPUs, which wait for each other in NCCL": stalled(
        """
        def result(): time.sleep(1000)  # as a host does in `get`
        hs.barrier()
        strategy.replica_group.communicator.watchdog.add_check(lambda: "", lambda: True)  # as NCCL's communicator does
        result()
        """,
        waits("ranks 0-2", "barrier", "result"),
        "all ranks must make the same calls",
    ),
    "an endless loop in a replica function": stalled(
        """
        def step():
            if last: loop()
            return hs.get_replica_context().all_reduce("SUM", np.ones(3))
        strategy.run(step)
        """,
        waits("ranks 0, 1", r"ReplicaContext\.all_reduce", "step"),
        missing("rank 2", "loop"),
    ),
    "an endless loop in a thread of a dataset": stalled(
        """
        def map(x):
            if x > 50 and last: loop()
            return x
        dataset = hs.data.Dataset.range(100).map(map, num_parallel_calls=2).prefetch(2).batch(6)
        for batch in strategy.experimental_distribute_dataset(dataset): pass
        """,
        waits("ranks 0, 1", ".*"),
        missing("rank 2", "loop"),
    ),
    "an endless loop while another thread calls": stalled(
        """
        thread = threading.Thread(target=hs.barrier)
        if not last: thread.start()
        loop()
        """,
        r"  ranks 0, 1: waiting in call \d+, barrier\(\), at ",
        missing("rank 2", "loop"),
    ),
    "a thread that does not end": stalled(
        "if last: threading.Thread(target=loop).start()",
        AT_THE_END,
        r"  rank 2: has not arrived; last in call \d+, .+; now at ",
    ),
    "a loop after the others have left": stalled(
        "if last: loop()",
        AT_THE_END,
        missing("rank 2", "loop"),
    ),
    "a loop in atexit, after the library's own": Fault(
        "",
        [rf"rank 0 has finished, and has waited \d s .* does not end; it is at {HERE}loop"],
        r"\[rank 2\] hpcstrat: the job ends",
        begin=begins("if hs.rank() == 2: atexit.register(lambda: loop())"),
        limits=(0.4, 1.2),
    ),
    "a loop in atexit of rank 0, after the library's own": stalled(
        "",
        "  ranks 1, 2: has finished",
        rf"  rank 0: has finished, but its process does not end; now at {HERE}loop",
        begin=begins("if hs.rank() == 0: atexit.register(lambda: loop())"),
    ),
    "a time-out extended without end, which has ended": stalled(
        "with hs.extend_timeout(float('inf')): hs.barrier()\nif last: time.sleep(1000)" + WAIT,
        BARRIER,
        missing("rank 2", "<module>"),
    ),
    # the figures are of a limit and its extension, or more
    "a time-out extended too little": Fault(
        "with hs.extend_timeout(0.5):\n    if last: loop()\n    hs.barrier()",
        [
            r"the ranks have been waiting for each other for [1-9] s \(HPCSTRAT_STALL_SECONDS\)",
            r"the job ends: the ranks have been waiting for each other for [2-9] s",
            BARRIER,
            missing("rank 2", "loop"),
        ],
        STALLED,
        limits=(0.4, 1.2),
    ),
}

STARTS = {
    "a loop before the first strategy": at_start(
        "if hs.rank() == 2: loop()\nhs.CentralStorageStrategy()",
        [START + HERE + "<module>: not all ranks have come", NOT_ALL],
        START,
    ),
    "a loop before the first strategy, MPI started": at_start(
        "from mpi4py import MPI\nif hs.rank() == 2: loop()\nhs.CentralStorageStrategy()",
        [START + HERE + "<module>: not all ranks have come", NOT_ALL],
        START,
    ),
    "an exit before the first strategy": at_start(
        "if hs.rank() == 2: sys.exit()\nhs.CentralStorageStrategy()",
        [rf"{NOT_ALL}|exiting\simproperly"],  # Open MPI notices this itself
    ),
    "other versions": refused(
        "hs.barrier()",
        r"RuntimeError: .*the same versions, but NumPy is \S+ on ranks 0, 1; 0\.1 on rank 2",
        begin=begins("if hs.rank() == 2: np.__version__ = '0.1'"),
    ),
    "a variable that differs between ranks": refused(
        "hs.barrier()",
        "the same versions, but HPCSTRAT_CHECK is 0 on ranks 0, 1; 1 on rank 2",
        begin=begins("if hs.rank() == 2: os.environ['HPCSTRAT_CHECK'] = '1'"),
    ),
    "a bad HPCSTRAT_TIMEOUT_SECONDS": Fault(
        "hs.barrier()",
        ["HPCSTRAT_TIMEOUT_SECONDS is 'soon'; it must be a positive number of seconds, or inf"],
        env={"HPCSTRAT_TIMEOUT_SECONDS": "soon"},
    ),
}
