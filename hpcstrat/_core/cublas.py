"""Matrix products in CUDA graphs: by cuBLAS, because CuPy refuses them while a stream captures."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

WORKSPACE = 32 << 20
"""Bytes of the workspace: as many as cuBLAS takes for itself on Hopper."""

# CUDA's and cuBLAS's numbers of a dtype and of what products of it are computed in, and the type of
# the factors.
_TYPES: dict[str, tuple[int, int, type[ctypes.c_float] | type[ctypes.c_double]]] = {
    "e": (2, 68, ctypes.c_float),
    "f": (0, 68, ctypes.c_float),
    "d": (1, 70, ctypes.c_double),
}
_IN_TF32 = 77
_DEFAULT_ALGORITHM = -1


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A block in which a call of a module or class goes to another function.

    That takes the call's own function before the arguments.
    """
    is_own, before = name in vars(owner), getattr(owner, name)

    # Not a partial, which would not become a method.
    def call(*arguments: Any, **options: Any) -> Any:
        return function(before, *arguments, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:  # it is inherited
            delattr(owner, name)


def arrays_of(*operands: Any) -> list[Any]:
    """The operands, with the CuPy array of each that exports one."""
    name = "__cupy_get_ndarray__"
    return [getattr(one, name)() if hasattr(one, name) else one for one in operands]


# CuPy refuses because cuBLAS would allocate its workspace inside the graph. Here it has one, which
# all graphs of a stream share: they run one after the other.
@final
class GraphProducts:
    """Puts matrix products on a stream that captures, by the calls that CuPy makes elsewhere.

    It takes arrays of one or two dimensions, of 16-, 32- or 64-bit floats. Others are left to CuPy.

    Args:
        stream: the `gpu.Stream`, which is current. It does not capture yet.

    Raises:
        OSError: there is no cuBLAS.
        RuntimeError: cuBLAS refuses a call.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._library = ctypes.CDLL(_path(stream.cuda))
        self._handle = ctypes.c_void_p()
        self._workspace: Any = stream.xp.empty(WORKSPACE, np.uint8)
        self._call("cublasCreate_v2", ctypes.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream.raw.ptr))
        # After the stream, because setting the stream resets the workspace.
        place = ctypes.c_void_p(self._workspace.data.ptr)
        self._call("cublasSetWorkspace_v2", self._handle, place, ctypes.c_size_t(WORKSPACE))

    @contextlib.contextmanager
    def replace_cupys(self) -> Iterator[None]:
        """A block in which CuPy's `@`, `matmul` and `dot` come here, on this stream."""
        xp = self._stream.xp
        with contextlib.ExitStack() as stack:
            for owner, name in ((xp, "matmul"), (xp, "dot"), (xp.ndarray, "__matmul__")):
                stack.enter_context(replaced(owner, name, self._multiply))
            yield

    def _multiply(
        self, by_cupy: Callable[..., Any], a: Any, b: Any, out: Any = None, **options: Any
    ) -> Any:
        a, b = arrays_of(a, b)
        if options or not self._takes(a, b, out):
            return by_cupy(a, b, **options, **({} if out is None else {"out": out}))
        dtype = np.promote_types(a.dtype, b.dtype)
        if out is None:
            out = self._stream.xp.empty((*a.shape[:-1], *b.shape[1:]), dtype)
        a, b = [one if one.dtype == dtype else one.astype(dtype) for one in (a, b)]
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)
        (rows, inner), columns = a.shape, b.shape[1]
        # cuBLAS stores columns: to it a C-contiguous array is its transpose; out.T is b.T @ a.T.
        a, transposes_a, lead_a = _as_operand(a.T, False)
        b, transposes_b, lead_b = _as_operand(b, True)
        kind, computed, number = _TYPES[dtype.char]
        if dtype.char == "f" and int(os.environ.get("CUPY_TF32", "0")) > 0:
            computed = _IN_TF32
        self._call(
            "cublasGemmEx",
            self._handle,
            *(int(transposes_b), int(transposes_a), columns, rows, inner),
            ctypes.byref(number(1)),
            *(ctypes.c_void_p(b.data.ptr), kind, lead_b),
            *(ctypes.c_void_p(a.data.ptr), kind, lead_a),
            ctypes.byref(number(0)),
            *(ctypes.c_void_p(out.data.ptr), kind, columns),
            *(computed, _DEFAULT_ALGORITHM),
        )
        return out

    def _takes(self, a: Any, b: Any, out: Any) -> bool:
        stream = self._stream
        if any(type(one) is not stream.xp.ndarray or one.ndim not in (1, 2) for one in (a, b)):
            return False
        dtype, shape = np.promote_types(a.dtype, b.dtype), (*a.shape[:-1], *b.shape[1:])
        return (
            dtype.char in _TYPES
            and a.shape[-1] == b.shape[0]
            and a.size > 0
            and b.size > 0
            and max(shape, default=1) > 1  # else CuPy's is a reduction
            and (
                out is None
                or (out.shape == shape and out.dtype == dtype and out.flags.c_contiguous)
            )
            # Other threads have other streams.
            and stream.cuda.get_current_stream().ptr == stream.raw.ptr
        )

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} of cuBLAS returned {status}")


def _path(cuda: Any) -> str:
    """The library from which CuPy takes its products."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib  # pyright: ignore[reportMissingImports]
    except ImportError:
        return f"libcublas.so.{cuda.runtime.runtimeGetVersion() // 1000}"
    return load_nvidia_dynamic_lib("cublas").abs_path


def _as_operand(matrix: Any, transposes: bool) -> tuple[Any, bool, int]:
    """The matrix as cuBLAS takes it, whether that transposes it, and its leading dimension."""
    itemsize = matrix.dtype.itemsize
    if matrix.flags.f_contiguous:
        return matrix, transposes, max(matrix.strides[1] // itemsize, matrix.shape[0])
    if not matrix.flags.c_contiguous:
        matrix = matrix.copy("C")
    return matrix, not transposes, max(matrix.strides[0] // itemsize, matrix.shape[1])
