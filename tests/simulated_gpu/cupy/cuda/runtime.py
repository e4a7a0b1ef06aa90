"""CUDA's runtime, as CuPy has it."""

from cupy import _memory, _streams
from cupy._faults import CUDARuntimeError as CUDARuntimeError


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
