"""CUDA's runtime, as CuPy has it."""

from cupy import _memory, _streams

_ERRORS = {
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    907: (
        "cudaErrorCapturedEvent",
        "operation not permitted on an event last recorded in a capturing stream",
    ),
    901: (
        "cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture",
    ),
    905: (
        "cudaErrorStreamCaptureIsolation",
        "dependency created on uncaptured work in another stream",
    ),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status
        super().__init__(": ".join(_ERRORS[status]))


def getDeviceCount():
    return _streams.count()


def getDevice():
    return _streams.state().device


def setDevice(device):
    _streams.Device(device).use()


def runtimeGetVersion():
    return 13000


def driverGetVersion():
    return 13000


def memGetInfo():
    """CUDA's: free and total bytes."""
    _streams.take_driver("cudaMemGetInfo")
    return _memory.CAPACITY - _memory.used(getDevice()), _memory.CAPACITY


def getDeviceProperties(device):
    """CUDA's: only the name."""
    _streams.Device(device)
    return {"name": b"simulated GPU", "uuid": bytes([device]) * 16}
