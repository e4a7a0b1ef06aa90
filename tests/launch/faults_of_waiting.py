"""Faults by which ranks wait for one that does not come."""

from fault import (
    BARRIER,
    BEGIN,
    BEGIN_ON_HOSTS,
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

STALLS = {
    "an endless loop": stalled("if last: compute()" + WAIT, BARRIER, missing("rank 2", "compute")),
    "an endless loop of rank 0": stalled(
        "if rank == 0: compute()" + WAIT,
        waits("ranks 1, 2", "barrier"),
        missing("rank 0", "compute"),
    ),
    "an endless loop of two ranks": stalled(
        "if rank: loop()" + WAIT, waits("rank 0", "barrier"), missing("ranks 1, 2", "loop")
    ),
    "an endless sleep": stalled(
        "if last: time.sleep(1000)" + WAIT, BARRIER, missing("rank 2", "<module>")
    ),
    "C code that holds Python": silenced(
        "if last: hold_python()" + WAIT, BARRIER, silent("rank 2", "(hold_python|<module>)")
    ),
    "C code that holds Python, rank 0": silenced_root("if rank == 0: hold_python()" + WAIT),
    # Its watchdog comes to a word now and then; who reports depends on how often.
    "C code that holds Python again and again, rank 0": Fault(
        "if rank == 0:\n    while True: sum(range(6 * 10**7))" + WAIT,
        ["the job ends: (the ranks have been waiting|rank 0 has been silent) for"],
        r"\[rank [01]\] hpcstrat: (the ranks have been waiting|rank 0 has been silent) for",
        limits=(3, 6),
    ),
    "SIGSTOP": silenced("if last: stop()" + WAIT, BARRIER, silent("rank 2", "(stop|<module>)")),
    "SIGSTOP of rank 0": silenced_root("if rank == 0: stop()\nhs.barrier()" + WAIT),
    "SIGSTOP of rank 0 at the end of an extended time-out": silenced_root(
        "with hs.extend_timeout(3600): pass\nif rank == 0: stop()" + WAIT
    ),
    "SIGSTOP in the midst of calls": silenced(
        "for i in range(10**9):\n    if i == 2_000 and last: stop()\n    hs.any_rank(False)",
        waits("ranks 0, 1", "any_rank"),
        silent("rank 2", "(stop|<module>)"),
    ),
    "one rank skips a call": stalled(
        "for _ in range(3):\n    if not last: hs.any_rank(False)\nif last: time.sleep(1000)",
        waits("ranks 0, 1", "any_rank"),
        missing("rank 2", "<module>"),
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
    "an endless loop in the function of merge_call": stalled(
        """
        def merge(strategy, value):
            if last: loop()
            return strategy.reduce("SUM", value, None)
        strategy.run(lambda: hs.get_replica_context().merge_call(merge, (np.ones(3),)))
        """,
        waits("ranks 0, 1", r"Strategy\.reduce", "merge"),
        missing("rank 2", "loop"),
    ),
    "an endless loop in the function of an update": stalled(
        """
        with strategy.scope(): v = hs.Variable(np.zeros(3))
        def update(v):
            if last: loop()
            v.assign(np.ones(3))
        strategy.extended.update(v, update)
        """,
        waits("ranks 0, 1", r"Variable\.assign of 'Variable' ", "update"),
        missing("rank 2", "loop"),
    ),
    "an endless loop in a dataset": stalled(
        """
        def rows():
            for i in range(100):
                if i == 50 and last: loop()
                yield np.float32(i)
        dataset = hs.data.Dataset.from_generator(rows).batch(6)
        for batch in strategy.experimental_distribute_dataset(dataset): pass
        """,
        waits("ranks 0, 1", ".*"),
        missing("rank 2", "loop"),
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
    "an endless loop while another thread calls": stalled(
        """
        thread = threading.Thread(target=hs.barrier)
        if not last: thread.start()
        loop()
        """,
        r"  ranks 0, 1: waiting in call \d+, barrier\(\), at ",
        missing("rank 2", "loop"),
    ),
    "a deadlock in the program's own MPI calls": stalled(
        "if last: MPI.COMM_WORLD.recv(source=0, tag=7)" + WAIT,
        BARRIER,
        missing("rank 2", "<module>"),
    ),
    "a thread that does not end": stalled(
        "if last: threading.Thread(target=loop).start()",
        r"  ranks 0, 1: waiting in call \d+, the end of the program\(\), at the end of the program",
        r"  rank 2: has not arrived; last in call \d+, .+; now at ",
    ),
    "a loop after the others have left": stalled(
        "if last: loop()",
        r"  ranks 0, 1: waiting in call \d+, the end of the program\(\), at the end of the program",
        missing("rank 2", "loop"),
    ),
    "a loop in atexit": stalled(
        "if last: atexit.register(loop)",
        r"  ranks 0, 1: waiting in call \d+, the end of the program\(\), at the end of the program",
        missing("rank 2", "loop"),
    ),
    "a loop in atexit, after the library's own": Fault(
        "",
        [rf"rank 0 has finished, and has waited \d s .* does not end; it is at {HERE}loop"],
        r"\[rank 2\] hpcstrat: the job ends",
        begin=BEGIN.replace(
            "strategy =", "if hs.rank() == 2: atexit.register(lambda: loop())\nstrategy ="
        ),
        limits=(0.4, 1.2),
    ),
    "a loop in atexit of rank 0, after the library's own": stalled(
        "",
        "  ranks 1, 2: has finished",
        rf"  rank 0: has finished, but its process does not end; now at {HERE}loop",
        begin=BEGIN.replace(
            "strategy =", "if hs.rank() == 0: atexit.register(lambda: loop())\nstrategy ="
        ),
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

SOON = {"HPCSTRAT_STALL_SECONDS": "0.3", "HPCSTRAT_TIMEOUT_SECONDS": "0.8"}
START = (
    r"hpcstrat: this rank has waited 0 s for the others to connect \(HPCSTRAT_STALL_SECONDS\), at "
)
NOT_ALL = "hpcstrat: the job ends: this rank has waited 1 s for the others to connect"

STARTS = {
    "a loop before the first strategy": Fault(
        """
        import hpcstrat as hs
        if hs.rank() == 2: loop()
        hs.CentralStorageStrategy()
        """,
        [START + HERE + "<module>: not all ranks have come", NOT_ALL],
        START,
        begin="",
        env=SOON,
    ),
    "a loop before the first strategy, MPI started": Fault(
        """
        import hpcstrat as hs
        from mpi4py import MPI
        if hs.rank() == 2: loop()
        hs.CentralStorageStrategy()
        """,
        [START + HERE + "<module>: not all ranks have come", NOT_ALL],
        START,
        begin="",
        env=SOON,
    ),
    "an exit before the first strategy": Fault(
        """
        import sys
        import hpcstrat as hs
        if hs.rank() == 2: sys.exit()
        hs.CentralStorageStrategy()
        """,
        [rf"{NOT_ALL}|exiting\simproperly"],  # Open MPI notices this itself
        begin="",
        env=SOON,
    ),
    "other versions": Fault(
        "hs.barrier()",
        [
            r"RuntimeError: hpcstrat cannot connect the ranks: .* the same versions, but NumPy is \S+ on ranks 0, 1; 0\.1 on rank 2"
        ],
        r"\[rank 0\] Traceback",
        begin=BEGIN.replace("strategy =", "if hs.rank() == 2: np.__version__ = '0.1'\nstrategy ="),
    ),
    "a variable that differs between ranks": Fault(
        "hs.barrier()",
        ["must run the same versions, but HPCSTRAT_CHECK is 0 on ranks 0, 1; 1 on rank 2"],
        r"\[rank 0\] Traceback",
        begin=BEGIN.replace(
            "strategy =", "if hs.rank() == 2: os.environ['HPCSTRAT_CHECK'] = '1'\nstrategy ="
        ),
    ),
    "a bad HPCSTRAT_TIMEOUT_SECONDS": Fault(
        "hs.barrier()",
        ["HPCSTRAT_TIMEOUT_SECONDS is 'soon'; it must be a positive number of seconds, or inf"],
        env={"HPCSTRAT_TIMEOUT_SECONDS": "soon"},
    ),
    "a bad HPCSTRAT_CHECK": Fault(
        "hs.barrier()",
        ["HPCSTRAT_CHECK is 'yes'; it must be 1 or 0"],
        env={"HPCSTRAT_CHECK": "yes"},
    ),
    "no such GPU": Fault(
        "",
        ["GPU:0"],
        r"\[rank 0\] Traceback",
        begin=BEGIN.replace("Strategy()", "Strategy(['GPU:0', 'GPU:1', 'GPU:2'])"),
    ),
    "too few devices": Fault(
        "",
        ["mpirun -n 2"],
        r"\[rank 0\] Traceback",
        begin=BEGIN.replace("Strategy()", "Strategy(['CPU:0', 'CPU:0'])"),
    ),
    "one device with mpirun": Fault(
        "hs.OneDeviceStrategy('CPU:0')",
        ["RuntimeError: .*without mpirun|without `mpirun"],
        r"\[rank 0\] Traceback",
    ),
    "several hosts for a strategy of one": Fault(
        "hs.CentralStorageStrategy()",
        ["RuntimeError: .*host"],
        r"\[rank 0\] Traceback",
        begin=BEGIN_ON_HOSTS,
        hosts=True,
    ),
    "more memory than there is": Fault(
        "with strategy.scope(): hs.Variable(np.broadcast_to(np.float32(1), 1 << 43))",
        [
            r"MemoryError: [\d,]+ bytes were requested, but this host has [\d,]+ free; start fewer ranks"
        ],
        r"\[rank 0\] Traceback",
    ),
}
