"""Converts to arrays: arrays of any library, by the protocols they support, numbers, sequences.

Names say who owns the memory. `as_...` returns the same memory if possible, `..._copy` never does,
and `from_foreign` shares the memory of another library's array, which the result keeps alive. The
modules of variables, gradients and datasets decide what they allow. No other library is imported: a
program that has a library's array has imported it already.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, DistributedValues, refuse

PLAIN = (np.ndarray, np.generic, bool, int, float, complex, str, bytes, list, tuple, type(None))
"""Types that NumPy accepts directly; they are not another library's arrays."""
_IN_MEMORY = ("__dlpack__", "__array_interface__", "__cuda_array_interface__")
_PROTOCOLS = ("__array__", *_IN_MEMORY)
_GPUS = (2, 10, 13)  # device types of DLPack: CUDA, ROCm, CUDA managed memory


def is_foreign(value: Any) -> bool:
    """Whether `value` is an array of another library, which supports DLPack (as do variables)."""
    return (
        not isinstance(value, PLAIN) and hasattr(value, "__dlpack__") and not gpu.is_on_gpu(value)
    )


def is_stored(value: Any) -> bool:
    """Whether `value` is an array with dimensions but not in memory, such as h5py's or zarr's.

    It can be indexed and has a shape and a dtype, but no memory to share; netCDF4 has such arrays
    too. A Series of pandas looks the same, but is in memory, and indexed by labels.
    """
    return (
        not isinstance(value, PLAIN)
        and all(hasattr(value, name) for name in ("dtype", "__getitem__"))
        and bool(getattr(value, "shape", None))
        and not any(hasattr(value, name) for name in (*_IN_MEMORY, "iloc"))
    )


def has_own_dtype(value: Any) -> bool:
    """Whether `value` has a dtype; for Python numbers and their sequences NumPy chooses one."""
    return hasattr(value, "dtype") or exports_array(value)


def as_array(call: str, value: Any, on_gpu: bool) -> Array:
    """`value` as an array on its host or GPU; an array stays in the same memory.

    Args:
        call: the user's name of the method.
        value: an array of any library, a number, or a sequence of numbers.
        on_gpu: whether it may be on a GPU.

    Returns:
        A NumPy array, of Python objects if `value` cannot become any other array; a CuPy array on a
        GPU. A tensor that requires a gradient is detached.

    Raises:
        TypeError: `value` is on a GPU and must not be, is an array without values in memory, such
            as a sparse one, or is masked.
        ValueError: it is a sequence of arrays of different shapes.
        RuntimeError: it is on a GPU, and CuPy is not installed.
    """
    # The usual cases, before any look at a protocol.
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    _refuse_masked(call, value)
    if isinstance(value, PLAIN) or not exports_array(value):
        try:
            return np.asarray(value)
        except ValueError as error:  # which lacks the name of the call
            raise ValueError(f"{call}: {error}") from error
    array = from_foreign(call, value)
    if not gpu.is_on_gpu(array):
        return array
    if not on_gpu:
        raise TypeError(
            f"{call}: the value is on a GPU, and must be in host memory here; pass "
            "hs.asnumpy(value)"
        )
    if array is not value:
        gpu.keep_alive(array)
    return array


def as_read_only(call: str, value: Any, on_gpu: bool) -> Array:
    """`as_array` of a value that changes a variable; marks another library's host memory read-only.

    Such memory may be a variable's own, exported by `__array__` or DLPack. An update reads its
    values while variables already change, here or on another rank, so it first copies whatever is
    read-only.

    Raises:
        TypeError: see `as_array`.
    """
    array = as_array(call, value, on_gpu)
    if array is not value and isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array


def as_native(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`array` in this machine's byte order, the only one that MPI and NCCL know."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype holds numbers or booleans. Those of `ml_dtypes` have kind `V`, as records."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and not issubclass(dtype.type, np.void))


def host_copy(call: str, value: Any) -> np.ndarray[Any, Any]:
    """A NumPy copy of `value`, an array of any library or a number.

    Raises:
        TypeError: it is an array without values in memory, such as a sparse one, or is masked.
    """
    _refuse_masked(call, value)
    array = from_foreign(call, value) if exports_array(value) else np.asarray(value)
    return gpu.to_host(array) if gpu.is_on_gpu(array) else np.array(array)


def from_foreign(call: str, value: Any) -> Array:
    """An array of any library as a NumPy or CuPy array in the same memory, which it keeps alive.

    Raises:
        TypeError: it has no values in memory, such as a sparse tensor.
        RuntimeError: it is on a GPU, and CuPy is not installed.
    """
    if isinstance(value, DistributedValues):
        refuse(call)
    # CuPy's own arrays need no protocol.
    if gpu.is_on_gpu(value):
        return value
    try:
        return _as_cupy(call, value) if _has_gpu_memory(value) else _as_numpy(value).view()
    except (TypeError, ValueError, BufferError) as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"{call}: this {type(value).__module__}.{type(value).__name__} does not become an "
            f"array: {reason}. Pass a dense array with values, outside functions that are traced, "
            "such as by jax.jit, jax.grad and torch.func.grad"
        ) from error


def _refuse_masked(call: str, value: Any) -> None:
    # Refused by its class, even if nothing is masked now: otherwise a program would run until the
    # first step in which something is. Without an import, which takes a millisecond: before the
    # program imports it there is no masked array.
    ma = sys.modules.get("numpy.ma")
    if ma is not None and isinstance(value, ma.MaskedArray):
        raise TypeError(
            f"{call}: this is a masked array, and its mask would be lost; pass "
            "array.filled(value), or array.data with the mask as a separate array. A netCDF4 "
            "variable returns plain arrays after variable.set_auto_mask(False)"
        )


def exports_array(value: Any) -> bool:
    """Whether `value` exports memory or an array by any of the protocols."""
    return any(hasattr(value, protocol) for protocol in _PROTOCOLS)


def _has_gpu_memory(value: Any) -> bool:
    if _is_of_torch(value):
        return value.is_cuda
    if hasattr(value, "__dlpack_device__"):
        return value.__dlpack_device__()[0] in _GPUS
    return hasattr(value, "__cuda_array_interface__")


def _as_cupy(call: str, value: Any) -> Array:
    cupy = gpu.load_cupy(call)
    # Preferred, because DLPack orders the streams of the two libraries.
    if hasattr(value, "__dlpack__"):
        return cupy.from_dlpack(value.detach() if _is_of_torch(value) else value)
    return cupy.asarray(value)


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    if _is_of_torch(value):
        return _of_torch(value)
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return np.asarray(value)
    return np.from_dlpack(value)


def _is_of_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _of_torch(tensor: Any) -> np.ndarray[Any, Any]:
    torch = sys.modules["torch"]
    try:
        if tensor.dtype == torch.bfloat16:  # which torch cannot export to NumPy
            return tensor.detach().view(torch.int16).numpy().view(_bfloat16())
        return tensor.numpy(force=True)  # detached, and with lazy operations such as conj() applied
    except RuntimeError as error:
        raise TypeError(str(error)) from error


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            "NumPy needs the package ml_dtypes for bfloat16, which is not installed"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


def shape_of_weights(
    call: str, weights: tuple[int, ...], values: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape in which weights multiply values without broadcasting these.

    Weights may lack the last dimensions, or have an extra last dimension of 1.

    Raises:
        ValueError: there is none.
    """
    without = weights[:-1] if len(weights) == len(values) + 1 and weights[-1] == 1 else weights
    shape = without + (1,) * (len(values) - len(without))
    if len(shape) > len(values) or any(
        n not in (1, size) for n, size in zip(shape, values, strict=True)
    ):
        raise ValueError(
            f"{call}: sample_weight has shape {weights} and the values {values}; pass a weight for "
            "each value, or for each index of their first dimensions"
        )
    return shape


def as_number(call: str, argument: str, value: Any, allowed: str = "a number") -> float:
    """The value of an argument or attribute of `call` (the user's name) as a float.

    Raises:
        TypeError: it is not a number, such as a text.
    """
    try:
        return value.__float__()
    except (AttributeError, ArithmeticError, TypeError, ValueError):
        raise TypeError(f"{call}: {argument} is {value!r}; it must be {allowed}") from None


def checksum(array: Array) -> int:
    """A checksum of an array's bytes, wherever it is."""
    return zlib.crc32(np.ascontiguousarray(gpu.to_host(array)).reshape(-1).view(np.uint8).data)
