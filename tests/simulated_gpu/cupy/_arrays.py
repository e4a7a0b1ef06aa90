"""`cupy.ndarray`: an array in a block of device memory, which the host can only copy."""

import numpy as np

from . import _checker, _faults, _memory, _streams, _transfers

byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # NumPy 1.26 has it elsewhere
_REFUSED = "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
_KINDS = "?bhilqBHILQefdFD"


def check_dtype(dtype):
    """CuPy's: the dtype, if CuPy supports it."""
    dtype = np.dtype(dtype)
    if dtype.char not in _KINDS and dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


class Flags:
    """CuPy's, which has no `writeable`."""

    def __init__(self, array):
        self.c_contiguous = array.host.flags.c_contiguous
        self.f_contiguous = array.host.flags.f_contiguous
        self.owndata = array.base is None

    def __getitem__(self, name):
        return getattr(self, {"C": "c_contiguous", "F": "f_contiguous"}.get(name, name.lower()))


class ndarray(_faults.Partial):
    """CuPy's, and its elements as a NumPy array, `host`, which only work on streams may access."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        dtype = check_dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.data = _memory.allocate(size) if memptr is None else memptr
        block = self.data.mem.block
        offset = self.data.ptr - block.ptr
        self.host = np.ndarray(shape, dtype, block.buffer, offset, strides, order)
        self.base = None
        self._range = None

    def view_of(self, host):
        """Not in CuPy: another array on the same memory."""
        made = ndarray.__new__(ndarray)
        made.host = host
        offset = (
            host.__array_interface__["data"][0] - self.data.mem.ptr
            if host.size
            else self.data.offset
        )
        made.data = _memory.MemoryPointer(self.data.mem, offset)
        made.base = self if self.base is None else self.base
        made._range = None
        return made

    def touch(self, queue, writes):
        """Not in CuPy: records that the work just started on the queue reads or writes the array."""
        block = self.data.mem.block
        if not self.host.size:
            return
        if block.device != queue.device:
            raise _checker.report(
                f"the simulated GPU: an array on GPU {block.device} is used at "
                f"{_checker.shown(_checker.place())} on {queue.name}; copy it there first"
            )
        if self._range is None:
            low, high = byte_bounds(self.host)
            self._range = low - block.ptr, high - block.ptr
        block.history.access(queue, *self._range, writes)

    # ---- attributes

    shape = property(
        lambda self: self.host.shape, lambda self, shape: setattr(self.host, "shape", shape)
    )
    dtype = property(lambda self: self.host.dtype)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(Flags)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self.view_of(self.host.T))

    @property
    def real(self):
        return self.view_of(self.host.real) if self.dtype.kind == "c" else self

    @property
    def imag(self):
        if self.dtype.kind == "c":
            return self.view_of(self.host.imag)
        from ._functions import zeros_like

        return zeros_like(self)

    # ---- views

    def view(self, dtype=None):
        return self.view_of(
            self.host.view() if dtype is None else self.host.view(check_dtype(dtype))
        )

    def reshape(self, *shape, order="C"):
        """CuPy's: a view if possible."""
        shape = shape[0] if len(shape) == 1 else shape
        host = self.host.reshape(shape, order=order)
        if not self.size or np.may_share_memory(host, self.host):
            return self.view_of(host)
        return self.copy(order=order).reshape(shape, order=order)

    def ravel(self, order="C"):
        return self.reshape(-1, order=order)

    def transpose(self, *axes):
        return self.view_of(self.host.transpose(*axes))

    def squeeze(self, axis=None):
        return self.view_of(self.host.squeeze(axis))

    def __len__(self):
        return len(self.host)

    def __iter__(self):
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    # ---- to the host and back

    def get(self, stream=None, order="C", out=None, blocking=True):
        if out is not None:
            if not isinstance(out, np.ndarray):
                raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
            if self.dtype != out.dtype:
                raise TypeError(f"{self.dtype} array cannot be obtained to {out.dtype} array")
            if self.shape != out.shape:
                raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, not {out.shape}")
            if not out.flags.c_contiguous and not out.flags.f_contiguous:
                raise RuntimeError("`out` cannot be a non-contiguous ndarray")
            order = "C" if out.flags.c_contiguous else "F"
        source, order = self, order.upper()
        order = ("F" if self.flags.f_contiguous else "C") if order == "A" else order
        with self.device:
            stream = _streams.get_current_stream() if stream is None else stream
            if not self.host.flags["C" if order == "C" else "F"]:
                with stream:  # its end makes the stream below it current, as in CuPy
                    source = self.copy(order=order)
            target = np.empty(self.shape, self.dtype, order) if out is None else out
            if target.size:
                _transfers.to_host(source, target, stream.queue, is_async=not blocking)
        return target

    def set(self, arr, stream=None):
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if self.flags.c_contiguous:
            arr = arr if arr.flags.c_contiguous else np.array(arr, order="C")
        elif self.flags.f_contiguous:
            arr = arr if arr.flags.f_contiguous else np.array(arr, order="F")
        else:
            raise RuntimeError("Cannot set to non-contiguous array")
        with self.device:
            stream = _streams.get_current_stream() if stream is None else stream
            if self.size:
                _transfers.to_device(self, arr, stream.queue, is_async=stream.ptr != 0)

    def item(self):
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    def tobytes(self, order="C"):
        return self.get().tobytes(order)

    def __bool__(self):
        if self.size > 1:
            raise ValueError("The truth value of an array with more than one element is ambiguous.")
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __complex__(self):
        return complex(self.get())

    def __format__(self, spec):
        return format(self.get() if self.ndim else self.item(), spec)

    def __repr__(self):
        return repr(self.get())

    def __str__(self):
        return str(self.get())

    def __array__(self, dtype=None, copy=None):
        raise TypeError(_REFUSED)

    # ---- protocols

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
            "version": 3,
            "stream": _streams.get_current_stream().ptr or 1,
        }

    def __dlpack_device__(self):
        return 2, self.data.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError(
                "the simulated GPU exports its arrays on their own device, without a copy"
            )
        own, consumer = _streams.current_queue(), None
        if stream in (None, 1):
            consumer = _streams.null_queue(own.device)
        elif stream != -1:
            consumer = next((one for one in _streams.queues() if one.address == stream), None)
        if consumer not in (None, own):  # it waits for the current stream
            own.start()
            consumer.wait(dict(own.clock), own.marker())
        return DlpackCapsule(self)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        from ._functions import dispatched_ufunc

        return dispatched_ufunc(ufunc, method, inputs, kwargs)

    def __array_function__(self, func, types, args, kwargs):
        from ._functions import dispatched_function

        return dispatched_function(func, args, kwargs)

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    def __reduce__(self):
        from ._functions import array

        return array, (self.get(),)


class DlpackCapsule:
    """Replaces the capsule of a tensor on the simulated GPU; only the simulation accepts it."""

    def __init__(self, array):
        self.array = array
