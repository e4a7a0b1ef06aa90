"""The same faults on two hosts."""

from dataclasses import replace

from fault import (
    ANY,
    BARRIER,
    BEGIN_ON_HOSTS,
    CLOSED_OR_LAUNCHER,
    WAIT,
    Fault,
    ended,
    missing,
    raised,
    silenced,
    silenced_root,
    silent,
    stalled,
    waits,
)
from faults_of_broken_calls import APPLY, broken
from faults_of_errors import early

ON_HOSTS = {
    "hosts: an endless loop": stalled(
        "if last: compute()" + WAIT, BARRIER, missing("rank 2", "compute")
    ),
    "hosts: SIGSTOP of the second host's first rank": silenced(
        "if rank == 1: stop()" + WAIT,
        waits("ranks 0, 2(, |-)3", "barrier"),
        silent("rank 1"),
        ranks=4,
    ),
    "hosts: SIGSTOP of rank 0": silenced_root("if rank == 0: stop()" + WAIT),
    "hosts: SIGKILL": ended("if last: die()", CLOSED_OR_LAUNCHER, ranks=3),
    # MPICH's mpirun kills the others at once, and exits with status 0, where a rank has a host alone.
    "hosts: os._exit(0)": ended("if last: os._exit(0)", status=ANY),
    "hosts: an exception": raised(
        "if last: raise ValueError('the cause')" + WAIT, "ValueError: the cause", rank=2, ranks=3
    ),
    "hosts: another call": Fault(
        "hs.any_rank(True) if last else hs.barrier()",
        ["ReplicaMismatchError: ", "ranks 0, 1: barrier", "rank 2: any_rank"],
        r"\[rank 0\] Traceback",
    ),
}
STRANGERS = """
import socket, struct
from hpcstrat._watchdog import channels

def addresses(port, addresses=channels.addresses):
    global silent
    silent, reset = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    return addresses(port)

channels.addresses = addresses
"""

ON_HOSTS = {
    name: replace(fault, begin=BEGIN_ON_HOSTS, hosts=True) for name, fault in ON_HOSTS.items()
}
ON_HOSTS["hosts: an endless loop after strangers have connected"] = replace(
    ON_HOSTS["hosts: an endless loop"], begin=STRANGERS + BEGIN_ON_HOSTS
)
# As more than 16 ranks agree: by one reduction.
MANY = """
from hpcstrat._transports import hosts

hosts.FEW_RANKS = 0
"""
ON_HOSTS["many ranks: another call"] = replace(
    ON_HOSTS["hosts: another call"], begin=MANY + BEGIN_ON_HOSTS
)
ON_HOSTS["many ranks: SIGKILL in the middle of an agreement"] = replace(
    ON_HOSTS["hosts: SIGKILL"],
    program="if last: hosts.HostsCommunicator._is_everyones = die\nhs.barrier()",
    begin=MANY + BEGIN_ON_HOSTS,
)
# Two ranks, each on a host, that are at the same slice.
SUM = """
strategy = hs.MultiWorkerMirroredStrategy()
if last: hosts.HostsCommunicator._reduce_slice = {}
strategy.reduce("SUM", strategy.run(lambda: np.ones(100_000)), None)
"""
ON_HOSTS["many ranks: SIGKILL in the middle of a sum"] = replace(
    ON_HOSTS["hosts: SIGKILL"], program=SUM.format("die"), ranks=2, begin=MANY + BEGIN_ON_HOSTS
)
ON_HOSTS["many ranks: SIGSTOP in the middle of a sum"] = silenced(
    SUM.format("lambda *_: stop()"),
    waits("rank 0", r"Strategy\.reduce: memory"),
    silent("rank 1"),
    ranks=2,
    begin=MANY + BEGIN_ON_HOSTS,
    hosts=True,
)
ON_HOSTS |= {
    f"hosts: {name} interrupted": replace(
        broken(*arguments, strategy="MultiWorkerMirroredStrategy"), hosts=True
    )
    for name, arguments in {
        "an update": ("'_reduce_slice'", "apply(numbers)", APPLY),
        "an assignment": (
            "'collect_messages'",
            "v.assign(numbers)",
            r"Variable\.assign of 'Variable'",
        ),
        "an all_to_all": (
            "'_pieces'",
            "strategy.run(lambda: hs.get_replica_context().all_to_all([numbers] * 2))",
            r"ReplicaContext\.all_to_all",
        ),
    }.items()
}
ON_HOSTS["hosts: an exception while some wait"] = early(  # rank 0, and rank 1 never starts MPI
    "if rank == 2: raise ValueError('the cause')\nif rank == 1: time.sleep(1000)",
    "ValueError: the cause",
    rank=2,
    ranks=3,
    hosts=True,
)
