"""The faults that are planted in jobs, and what is to come of each."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

BEGIN = """
import atexit, contextlib, ctypes, sys, threading, time
import numpy as np
import hpcstrat as hs
from mpi4py import MPI

strategy = hs.CentralStorageStrategy()
rank, last = hs.rank(), hs.rank() == hs.size() - 1
"""
BEGIN_ON_HOSTS = BEGIN.replace("strategy = hs.CentralStorageStrategy()", "hs.barrier()")
HELPERS = """
import os, re, signal

def loop():
    while True:
        pass

def hold_python():
    re.match("(a+)+b", 40 * "a")  # takes years, in C code that lets no other thread run

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def mpirun():
    "The process that the test started: the farthest ancestor with the job's mark."
    mark, process = os.environ["LAUNCHED_BY_TEST"].encode(), os.getpid()
    while True:
        parent = int(re.search("PPid:.([0-9]+)", open(f"/proc/{process}/status").read())[1])
        if mark not in open(f"/proc/{parent}/environ", "rb").read():
            return process
        process = parent
"""
ANY = "any"
WAIT = "\nhs.barrier()\nprint('went on')\n"


@dataclass(frozen=True)
class Fault:
    """A job with a fault.

    Attributes:
        program: its lines, after the strategy is made.
        says: regular expressions; each is found on standard error, or output, where MPICH's mpirun speaks.
        first: one that the first line of standard error matches; most often it shows that the cause comes first.
        prints: regular expressions; each is found on standard output. Where there is none, nothing is printed.
        status: the exit status; `None` for any but 0, `ANY` where mpirun may not see that there was a fault.
        ranks: how many there are.
        begin: the lines before.
        env: more variables.
        hosts: whether the ranks stand for several hosts.
        left: a pattern of what MPI itself leaves in /dev/shm.
    """

    program: str
    says: Sequence[str] = ()
    first: str = ""
    prints: Sequence[str] = ()
    status: int | str | None = None
    ranks: int = 3
    begin: str = BEGIN
    env: Mapping[str, str] = field(default_factory=dict)
    hosts: bool = False
    left: str = ""

    @property
    def source(self):
        return HELPERS + self.begin + textwrap.dedent(self.program)


HERE = r"\S*program_\w+\.py:\d+ in "
STALLED = r"\[rank \d\] hpcstrat: the ranks wait for each other since \d s \(HPCSTRAT_STALL_SECONDS\)"
ENDED = r"hpcstrat: the job ends: the ranks wait for each other since \d+ s \(HPCSTRAT_TIMEOUT_SECONDS\)"
CLOSED = "ended without leaving the program: by os._exit, a signal, or for want of memory"
LEFT = "left the program before the others"


def stalled(program, waiting, missing, **others):
    """A fault after which some ranks wait for another: a report comes first, and later the end."""
    return Fault(program, [ENDED, waiting, missing], STALLED, **others)


def silenced(program, waiting, missing, **others):
    """The same with a rank that does not answer, which is known after two seconds."""
    env = {"HPCSTRAT_STALL_SECONDS": "3", "HPCSTRAT_TIMEOUT_SECONDS": "4"}
    return replace(stalled(program, waiting, missing, **others), env=env)


def waits(ranks, call, function="<module>"):
    return rf"  {ranks}: waiting in call \d+, {call}\(.*\), at {HERE}{function}"


def missing(ranks, function):
    return rf"  {ranks}: not there; last in call \d+, .+; now at {HERE}{function}"


def silent(ranks, function="<module>"):
    return rf"  {ranks}: not answering for \d s \(stopped, or in code that holds Python\); last in .*{HERE}{function}"


BARRIER = waits("ranks 0, 1", "barrier")

STALLS = {
    "an endless loop": stalled("if last: loop()" + WAIT, BARRIER, missing("rank 2", "loop")),
    "an endless loop of rank 0": stalled(
        "if rank == 0: loop()" + WAIT, waits("ranks 1, 2", "barrier"), missing("rank 0", "loop")
    ),
    "an endless loop of two ranks": stalled(
        "if rank: loop()" + WAIT, waits("rank 0", "barrier"), missing("ranks 1, 2", "loop")
    ),
    "an endless loop, four ranks": stalled(
        "if rank == 2: loop()" + WAIT, waits("ranks 0, 1, 3", "barrier"), missing("rank 2", "loop"), ranks=4
    ),
    "an endless loop, two ranks": stalled(
        "if last: loop()" + WAIT, waits("rank 0", "barrier"), missing("rank 1", "loop"), ranks=2
    ),
    "an endless sleep": stalled("if last: time.sleep(1000)" + WAIT, BARRIER, missing("rank 2", "<module>")),
    "C code that holds Python": silenced(
        "if last: hold_python()" + WAIT, BARRIER, silent("rank 2", "(hold_python|<module>)")
    ),
    "C code that holds Python, rank 0": silenced(
        "if rank == 0: hold_python()" + WAIT, waits("ranks 1, 2", "barrier"), silent("rank 0", "(hold_python|<module>)")
    ),
    "SIGSTOP": silenced("if last: stop()" + WAIT, BARRIER, silent("rank 2", "(stop|<module>)")),
    "SIGSTOP of rank 0": silenced(
        "if rank == 0: stop()\nhs.barrier()" + WAIT, waits("ranks 1, 2", "barrier"), silent("rank 0", "(stop|<module>)")
    ),
    "SIGSTOP in the midst of calls": silenced(
        "for i in range(10**9):\n    if i == 20_000 and last: stop()\n    hs.agree(False)",
        waits("ranks 0, 1", "agree"),
        silent("rank 2", "(stop|<module>)"),
    ),
    "one rank skips a call": stalled(
        "for _ in range(3):\n    if not last: hs.agree(False)\nif last: time.sleep(1000)",
        waits("ranks 0, 1", "agree"),
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
        strategy.extended.update(v, lambda v: loop())
        """,
        waits("ranks 1, 2", r"StrategyExtended\.update"),
        r"  rank 0: .*" + HERE + "loop",
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
        "if last: MPI.COMM_WORLD.recv(source=0, tag=7)" + WAIT, BARRIER, missing("rank 2", "<module>")
    ),
    "a thread that does not end": stalled(
        "if last: threading.Thread(target=loop).start()",
        r"  ranks 0, 1: waiting in call \d+, the end of the program\(\), at the end of the program",
        r"  rank 2: not there; last in call \d+, .+; now at ",
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
    "a loop in atexit, after the library's own": stalled(
        "",
        "  ranks 0, 1: through with the program",
        rf"  rank 2: through with the program, but its process does not end; now at {HERE}loop",
        begin=BEGIN.replace("strategy =", "if hs.rank() == 2: atexit.register(lambda: loop())\nstrategy ="),
    ),
    "no patience": stalled("if last: time.sleep(6)" + WAIT, BARRIER, missing("rank 2", "<module>")),
    "patience that is too short": Fault(
        "with hs.patience(1):\n    if last: loop()\n    hs.barrier()",
        [
            r"the ranks wait for each other since 2 s \(HPCSTRAT_STALL_SECONDS\)",
            r"the job ends: the ranks wait for each other since 4 s",
            missing("rank 2", "loop"),
        ],
    ),
}

START = r"hpcstrat: this rank waits for the others to connect since 1 s \(HPCSTRAT_STALL_SECONDS\), at "

STARTS = {
    "a loop before the first strategy": Fault(
        """
        import hpcstrat as hs
        if hs.rank() == 2: loop()
        hs.CentralStorageStrategy()
        """,
        [r"Timeout \(0:00:03\.5"],
        left="/dev/shm/mpich_shm_",  # which all of them would still open
        begin="",
    ),
    "a loop before the first strategy, MPI started": Fault(
        """
        import hpcstrat as hs
        from mpi4py import MPI
        if hs.rank() == 2: loop()
        hs.CentralStorageStrategy()
        """,
        [START + HERE + "<module>: not all ranks have come", "hpcstrat: the job ends: this rank waits for the others"],
        START,
        begin="",
    ),
    "an exit before the first strategy": Fault(
        """
        import sys
        import hpcstrat as hs
        if hs.rank() == 2: sys.exit()
        hs.CentralStorageStrategy()
        """,
        [r"Timeout \(0:00:03\.5|exiting\nimproperly"],  # which Open MPI sees itself
        left="/dev/shm/mpich_shm_",
        begin="",
    ),
    "other versions": Fault(
        "hs.barrier()",
        [r"RuntimeError: the ranks must run the same versions, but NumPy is .*, 0\.1 on rank 2"],
        r"\[rank 0\] Traceback",
        begin=BEGIN.replace("strategy =", "if hs.rank() == 2: np.__version__ = '0.1'\nstrategy ="),
    ),
    "a variable that differs between ranks": Fault(
        "hs.barrier()",
        ["must run the same versions, but HPCSTRAT_CHECK is 0 on rank 0, 0 on rank 1, 1 on rank 2"],
        r"\[rank 0\] Traceback",
        begin=BEGIN.replace("strategy =", "if hs.rank() == 2: os.environ['HPCSTRAT_CHECK'] = '1'\nstrategy ="),
    ),
    "a bad HPCSTRAT_TIMEOUT_SECONDS": Fault(
        "hs.barrier()",
        ["HPCSTRAT_TIMEOUT_SECONDS is 'soon'; it must be a positive number of seconds, or inf"],
        env={"HPCSTRAT_TIMEOUT_SECONDS": "soon"},
    ),
    "a bad HPCSTRAT_CHECK": Fault(
        "hs.barrier()", ["HPCSTRAT_CHECK is 'yes'; it must be 1 or 0"], env={"HPCSTRAT_CHECK": "yes"}
    ),
    "no such GPU": Fault(
        "",
        ["GPU:0"],
        r"\[rank 0\] Traceback",
        begin=BEGIN.replace("Strategy()", "Strategy(['GPU:0', 'GPU:1', 'GPU:2'])"),
    ),
    "too few devices": Fault(
        "", ["mpirun -n 2"], r"\[rank 0\] Traceback", begin=BEGIN.replace("Strategy()", "Strategy(['CPU:0', 'CPU:0'])")
    ),
    "one device with mpirun": Fault(
        "hs.OneDeviceStrategy('CPU:0')", ["RuntimeError: .*without mpirun|without `mpirun"], r"\[rank 0\] Traceback"
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
        [r"MemoryError: no [\d,]+ bytes in a row are left of the memory that was reserved for variables"],
        r"\[rank 0\] Traceback",
    ),
}


def ended(program, *says, **others):
    """A rank that ends by itself, and by nobody's error."""
    return Fault(program + WAIT, says, **others)


# What the launcher says where it sees the end before the watch does.
CLOSED_OR_LAUNCHER = rf"{CLOSED}|BAD TERMINATION|[Ss]ignal|PMI|exited|terminated"

ENDS = {
    # MPICH's mpirun kills the others itself, at once, and may exit with status 0.
    "os._exit(0)": ended("if last: os._exit(0)", status=ANY),
    "os._exit(0) of rank 0": ended("if rank == 0: os._exit(0)", status=ANY),
    "os._exit(5)": ended("if last: os._exit(5)"),
    "SIGKILL": ended("if last: os.kill(os.getpid(), signal.SIGKILL)", CLOSED_OR_LAUNCHER),
    "SIGKILL of rank 0": ended("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)", CLOSED_OR_LAUNCHER),
    "SIGKILL while the others compute": Fault(
        "if last: os.kill(os.getpid(), signal.SIGKILL)\nloop()", [CLOSED_OR_LAUNCHER]
    ),
    "SIGSEGV": ended("if last: ctypes.string_at(0)", CLOSED_OR_LAUNCHER),
    "SIGABRT": ended("if last: os.abort()", CLOSED_OR_LAUNCHER),
    "SIGTERM": ended("if last: os.kill(os.getpid(), signal.SIGTERM)", CLOSED_OR_LAUNCHER),
    "SIGINT": ended("if last: os.kill(os.getpid(), signal.SIGINT)", r"\[rank 2\] KeyboardInterrupt"),
    "SIGTERM of all": ended("if rank == 0: os.kill(mpirun(), signal.SIGTERM)\ntime.sleep(1000)"),
    "Ctrl-C": ended("if rank == 0: os.kill(mpirun(), signal.SIGINT)\ntime.sleep(1000)"),
    "Ctrl-C twice": ended(
        "if rank == 0:\n    for _ in range(2): os.kill(mpirun(), signal.SIGINT); time.sleep(0.2)\ntime.sleep(1000)"
    ),
    "Ctrl-C in a call": ended("if rank == 0: os.kill(mpirun(), signal.SIGINT); time.sleep(1000)"),
    "sys.exit(3)": ended("if last: sys.exit(3)", f"rank 2 {LEFT}"),
    "sys.exit(3) of rank 0": ended("if rank == 0: sys.exit(3)", f"rank 0 {LEFT}"),
    "sys.exit(0)": ended("if last: sys.exit()", f"rank 2 {LEFT}"),
    "sys.exit(3) of all": Fault("sys.exit(3)", status=3),
    "an early end": Fault(
        "if not last:\n    for _ in range(3): hs.barrier()",
        [rf"hpcstrat: rank [01] waits in barrier\(\); rank 2 {LEFT}"],
    ),
}


def raised(program, error, rank=2, **others):
    """An exception of one rank: its traceback comes first."""
    return Fault(program, [rf"\[rank {rank}\] {error}"], rf"\[rank {rank}\] (Traceback|Exception in thread)", **others)


IN_RUN = """
def step():
    if last: {}
    return hs.get_replica_context().all_reduce("SUM", np.ones(3))
"""

ERRORS = {
    "an exception": raised("if last: raise ValueError('the cause')" + WAIT, "ValueError: the cause"),
    "an exception of rank 0": raised(
        "if rank == 0: raise ValueError('the cause')" + WAIT, "ValueError: the cause", rank=0
    ),
    "an exception while the others compute": raised("if last: 1 / 0\nloop()", "ZeroDivisionError"),
    "an exception of all": raised("raise ValueError('the cause')", "ValueError: the cause", rank=0),
    "an exception in a thread": raised(
        "if last: threading.Thread(target=lambda: 1 / 0).start()\ntime.sleep(5)" + WAIT, "ZeroDivisionError"
    ),
    "an exception in a replica function": raised(IN_RUN.format("1 / 0") + "strategy.run(step)", "ZeroDivisionError"),
    "an exception in the function of merge_call": raised(
        "strategy.run(lambda: hs.get_replica_context().merge_call(lambda s: 1 / (not last)))" + WAIT,
        "ZeroDivisionError",
    ),
    "an exception in the function of an update": raised(
        "with strategy.scope(): v = hs.Variable(np.zeros(3))\nstrategy.extended.update(v, lambda v: 1 / 0)",
        "ZeroDivisionError",
        rank=0,
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
        "hs.barrier()\nMPI.Finalize()\nif last: raise ValueError('late')", [r"ValueError: late"]
    ),
    "an exception that one rank catches": Fault(
        IN_RUN.format("raise KeyError('of one')")
        + "with contextlib.suppress(KeyError): strategy.run(step)\nhs.barrier()\nprint('went on')",
        [
            r"\[rank 2\] KeyError: 'of one'",
            r"\[rank 2\] .* on rank 2 and was caught, but other ranks did not raise there",
        ],
    ),
    "a call in the function of an update": raised(
        "with strategy.scope(): v = hs.Variable(np.zeros(3))\nstrategy.extended.update(v, lambda v: hs.barrier())",
        "RuntimeError: barrier was called inside the function of .*nothing may communicate there",
        rank=0,
    ),
}


def differs(usual, odd, *says):
    """Calls that do not fit: all ranks raise, and the error names what each of them called."""
    program = f"ones = np.ones((2, 3), np.float32)\nv = strategy.run(lambda: ones)\n{odd} if last else {usual}"
    error = "hpcstrat.*ReplicaMismatchError: "
    return Fault(program + WAIT, [error, *says], r"\[rank 0\] Traceback")


def differs_but(usual, odd):
    """The same, caught: the job goes on, under `HPCSTRAT_CHECK=1` where values differ."""
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
            assert all(f"rank {{other}}: " in str(error) for other in range(3)), error
            assert not hs.agree(False)
            print("caught")
    assert (v.numpy() == 1).all()
    v.assign_add(ones)
    print("sum", strategy.reduce("SUM", strategy.run(lambda: v + 0), None))
    """
    prints = [r"\A(caught\n){3}sum \[6\. 6\. 6\.\]\n\Z"]
    return Fault(program, prints=prints, status=0, env={"HPCSTRAT_CHECK": "1"})


REDUCE = "strategy.reduce('SUM', v, None)"

MISMATCHES = {
    "another call": differs(REDUCE, "hs.barrier()", r"rank 0: Strategy\.reduce\(SUM", "rank 2: barrier"),
    "another shape": differs(
        REDUCE,
        "strategy.reduce('SUM', strategy.run(lambda: np.ones(5, np.float32)), None)",
        r"rank 0: .*\(2, 3\)",
        r"rank 2: .*\(5,\)",
    ),
    "another dtype": differs(
        REDUCE,
        "strategy.reduce('SUM', strategy.run(lambda: np.ones((2, 3))), None)",
        r"rank 1: .*float32",
        r"rank 2: .*float64",
    ),
    "another operation": differs(REDUCE, "strategy.reduce('MAX', v, None)", r"rank 0: .*\(SUM", r"rank 2: .*\(MAX"),
    "another axis": differs(
        "strategy.reduce('SUM', v, 0)", "strategy.reduce('SUM', v, 1)", r"rank 0: .*axis=0", r"rank 2: .*axis=1"
    ),
    "another nest": differs(
        "strategy.reduce('SUM', {'a': v}, None)",
        "strategy.reduce('SUM', {'b': v}, None)",
        "rank 0: .*'a'",
        "rank 2: .*'b'",
    ),
    "another variable": Fault(
        "with strategy.scope(): a, b = hs.Variable(1.0, name='a'), hs.Variable(1.0, name='b')\n"
        "(b if last else a).assign(2.0)" + WAIT,
        [r"ReplicaMismatchError: ", r"rank 0: Variable\.assign of 'a'", r"rank 2: Variable\.assign of 'b'"],
        r"\[rank 0\] Traceback",
    ),
    "caught: another call": differs_but("v.assign(ones)", "v.assign_sub(ones)"),
    "caught: other values assigned": differs_but("v.assign(ones)", "v.assign(ones + 1)"),
    "caught: another initial value": differs_but("made(ones)", "made(ones + 1)"),
    "caught: other gradients": differs_but(
        "optimizer.apply_gradients([(0 * ones, v)])", "optimizer.apply_gradients([(ones, v)])"
    ),
}

ON_HOSTS = {
    "hosts: an endless loop": stalled("if last: loop()" + WAIT, BARRIER, missing("rank 2", "loop")),
    "hosts: an endless loop of rank 0": stalled(
        "if rank == 0: loop()" + WAIT, waits("ranks 1, 2", "barrier"), missing("rank 0", "loop")
    ),
    "hosts: C code that holds Python": silenced(
        "if last: hold_python()" + WAIT, BARRIER, silent("rank 2", "(hold_python|<module>)")
    ),
    "hosts: SIGSTOP": silenced("if last: stop()" + WAIT, BARRIER, silent("rank 2", "(stop|<module>)")),
    "hosts: SIGSTOP of rank 0": Fault(
        "if rank == 0: stop()" + WAIT,
        [r"hpcstrat: the job ends: nothing was heard of rank 0 for 3 s .*; this rank was at "],
    ),
    "hosts: SIGKILL": ended("if last: os.kill(os.getpid(), signal.SIGKILL)", CLOSED_OR_LAUNCHER),
    "hosts: SIGKILL of rank 0": ended(
        "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)", CLOSED_OR_LAUNCHER + "|rank 0, or the network"
    ),
    "hosts: os._exit(0)": ended("if last: os._exit(0)", status=ANY),
    "hosts: sys.exit(3)": ended("if last: sys.exit(3)", f"rank 2 {LEFT}"),
    "hosts: an exception": raised("if last: raise ValueError('the cause')" + WAIT, "ValueError: the cause"),
    "hosts: another call": Fault(
        "hs.agree(True) if last else hs.barrier()",
        ["ReplicaMismatchError: ", "rank 0: barrier", "rank 1: barrier", "rank 2: agree"],
        r"\[rank 0\] Traceback",
    ),
    "hosts: a loop after the others have left": stalled(
        "if last: loop()",
        r"  ranks 0, 1: waiting in call \d+, the end of the program\(\), at the end of the program",
        missing("rank 2", "loop"),
    ),
}
ON_HOSTS = {name: replace(fault, begin=BEGIN_ON_HOSTS, hosts=True) for name, fault in ON_HOSTS.items()}


def harmless(program, *prints, **others):
    """What looks like a fault and is none: the job ends well, and says nothing."""
    return Fault(textwrap.dedent(program) + WAIT, prints=[*prints, r"went on\n\Z"], status=0, **others)


HARMLESS = {
    "patience": harmless("with hs.patience(60):\n    if last: time.sleep(5)\n    hs.barrier()"),
    "patience of the late rank alone": harmless("if last:\n    with hs.patience(60): time.sleep(5)"),
    "long work without a call": harmless("time.sleep(5)"),
    "a wait that is shorter": harmless("if last: time.sleep(0.6)\nhs.barrier()\n" * 6),
    "a suspended job": harmless(
        """
        everyone = MPI.COMM_WORLD.allgather(os.getpid())
        if last and os.fork() == 0:
            for seconds, number in (1, signal.SIGSTOP), (6, signal.SIGCONT):
                time.sleep(seconds)
                for process in everyone: os.kill(process, number)
            os._exit(0)
        for _ in range(20 * last): time.sleep(0.1)
        """,
        env={"HPCSTRAT_STALL_SECONDS": "4", "HPCSTRAT_TIMEOUT_SECONDS": "5"},
    ),
    "a forked child that dies": harmless(
        """
        if last:
            child = os.fork()
            if child == 0: os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
        time.sleep(2)
        """
    ),
    "a forked child that exits": harmless(
        """
        if last:
            child = os.fork()
            if child == 0: os._exit(3)  # after sys.exit mpi4py's own last act, MPI_Finalize, would wait for the others
            os.waitpid(child, 0)
        time.sleep(2)
        """
    ),
    "an error of all, caught": harmless(
        """
        with contextlib.suppress(ValueError): strategy.run(lambda: int("x"))
        """
    ),
    "an exit within a thread": harmless("threading.Thread(target=sys.exit).start()\ntime.sleep(0.5)"),
}

FAULTS = STALLS | STARTS | ENDS | ERRORS | MISMATCHES | ON_HOSTS | HARMLESS
