"""The faults that are planted in jobs, by name, and correct programs that look like faults."""

from fault import Fault, harmless
from faults_of_broken_calls import BROKEN, CAUGHT, TWICE
from faults_of_errors import EARLY, ENDS, ERRORS, MISMATCHES
from faults_of_waiting import STALLS, STARTS
from faults_on_hosts import ON_HOSTS

HARMLESS = {
    "children and threads": Fault(
        'runpy.run_path(planting.__file__.replace("planting", "harmless"))',
        prints=[r"\A\[1\. 2\. 3\.\]\n\[1\. 1\. 1\.\]\n\[1, 2\]\n(3\.0 ){5}3\.0\n2\.0\nwent on\n\Z"],
        status=0,
        ranks=2,
        begin="import runpy, planting\n",
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
    "extended time-outs": harmless(
        """
        extend = hs.extend_timeout
        with extend(60):
            if last: time.sleep(4)
            hs.barrier()
        if last:
            with extend(60):
                time.sleep(4)
                hs.barrier()
        else: hs.barrier()
        with extend(np.float32(9)), extend(float("inf")), extend(1e308), extend(1e308):
            if last: time.sleep(4)
            hs.barrier()
        hs.on_lead(time.sleep, 4)
        """,
        limits=(1, 3),
    ),
    "long work without a call, and waits that are each shorter": harmless(
        """
        time.sleep(4)
        for _ in range(8):
            if last: time.sleep(0.5)
            hs.barrier()
        """,
        limits=(3, 3),
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
}

KINDS = [STALLS, STARTS, EARLY, ENDS, ERRORS, MISMATCHES, BROKEN, CAUGHT, TWICE, ON_HOSTS, HARMLESS]
FAULTS = {name: fault for kind in KINDS for name, fault in kind.items()}
QUICK = [
    "a time-out extended too little",
    "a loop before the first strategy",
    "early: an exception",
    "SIGKILL of rank 0",
    "an exception in a thread",
    "an exception of all",
    "another call",
    "an update interrupted",
    "caught by one rank: want of memory",
    "two threads at once, and nobody looks",
    "many ranks: SIGKILL in the middle of an agreement",
    "children and threads",
]
"""Of each kind those that tell most; the others are slow."""
