"""Arrays of other libraries, by the protocols that they speak; none of these libraries is imported.

A protocol hands out memory, so what becomes an array here shares it with the object that it came from.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hpcstrat import _gpu
from hpcstrat._types import Array
from hpcstrat._values import DistributedValues, refuse

PLAIN = (np.ndarray, np.generic, bool, int, float, complex, str, bytes, list, tuple, type(None))
"""What NumPy takes as it is, and speaks no other library's protocol."""
_PROTOCOLS = ("__dlpack__", "__array__", "__array_interface__", "__cuda_array_interface__")
_GPUS = (2, 10, 13)  # DLPack's numbers: CUDA, ROCm, memory that both sides see


def is_foreign(value: Any) -> bool:
    """Whether `value` is an array of another library, one that speaks DLPack. Variables do, too."""
    return not isinstance(value, PLAIN) and hasattr(value, "__dlpack__") and not _gpu.is_on_gpu(value)


def has_own_dtype(value: Any) -> bool:
    """Whether the dtype of `value` is its own, and not what NumPy takes for a Python number or a sequence of them."""
    return hasattr(value, "dtype") or speaks(value)


def as_array(call: str, value: Any, on_gpu: bool) -> Array:
    """`value` as an array where it is, over the same memory if it is an array.

    Args:
        call: the user's name of the method.
        value: an array of any library, a number, or a sequence of numbers.
        on_gpu: whether it may be on a GPU.

    Returns:
        A NumPy array, of Python objects where `value` is no array and does not become one; a CuPy array on a GPU. A
        tensor that requires a gradient is detached.

    Raises:
        TypeError: `value` is on a GPU and must not be, an array without values in memory, such as a sparse one, or a
            masked one.
        ValueError: it is a sequence of arrays of different shapes.
        RuntimeError: it is on a GPU, and CuPy is not installed.
    """
    if type(value) is np.ndarray:
        return value
    _refuse_masked(call, value)
    if isinstance(value, PLAIN) or not speaks(value):
        return np.asarray(value)
    array = converted(call, value)
    if not _gpu.is_on_gpu(array):
        return array
    if not on_gpu:
        raise TypeError(f"{call}: the value is on a GPU, and must be in host memory here; pass hs.asnumpy(value)")
    if array is not value:
        _gpu.hold(array)
    return array


def to_host(call: str, value: Any) -> np.ndarray[Any, Any]:
    """A copy of `value`, an array of any library or a number, in host memory.

    Raises:
        TypeError: it is an array without values in memory, such as a sparse one, or a masked one.
    """
    _refuse_masked(call, value)
    array = converted(call, value) if speaks(value) else np.asarray(value)
    return _gpu.to_host(array) if _gpu.is_on_gpu(array) else np.array(array)


def converted(call: str, value: Any) -> Array:
    """An array of any library as NumPy's or CuPy's over the same memory, which the result keeps alive.

    Raises:
        TypeError: it has no values in memory, such as a sparse tensor.
        RuntimeError: it is on a GPU, and CuPy is not installed.
    """
    if isinstance(value, DistributedValues):
        refuse(call)
    if _gpu.is_on_gpu(value):
        return value
    try:
        return _on_gpu(call, value) if _is_on_gpu(value) else _on_host(value).view()
    except (TypeError, ValueError, BufferError) as error:
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"{call}: this {type(value).__module__}.{type(value).__name__} does not become an array: {reason}. Pass a "
            "dense array with values, and outside of functions that are traced, as jax.jit, jax.grad and "
            "torch.func.grad trace theirs"
        ) from error


def copy_of(value: Any) -> Any:
    """A copy of an array of another library, which is of that library too."""
    return value.clone() if hasattr(value, "clone") else value.copy()


def _refuse_masked(call: str, value: Any) -> None:
    # By its class, whether or not something is masked: a program would run until the first step in which it is.
    ma = sys.modules.get("numpy.ma")  # a millisecond to import, and without it there is no masked array
    if ma is not None and isinstance(value, ma.MaskedArray):
        raise TypeError(
            f"{call}: this is a masked array, and its mask would be lost; pass array.filled(value), or array.data with "
            "the mask as an array of its own"
        )


def speaks(value: Any) -> bool:
    """Whether `value` hands out memory, or an array, by any of the protocols."""
    return any(hasattr(value, protocol) for protocol in _PROTOCOLS)


def _is_on_gpu(value: Any) -> bool:
    if _is_of_torch(value):
        return value.is_cuda
    if hasattr(value, "__dlpack_device__"):
        return value.__dlpack_device__()[0] in _GPUS
    return hasattr(value, "__cuda_array_interface__")


def _on_gpu(call: str, value: Any) -> Array:
    cupy = _gpu.load_cupy(call)
    if hasattr(value, "__dlpack__"):  # which orders the streams of the two libraries
        return cupy.from_dlpack(value.detach() if _is_of_torch(value) else value)
    return cupy.asarray(value)


def _on_host(value: Any) -> np.ndarray[Any, Any]:
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
        if tensor.dtype == torch.bfloat16:  # which torch does not hand to NumPy
            return tensor.detach().view(torch.int16).numpy().view(_bfloat16())
        return tensor.numpy(force=True)  # without its gradient, and with what torch has put off, such as conj()
    except RuntimeError as error:
        raise TypeError(str(error)) from error


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError("NumPy has bfloat16 by the package ml_dtypes, which is not installed") from None
    return np.dtype(ml_dtypes.bfloat16)
