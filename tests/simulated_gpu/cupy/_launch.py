"""Checks one piece of work on the current stream, and computes it with NumPy, now or later."""

import numpy as np

from . import _memory, _streams, _transfers
from ._arrays import DlpackCapsule, byte_bounds, check_dtype, ndarray

_SCALARS = (bool, int, float, complex, np.generic)


def operand(value):
    """Converts an argument of CuPy's elementwise functions to an array; numbers stay."""
    if isinstance(value, (ndarray, *_SCALARS)):
        return value
    if is_exported(value):
        return imported(value)
    raise TypeError(f"Unsupported type {type(value)}")


def launch(function, *operands, out=None, reads_out=False, also_writes=()):
    """Calls `function` with the operands' elements as NumPy arrays, on the current stream.

    It returns an array, a number or a tuple of them, or writes to its argument `out`.
    """
    queue = _streams.current_queue()
    queue.start()
    for one in operands:
        one.touch(queue, writes=False)
    for one in also_writes:
        one.touch(queue, writes=True)
    hosts = [one.host for one in operands]
    if out is not None:
        if reads_out:
            out.touch(queue, writes=False)
        out.touch(queue, writes=True)
        if not queue.is_free():  # errors in the call show here, not later
            if not also_writes:
                _tried(function, *map(_like, hosts), out=np.empty(out.shape, out.dtype))
        target = out.host
        queue.put(lambda: _quietly(function, *hosts, out=target))
        return out
    if queue.is_free():
        return _stored(queue, _quietly(function, *hosts))
    formed = _tried(function, *map(_like, hosts))
    if formed is None:  # zeros do not determine the shape of the result
        queue.synchronize()
        return _stored(queue, _quietly(function, *hosts))
    made = _stored(queue, formed, copies=False)
    several = isinstance(made, tuple)
    # Not the arrays, whose memory may be back in the pool by then.
    targets = [one.host for one in (made if several else [made])]

    def work():
        results = _quietly(function, *hosts)
        for target, result in zip(targets, results if several else [results], strict=True):
            np.copyto(target, result, casting="unsafe")

    queue.put(work)
    return made


def launch_and_wait(function, *operands):
    """`launch` for calls in which CuPy waits because the result's shape depends on the elements."""
    _streams.current_queue().refuse_capture("D2H transfers")
    _streams.current_queue().synchronize()
    return launch(function, *operands)


def _quietly(function, *hosts, **kwargs):
    with np.errstate(all="ignore"):
        result = function(*hosts, **kwargs)
    return None if kwargs else result


def _tried(function, *hosts, **kwargs):
    try:
        with np.errstate(all="ignore"):
            return function(*hosts, **kwargs)
    except IndexError:
        return None


def _like(host):
    return np.broadcast_to(np.zeros((), host.dtype), host.shape)


def _stored(queue, results, copies=True):
    if isinstance(results, (tuple, list)):
        return tuple(_stored(queue, one, copies) for one in results)
    results = np.asarray(results)
    flags = results.flags
    made = ndarray(
        results.shape,
        results.dtype,
        order="F" if flags.f_contiguous and not flags.c_contiguous else "C",
    )
    made.touch(queue, writes=True)
    if copies:
        queue.put(lambda: np.copyto(made.host, results))
    return made


def from_host(value, dtype=None, order="K"):
    """A new array with the elements of `np.array(value)`.

    CuPy first copies them to its own pinned memory, except from pinned memory in the right order.
    """
    queue = _streams.current_queue()
    queue.refuse_capture("H2D transfers")
    if (
        isinstance(value, np.ndarray)
        and value.ndim
        and _transfers.is_pinned(same := np.asarray(value, dtype))
    ):
        wanted = order if order in "CF" else "F" if value.flags.fnc else "C"
        if same.flags[wanted]:
            made = ndarray(same.shape, same.dtype, order=wanted)
            _transfers.to_device(made, same, queue, is_async=True, keeps=True)
            return made
    host = np.array(value, dtype=dtype, order=order, copy=True)
    check_dtype(host.dtype)
    if not host.flags.c_contiguous and not host.flags.f_contiguous:
        host = np.ascontiguousarray(host)
    host = host.astype(host.dtype.newbyteorder("<"), copy=False)
    return launch(lambda: host)


def to_current_device(source, order="K"):
    """A copy of an array on another GPU, made by the current stream of this GPU.

    As in CuPy, a change of order runs on the current stream of the other GPU, which is not ordered
    with this stream.
    """
    with source.device:
        source = source.astype(source.dtype, order=order, copy=False)
    if not source.flags.c_contiguous and not source.flags.f_contiguous:
        raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
    queue = _streams.current_queue()
    queue.start()
    source.data.mem.block.history.access(queue, 0, source.data.mem.block.size, writes=False)
    made = ndarray(
        source.shape,
        source.dtype,
        order="F" if order in "KAF" and source.flags.f_contiguous else "C",
    )
    made.touch(queue, writes=True)
    host = source.host
    queue.put(lambda: np.copyto(made.host, host))
    return made


def is_exported(value):
    """Whether an object that is not an array exports one."""
    return hasattr(value, "__cuda_array_interface__") or hasattr(value, "__cupy_get_ndarray__")


def imported(value):
    """The array that an object exports."""
    if hasattr(value, "__cuda_array_interface__"):
        return from_interface(value)
    return value.__cupy_get_ndarray__()


def from_interface(value):
    """The array described by an object's `__cuda_array_interface__`, on the object's memory."""
    described = value.__cuda_array_interface__
    address, shape = described["data"][0], described["shape"]
    dtype, strides = check_dtype(described["typestr"]), described.get("strides")
    nbytes, before = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 0
    if nbytes and strides is not None:
        spans = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
        nbytes = sum(map(abs, spans)) + dtype.itemsize
        before = -sum(span for span in spans if span < 0)
    memory = _memory.UnownedMemory(address - before, nbytes, value)
    pointer = _memory.MemoryPointer(memory, before)
    if (stream := described.get("stream")) is not None:
        queue = next((one for one in _streams.queues() if one.address == stream), None)
        (_streams.null_queue(memory.device_id) if queue is None else queue).synchronize()
    return ndarray(shape, dtype, pointer, strides)


def from_dlpack(value, *, device=None, copy=None):
    """CuPy's: only arrays on GPUs."""
    if not hasattr(value, "__dlpack_device__"):
        raise TypeError(f"Unsupported type {type(value)}")
    kind, device = value.__dlpack_device__()
    if kind not in (2, 13):
        raise TypeError("Unsupported array type: it must be a CUDA or ROCm array")
    with _streams.Device(device):
        capsule = value.__dlpack__(stream=_streams.get_current_stream().ptr or 1)
    if not isinstance(capsule, DlpackCapsule):
        raise TypeError("the simulated GPU takes its own tensors only")
    array = capsule.array
    if not array.size:
        return array.view()
    low, high = byte_bounds(array.host)
    memory = _memory.UnownedMemory(low, high - low, capsule)  # keeps the array alive
    return ndarray(
        array.shape, array.dtype, _memory.MemoryPointer(memory, array.data.ptr - low), array.strides
    )
