"""Each call of CuPy by the package, and array methods in examples and docs, up to CUDA."""

import functools

import ml_dtypes
import numpy as np
import pytest
from internals import nccl_start
from on_host import array, cupy, reaches_cuda
from sources import PACKAGE, PAGES, PROGRAMS, calls

# CuPy cannot delete a stream that could not be made.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
RUNTIME, CUDA = cupy.cuda.runtime, cupy.cuda
NCCL = nccl_start.load_nccl()
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def stream():
    return CUDA.Stream.null


def event():
    made = CUDA.Event.__new__(CUDA.Event)
    made.ptr = 0
    return made


@functools.cache
def communicator():
    """Not a valid communicator: NCCL says so once CuPy has accepted the arguments."""
    return NCCL.NcclCommunicator.__new__(NCCL.NcclCommunicator)


# fmt: off
SAMPLES = {
    "cupy.ElementwiseKernel": lambda: cupy.ElementwiseKernel("T x", "T y", "y = x", no_return=True)(array(3), array(3)),
    "cupy.RawKernel": lambda: cupy.RawKernel('extern "C" __global__ void f() {}', "f")((1,), (1,), ()),
    "cupy.add.at": lambda: cupy.add.at(array(5, np.float64), array((3, 2), np.int64), array((3, 2), np.float64)),
    "cupy.add.reduce": lambda: cupy.add.reduce(array((4, 2), bool), axis=None, dtype=np.float64),
    "cupy.arange": lambda: cupy.arange(3, dtype=np.int64),
    "cupy.argsort": lambda: cupy.argsort(array(3, np.int64), kind="stable"),
    "cupy.asarray": lambda: cupy.asarray(np.ones(3), np.float64),
    "cupy.ascontiguousarray": lambda: cupy.ascontiguousarray(array((3, 4)).T),
    "cupy.broadcast_to": lambda: cupy.broadcast_to(array((3, 1)), (3, 4)),
    "cupy.concatenate": lambda: cupy.concatenate([array((3, 1)), array((3, 2))], 1),
    "cupy.copyto": lambda: cupy.copyto(array((3, 4)), array((3, 4))),
    "cupy.diff": lambda: cupy.diff(array(3, np.int64), prepend=-1),
    "cupy.empty": lambda: cupy.empty((3, 4), np.uint8),
    "cupy.empty_like": lambda: cupy.empty_like(array(3)),
    "cupy.exp": lambda: cupy.exp(array(3)),
    "cupy.fft.config.get_plan_cache": lambda: [*cupy.fft.config.get_plan_cache()],
    "cupy.flatnonzero": lambda: cupy.flatnonzero(array(3, np.int64)),
    "cupy.from_dlpack": lambda: cupy.from_dlpack(array(3)),
    "cupy.full": lambda: cupy.full((3,), 1.5),
    "cupy.full_like": lambda: cupy.full_like(array(3), np.nan),
    "cupy.get_default_memory_pool": lambda: cupy.get_default_memory_pool().free_all_blocks(),
    "cupy.isfinite": lambda: cupy.isfinite(array((), np.int64)),
    "cupy.log": lambda: cupy.log(array(3)),
    "cupy.log1p": lambda: cupy.log1p(array(3)),
    "cupy.maximum": lambda: cupy.maximum(array(3), 0),
    "cupy.may_share_memory": lambda: cupy.may_share_memory(array(3)[:2], array(3)),
    "cupy.ndarray": lambda: cupy.ndarray((3,), np.uint8, array(3, np.uint8).data),
    "cupy.random.default_rng": lambda: cupy.random.default_rng(2**63),
    "cupy.ones": lambda: cupy.ones((3, 4), np.int64),
    "cupy.sqrt": lambda: cupy.sqrt(array(())),
    "cupy.sum": lambda: cupy.sum(array((3, 4)), axis=0, dtype=np.float64),
    "cupy.where": lambda: cupy.where(array(3, bool), array(3), 1.0),
    "cupy.zeros": lambda: cupy.zeros((3, 4), np.float32),
    "cupy.cuda.Device": lambda: CUDA.Device(0).use(),
    "cupy.cuda.Event": lambda: CUDA.Event(disable_timing=True),
    "cupy.cuda.Memory": lambda: CUDA.Memory(256),
    "cupy.cuda.MemoryPointer": lambda: CUDA.MemoryPointer(array(3).data.mem, 0),
    "cupy.cuda.MemoryPool": lambda: CUDA.MemoryPool().malloc(3),
    "cupy.cuda.Stream": lambda: CUDA.Stream(non_blocking=True),
    "cupy.cuda.alloc": lambda: CUDA.alloc(256),
    "cupy.cuda.alloc_pinned_memory": lambda: CUDA.alloc_pinned_memory(256),
    "cupy.cuda.get_current_stream": lambda: CUDA.get_current_stream(),
    "cupy.cuda.using_allocator": lambda: CUDA.using_allocator(CUDA.MemoryPool().malloc).__enter__(),
    "cupy.cuda.runtime.driverGetVersion": lambda: RUNTIME.driverGetVersion(),
    "cupy.cuda.runtime.getDevice": lambda: RUNTIME.getDevice(),
    "cupy.cuda.runtime.getDeviceProperties": lambda: RUNTIME.getDeviceProperties(0)["uuid"],
    "cupy.cuda.runtime.runtimeGetVersion": lambda: RUNTIME.runtimeGetVersion(),
    "cupy.cuda.runtime.setDevice": lambda: RUNTIME.setDevice(0),
    "cupy.cuda.nvtx.RangePush": lambda: CUDA.nvtx.RangePush("name"),
    "cupy.cuda.nvtx.RangePop": lambda: CUDA.nvtx.RangePop(),
    "cupy.cuda.nccl.get_version": lambda: NCCL.get_version() > 0,
    "cupy.cuda.nccl.get_unique_id": lambda: NCCL.get_unique_id(),
    "cupy.cuda.nccl.groupStart": lambda: NCCL.groupStart(),
    "cupy.cuda.nccl.groupEnd": lambda: NCCL.groupEnd(),
    "cupy.cuda.nccl.NcclCommunicator": lambda: NCCL.NcclCommunicator(1, NCCL.get_unique_id(), 0),
    "cupy.cuda.nccl.NcclCommunicator.allReduce": lambda: communicator().allReduce(256, 256, 3, 7, 0, 1),
    "cupy.cuda.nccl.NcclCommunicator.reduce": lambda: communicator().reduce(256, 256, 3, 7, 2, 0, 1),
    "cupy.cuda.nccl.NcclCommunicator.broadcast": lambda: communicator().broadcast(256, 256, 3, 1, 0, 1),
    "cupy.cuda.nccl.NcclCommunicator.allGather": lambda: communicator().allGather(256, 256, 3, 1, 1),
    "cupy.cuda.nccl.NcclCommunicator.send": lambda: communicator().send(256, 3, 1, 0, 1),
    "cupy.cuda.nccl.NcclCommunicator.recv": lambda: communicator().recv(256, 3, 1, 0, 1),
    "cupy.cuda.nccl.NcclCommunicator.check_async_error": lambda: communicator().check_async_error(),
    "cupy.cuda.nccl.NcclCommunicator.destroy": lambda: communicator().destroy(),
}
METHODS = {
    "an event": lambda: [event().record(stream()), event().done],
    "an event's address": lambda: [event().ptr, event().synchronize()],
    "a stream waits": lambda: stream().wait_event(event()),
    "a stream is pushed": lambda: stream().__enter__(),
    "a stream is popped": lambda: stream().__exit__(None, None, None),
    "a stream is synchronized": lambda: stream().synchronize(),
    "a stream ends to capture": lambda: stream().end_capture(),
    "a stream captures": lambda: stream().is_capturing(),
    "an array in memory that is there": lambda: cupy.ndarray(
        shape=(2, 2), dtype=np.float32, strides=(4, 8), memptr=CUDA.MemoryPointer(array(6).data.mem, 4)
    ),
    "a stream is used": lambda: stream().use(),
    "get": lambda: array(3).get(out=np.empty(3, np.float32)),
    "get on a "
    "stream": lambda: array(3).get(out=np.empty(3, np.float32), blocking=False, stream=stream()),
    "get of what is not contiguous": lambda: array((3, 4))[:, 0].get(out=np.empty(3, np.float32)),
    "set": lambda: array(3).set(np.ones(3, np.float32)),
    "bfloat16": lambda: [array(3, BFLOAT16).set(np.ones(3, BFLOAT16)), array(3, BFLOAT16) * array(3, BFLOAT16)],
    "set on a stream": lambda: array(3, np.uint8).set(np.ones(3, np.uint8), stream=stream()),
    "views": lambda: array(64, np.uint8)[16:32].view(np.float32).reshape(2, 2),
    "views without elements": lambda: array(64, np.uint8)[16:16].view(np.float32).reshape(0, 2),
    "views without dimensions": lambda: array(64, np.uint8)[16:20].view(np.float32).reshape(()),
    "views of complex "
    "numbers": lambda: array(4, np.complex64).view(array(4, np.complex64).real.dtype),
    "division in place": lambda: array(4).__itruediv__(3),
    "writing": lambda: array(4).__setitem__(slice(1, 3), array(2)),
    "astype": lambda: array(4, np.float16).astype(np.float32, copy=False),
    "rows": lambda: [array((4, 2))[array(3, np.int64)], array((4, 2)).__setitem__(array(3, np.int64), array((3, 2)))],
    "the bounds of indices": lambda: [array(4, np.int64).min(), array(4, np.int64).max()],
    "a metric's counts": lambda: cupy.add.at(array(5, np.float64), array(3, np.int64), 1.0),
    "a metric": lambda: [array((4, 2), dtype).argmax(axis=-1) for dtype in (bool, np.uint8, np.float16, np.float64)],
    "a part of a metric's totals": lambda: array(2, np.float64)[0:1].__iadd__(array(())),
    "dlpack": lambda: array(4).__dlpack__(stream=None),
}


def test_there_is_a_sample_of_each_call_of_the_package():
    made = {what for what in calls(PACKAGE) if what.startswith("cupy.")}
    assert SAMPLES.keys() == made


@pytest.mark.parametrize("name", [*SAMPLES, *METHODS])
def test_cupy_takes_the_arguments(name):
    sample = SAMPLES.get(name) or METHODS[name]
    try:
        reaches_cuda(sample)
    except NCCL.NcclError as error:
        assert "INVALID_ARGUMENT" in str(error) or "UNHANDLED_CUDA_ERROR" in str(error), error


def test_cupy_has_what_programs_call():
    for what in calls([*PROGRAMS, *PAGES]):
        if what.startswith("cupy."):
            functools.reduce(getattr, what.removeprefix("cupy.").split("."), cupy)


def test_numbers_of_nccl_are_those_of_its_header():
    names = "INT8 UINT8 INT32 UINT32 INT64 UINT64 FLOAT16 FLOAT32 FLOAT64 BFLOAT16".split()
    numbers = {f"NCCL_{name}": number for number, name in enumerate(names)}
    numbers |= {"NCCL_SUM": 0, "NCCL_MAX": 2, "NCCL_MIN": 3}
    assert {name: getattr(NCCL, name) for name in numbers} == numbers


@pytest.mark.parametrize("result", range(1, 9))  # the last one in NCCL 2.32 is ncclTimeout
def test_every_failure_of_nccl_has_an_exception(result):
    """Of either kind: CuPy has no names for the newer results."""
    with pytest.raises((NCCL.NcclError, KeyError)):
        NCCL.check_status(result)
