"""The faults that are planted in jobs, by name, and correct programs that look like faults."""

import textwrap

from fault import BEGIN, WAIT, Fault
from faults_of_broken_calls import BROKEN, CAUGHT, TWICE
from faults_of_errors import ENDS, ERRORS, MISMATCHES
from faults_of_the_start import EARLY
from faults_of_waiting import STALLS, STARTS
from faults_on_hosts import ON_HOSTS


def harmless(program, *prints, **others):
    """Looks like a fault, but is not: the job succeeds and prints nothing on standard error."""
    return Fault(
        textwrap.dedent(program) + WAIT,
        prints=[*prints, r"went on\n\Z"],
        status=0,
        ranks=2,
        **others,
    )


HARMLESS = {
    "two threads that connect": harmless(
        """
        from hpcstrat._transports.connection import connect
        begin, found = threading.Barrier(2), []
        def make():
            begin.wait()
            found.append(connect())
        threads = [threading.Thread(target=make) for _ in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert found[0] is found[1]
        """,
        begin=BEGIN.replace("strategy = hs.CentralStorageStrategy()\n", ""),
    ),
    "rank 0 ends MPI and leaves, while the other computes": harmless(
        """
        hs.barrier()
        MPI.Finalize()
        if rank == 0: sys.exit()
        time.sleep(2)
        print = lambda text: os.write(1, f"{text}\\n".encode())  # of every rank
        hs.barrier = lambda: None
        """
    ),
    "an extended time-out": harmless(
        "with hs.extend_timeout(60):\n    if last: time.sleep(4)\n    hs.barrier()", limits=(1, 3)
    ),
    "an extended time-out of the late rank alone": harmless(
        "if last:\n    with hs.extend_timeout(60): time.sleep(4); hs.barrier()\nelse: hs.barrier()",
        limits=(1, 3),
    ),
    "a function of rank 0 alone that takes long": harmless(
        "hs.on_lead(time.sleep, 4)", limits=(1, 3)
    ),
    "long work without a call": harmless("time.sleep(4)", limits=(3, 3)),
    "waits that are each shorter": harmless(
        "if last: time.sleep(0.5)\nhs.barrier()\n" * 8, limits=(3, 3)
    ),
    "time-outs extended by odd lengths": harmless(
        """
        extend = hs.extend_timeout
        with extend(np.float32(9)), extend(float("inf")), extend(1e308), extend(1e308):
            if last: time.sleep(4)
            hs.barrier()
        """,
        limits=(1, 3),
    ),
    "an overflow that one rank's NumPy would raise": harmless(
        """
        np.seterr(all="raise" if last else "ignore")
        own = np.full(3, 200 + 100 * rank, np.float16) * np.float16(64)
        assert np.isinf(strategy.reduce("SUM", strategy.run(lambda: own), axis=0))
        """
    ),
    "a working folder that goes, and long names that are not ASCII": harmless(
        """
        import tempfile
        folder = tempfile.mkdtemp()
        os.chdir(folder)
        hs.barrier()
        if last: os.rmdir(folder)
        with strategy.scope(): v = hs.Variable(np.ones(3), name="重み" * 400)
        v.assign_add(np.ones(3))
        time.sleep(2)
        """
    ),
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
        limits=(4, 5),
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
    "a forked child that computes": harmless(
        """
        with strategy.scope(): v = hs.Variable(np.arange(3.0))
        if last:
            child = os.fork()
            if child == 0: os._exit(0 if v.numpy().sum() == 3 and hs.rank() == rank else 1)
            assert os.waitpid(child, 0)[1] == 0
        v.assign_add(np.ones(3))
        print(v.numpy())
        """,
        r"\[1\. 2\. 3\.\]",
    ),
    "a forked child that raises in its parent's call": harmless(
        """
        process = os.getpid()
        class Forking:
            def __array__(self, *_, **__):
                if last:
                    child = os.fork()
                    if child == 0: raise ValueError("the child's")
                    os.waitpid(child, 0)
                return np.ones(3)
        with strategy.scope(): v = hs.Variable(np.zeros(3))
        try: v.assign(Forking())
        except TypeError:
            if os.getpid() == process: raise
            os._exit(0)
        print(v.numpy())
        """,
        r"\[1\. 1\. 1\.\]",
    ),
    "worker processes": harmless(
        """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
        """,
        r"\[1, 2\]",
    ),
    "calls in one thread after the other": harmless(
        """
        found = []
        def work(): found.append(strategy.reduce("SUM", strategy.run(lambda: rank + 1.0), None))
        for _ in range(3):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            work()
        print(*found)
        """,
        "3.0 3.0 3.0 3.0 3.0 3.0",
    ),
    "a thread makes the calls of a replica function": harmless(
        """
        import contextvars
        def step():
            context, found = contextvars.copy_context(), []
            sum_up = hs.get_replica_context().all_reduce
            thread = threading.Thread(target=context.run, args=(lambda: found.append(sum_up("SUM", 1.0)),))
            thread.start()
            thread.join()
            return found[0]
        print(strategy.reduce("MEAN", strategy.run(step), None))
        """,
        "2.0",
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
    "an exit within a thread": harmless(
        "threading.Thread(target=sys.exit).start()\ntime.sleep(0.5)"
    ),
}

KINDS = [STALLS, STARTS, EARLY, ENDS, ERRORS, MISMATCHES, BROKEN, CAUGHT, TWICE, ON_HOSTS, HARMLESS]
FAULTS = {name: fault for kind in KINDS for name, fault in kind.items()}
QUICK = [
    "a time-out extended too little",
    "a loop before the first strategy",
    "early: an exception",
    "SIGKILL of rank 0",
    "sys.exit(3)",
    "an exception while the others compute",
    "another call",
    "an update interrupted, CentralStorageStrategy",
    "caught by one rank: want of memory",
    "two threads at once, and nobody looks",
    "many ranks: SIGKILL in the middle of an agreement",
    "a forked child that computes",
]
"""Of each kind those that tell most; the others are slow."""
