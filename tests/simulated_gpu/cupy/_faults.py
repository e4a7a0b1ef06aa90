"""Injects faults from SIMULATED_GPU_FAULTS: `KIND[@RANK][:NUMBER[:VALUE]]`, comma-separated.

Without a rank a fault happens on every rank. NUMBER starts at 1; what it counts depends on KIND:

nccl-hangs         the NUMBER-th NCCL call of the process never ends
nccl-fails         the NUMBER-th NCCL call fails with NCCL's result VALUE
nccl-blocks        the host does not return from the NUMBER-th NCCL call
nccl-breaks        from the NUMBER-th NCCL call on, NCCL's asynchronous error is VALUE
nccl-start-hangs   the NUMBER-th communicator is never connected
nccl-start-fails   the NUMBER-th communicator fails with the result VALUE
out-of-memory      the NUMBER-th allocation on a GPU fails, and all after it
out-of-pinned      the same for pinned memory
compile            the NUMBER-th kernel does not compile
context            the context is lost at the NUMBER-th wait of the host for the GPU; 0: at the end
"""

import collections
import os
import threading

_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_ERRORS = {
    2: "cudaErrorMemoryAllocation: out of memory",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    901: "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error during capture",
    905: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    907: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a capturing stream",
}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(_ERRORS[status])


class Partial:
    """A base of what has only a part of CuPy's names."""

    __slots__ = ()

    def __getattr__(self, name):
        raise AttributeError(f"the simulated GPU does not have {type(self).__name__}.{name}")


def _rank():
    return next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)


def _wanted(text):

    wanted = {}
    for one in filter(None, text.split(",")):
        what, *numbers = one.split(":")
        kind, _, rank = what.partition("@")
        if not rank or int(rank) == _rank():
            number, value = [*map(int, numbers), *(1, 0)[len(numbers) :]]
            wanted[kind] = (number, value)
    return wanted


wanted = _wanted(os.environ.get("SIMULATED_GPU_FAULTS", ""))
"""The faults of this process, which a program may also set: kind -> (number, value)."""
counted: "collections.Counter[str]" = collections.Counter()
is_context_lost = False


def value(kind, count, lasts=False):
    """The value of a fault of this kind, if it is due now; else None.

    `count` is the key in `counted`.
    """
    if kind not in wanted:
        return None
    number, found = wanted[kind]
    return found if (counted[count] >= number if lasts else counted[count] == number) else None


def lose_context():
    """Makes every later wait for the GPU fail, as after an illegal address."""
    global is_context_lost
    is_context_lost = True


def check_context():
    """Raises what CUDA raises if the context is lost."""
    # Other threads wait at unpredictable times.
    if threading.current_thread() is threading.main_thread():
        counted["waits"] += 1
    if value("context", "waits") is not None:
        lose_context()
    if is_context_lost:
        raise CUDARuntimeError(700)
