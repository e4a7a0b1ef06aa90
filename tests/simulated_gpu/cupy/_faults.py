"""Faults on demand, from SIMULATED_GPU_FAULTS: `KIND[@RANK][:NUMBER[:VALUE]]`, several with commas between them.

Without a rank a fault is every rank's. NUMBER counts from 1, and what is counted is told with each
kind:

nccl-hangs       the NUMBER-th NCCL call of the process never ends
nccl-fails       the NUMBER-th NCCL call fails with NCCL's result VALUE
nccl-blocks      the host does not return from the NUMBER-th NCCL call
nccl-breaks      from the NUMBER-th NCCL call on, NCCL's asynchronous error is VALUE
nccl-start-hangs, nccl-start-fails     the NUMBER-th communicator is never connected, or fails with the result VALUE
out-of-memory    the NUMBER-th allocation on a GPU, and all after it
out-of-pinned    the same of pinned memory
compile          the NUMBER-th kernel does not compile
context          the context is lost at the NUMBER-th wait of the host for the GPU; 0: where the program ends
"""

import collections
import os
import threading

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def _rank():
    return next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)


def _wanted(text):
    """(kind -> (number, value)) of this rank's faults."""
    wanted = {}
    for one in filter(None, text.split(",")):
        what, *numbers = one.split(":")
        kind, _, rank = what.partition("@")
        if not rank or int(rank) == _rank():
            number, value = [*map(int, numbers), *(1, 0)[len(numbers) :]]
            wanted[kind] = (number, value)
    return wanted


wanted = _wanted(os.environ.get("SIMULATED_GPU_FAULTS", ""))
"""The faults of this process, which a program may also set itself: kind -> (number, value)."""
counted: "collections.Counter[str]" = collections.Counter()
is_context_lost = False


def value(kind, count, lasts=False):
    """The value of a fault of this kind, if it is due now; else None.

    `count` names what is counted for it.
    """
    if kind not in wanted:
        return None
    number, found = wanted[kind]
    return found if (counted[count] >= number if lasts else counted[count] == number) else None


def lose_context():
    """From now on every wait for the GPU fails, as after an illegal address."""
    global is_context_lost
    is_context_lost = True


def check_context():
    """Raises what CUDA does where the context is lost."""
    if (
        threading.current_thread() is threading.main_thread()
    ):  # others wait whenever they come to it
        counted["waits"] += 1
    if value("context", "waits") is not None:
        lose_context()
    if is_context_lost:
        from .cuda.runtime import CUDARuntimeError

        raise CUDARuntimeError(700)
