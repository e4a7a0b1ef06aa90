"""Runs the source of CUDA kernels on the host, one thread after another, on NumPy arrays.

It is the source that a GPU gets. Raw kernels, and elementwise kernels with raw parameters, are
checked as they run: a `Fault` names two threads that access the same word if at least one writes it
and not both use atomic operations; a misaligned address; and an address outside the arguments'
memory. Other kernels can only reach their own elements.

Not shown: how threads cooperate (`__syncthreads` and `__shared__` do not compile), limits of a GPU,
and that a GPU fuses multiplications with additions and treats subnormal float32 numbers as 0.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import numpy as np

_array_utils: Any = getattr(np.lib, "array_utils", np)  # NumPy 1.26 has its functions elsewhere
_FOLDER = pathlib.Path(__file__).parent
# No contraction: the code computes what it says. No errno: loops are vectorized.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno")
# The compiler inserts a call before each memory access: see checked_memory.hpp, which is called.
_CHECKED = ("-DCHECKED", "-fsanitize=thread", "-nodefaultlibs")
# Without the sanitizer's, which `-nodefaultlibs` leaves out.
_LIBRARIES = ("-lstdc++", "-lm", "-lc", "-lgcc")
_TYPES = {"bool": "bool", "float16": "float16", "bfloat16": "bfloat16"}
_TYPES |= {f"{kind}{8 << i}": f"{kind}{8 << i}_t" for kind in ("int", "uint") for i in range(4)}
_TYPES |= {"float32": "float", "complex64": "complex<float>"}
_TYPES |= {"float64": "double", "complex128": "complex<double>"}


class CompilationError(Exception):
    """The compiler rejects a kernel; its output."""


class Fault(Exception):
    """A kernel did something that it must not do on a GPU."""


class RawKernel:
    """A `__global__` function, like `cupy.RawKernel`, called with NumPy arrays.

    An array is passed as its address, one without dimensions and bytes by value, a Python number
    as 64 bits. In a structure with arrays `source`, `target` and `length`, `source[i]` is the
    address of `length[i]` elements that the kernel reads, `target[i]` of as many that it writes.
    """

    def __init__(self, code, name):
        self.name = name
        self._library = compiled(
            f"{code}\n"
            f'extern "C" const char* on_host_launch({_LAUNCH}) {{\n'
            f"return on_host::checked_launch<{name}>({name}, {_PASSED}); }}\n"
            'extern "C" long on_host_ranges(void** arguments, on_host::Range* found)\n'
            f"{{ return on_host::ranges_in({name}, arguments, found); }}\n"
            'extern "C" long on_host_parameters(on_host::Parameter* found)\n'
            f"{{ return on_host::parameters({name}, found); }}\n",
            is_checked=True,
        )
        self._library.on_host_launch.restype = ctypes.c_char_p
        found = (_Parameter * 64)()
        self.parameters = found[: self._library.on_host_parameters(found)]
        """Its parameters, each with `size` and `is_written`."""

    def __call__(self, grid, block, arguments):
        passed = self._passed(arguments)
        ranges = [
            _Range.of(argument, parameter.word, parameter.is_written, f"argument {i}")
            for i, (parameter, argument) in enumerate(zip(self.parameters, arguments, strict=True))
            if parameter.word and isinstance(argument, np.ndarray) and argument.size
        ]
        ranges += self._ranges(passed)
        counts = [(ctypes.c_uint * 3)(*each, *(1,) * (3 - len(each))) for each in (grid, block)]
        fault = self._library.on_host_launch(*counts, passed, *_sorted(ranges))
        if fault is not None:
            raise Fault(f"{self.name}: {fault.decode()}")

    def pointed_to(self, arguments):
        """(address, bytes, is written) of memory that structures among the arguments point to."""
        return [
            (one.first, one.size, bool(one.is_written))
            for one in self._ranges(self._passed(arguments))
        ]

    def _passed(self, arguments):
        """The address of each argument's bytes."""
        passed = [_by_value(argument) for argument in arguments]
        expected = tuple(one.size for one in self.parameters)
        if (sizes := tuple(map(len, passed))) != expected:
            raise TypeError(
                f"{self.name}: its arguments have {expected} bytes, and it is called with {sizes}"
            )
        return (ctypes.c_char_p * len(passed))(*passed)

    def _ranges(self, passed):
        # No structure has more pointers.
        found = (_Range * (sum(one.size for one in self.parameters) // 8))()
        return found[: self._library.on_host_ranges(passed, found)]


class ElementwiseKernel:
    """Statements for each element, like `cupy.ElementwiseKernel`, for NumPy arrays and numbers.

    Inputs are broadcast; outputs must be given and have the broadcast shape. The statements index
    a parameter `raw T x` themselves; `i` is the index of the element.
    """

    def __init__(self, in_params, out_params, operation, name="kernel", preamble=""):
        self.name = name
        self.inputs, self.outputs = parsed(in_params), parsed(out_params)
        self._all = [*self.inputs, *self.outputs]
        self._operation = operation
        self._preamble = preamble
        self._compiled = {}
        self.is_checked = any(raw for raw, _, _ in self._all)
        """Whether a thread can reach the elements of other threads."""

    def __call__(self, *arguments, size=None):
        dtypes = self.dtypes([getattr(argument, "dtype", None) for argument in arguments])
        arrays = [
            argument if isinstance(argument, np.ndarray) else np.asarray(argument, dtype)
            for argument, dtype in zip(arguments, dtypes, strict=True)
        ]
        given = [*zip(self._all, arrays, dtypes, strict=True)]
        for (_, kind, name), array, dtype in given:
            if array.dtype != dtype:
                raise TypeError(f"{self.name}: {kind} {name} is {dtype}, and not {array.dtype}")
        shape = np.broadcast_shapes(*[array.shape for (raw, _, _), array, _ in given if not raw])
        shape = shape if size is None else (size,)
        for (raw, _, name), array, _ in given[len(self.inputs) :]:
            if not raw and array.shape != shape:
                raise ValueError(
                    f"{self.name}: the output {name} has shape {array.shape} and the call {shape}"
                )
        if int(np.prod(shape)) == 0:
            return
        views = [one if raw else np.broadcast_to(one, shape) for (raw, _, _), one, _ in given]
        ranges = [
            _Range.of(view, view.itemsize, i >= len(self.inputs), self._all[i][2])
            for i, view in enumerate(views)
            if self.is_checked and view.size
        ]
        fault = self.compile(dtypes)(
            (_View * len(views))(*map(_View.of, views)),
            (ctypes.c_ssize_t * len(shape))(*shape),
            ctypes.c_ssize_t(len(shape)),
            *_sorted(ranges),
        )
        if fault is not None:
            raise Fault(f"{self.name}: {fault.decode()}")

    def dtypes(self, given):
        """The dtype of each parameter for arguments of these dtypes; `None` for a Python number."""
        meant = {}
        for (_, kind, name), dtype in zip(self._all, given, strict=True):
            if len(kind) == 1 and dtype is not None and meant.setdefault(kind, dtype) != dtype:
                raise TypeError(f"{self.name}: {kind} is {meant[kind]}, and {name} is {dtype}")
        return tuple(meant.get(kind) or np.dtype(kind) for _, kind, _ in self._all)

    def compile(self, dtypes):
        """The loop over elements, for parameters of these dtypes."""
        if dtypes not in self._compiled:
            compile_together([(self, dtypes)])
        return self._compiled[dtypes]

    def source(self, dtypes, function):
        """The source of a function of this name: the kernel, applied to arrays of these dtypes."""
        declared, kinds = [], {}
        for i, ((raw, kind, name), dtype) in enumerate(zip(self._all, dtypes, strict=True)):
            kinds |= {kind: _TYPES[dtype.name]} if len(kind) == 1 else {}
            element = f"{'const ' * (i < len(self.inputs))}{_TYPES[dtype.name]}"
            if raw:
                declared.append(f"const auto {name} = on_host::raw<{element}>(views[{i}]);")
            else:
                place = f"views[{i}].first + offsets[{i}]"
                declared.append(f"{element}& {name} = *({element}*)({place});")
        flags = ", ".join(str(int(raw)) for raw, _, _ in self._all)
        lines = [
            *[f"typedef {meaning} {kind};" for kind, meaning in kinds.items()],
            self._preamble,
            "static inline void operation(const on_host::View* views, const ptrdiff_t* offsets, "
            "const ptrdiff_t i) {",
            *declared,
            f"{self._operation};",
            "}",
            f"static const bool is_raw[] = {{{flags}}};",
            f'extern "C" const char* {function}({_LOOP}) {{',
            f"return on_host::checked_loop<{len(dtypes)}>(operation, is_raw, {_LOOPED});",
            "}",
        ]
        return "\n".join(lines)


def compile_together(wanted):
    """Compiles elementwise kernels, each for given dtypes, in one or two runs of the compiler."""
    for is_checked in (False, True):
        some = [(kernel, dtypes) for kernel, dtypes in wanted if kernel.is_checked == is_checked]
        texts = [
            f"namespace kernel_{i} {{\n{kernel.source(dtypes, f'on_host_loop_{i}')}\n}}"
            for i, (kernel, dtypes) in enumerate(some)
        ]
        library = compiled("\n".join(texts), is_checked) if some else None
        for i, (kernel, dtypes) in enumerate(some):
            kernel._compiled[dtypes] = loop = getattr(library, f"on_host_loop_{i}")
            loop.restype = ctypes.c_char_p


_RANGES = "const on_host::Range* ranges, long count"
_LAUNCH = f"const unsigned* grid, const unsigned* block, void** arguments, {_RANGES}"
_PASSED = "grid, block, arguments, ranges, count"
_LOOP = f"const on_host::View* views, const ptrdiff_t* shape, ptrdiff_t ndim, {_RANGES}"
_LOOPED = "views, shape, ndim, ranges, count"


class _Parameter(ctypes.Structure):
    """Mirrors `on_host::Parameter`."""

    _fields_ = (("size", ctypes.c_long), ("word", ctypes.c_long), ("is_written", ctypes.c_long))


class _Range(ctypes.Structure):
    """Mirrors `on_host::Range`."""

    _fields_ = (("first", ctypes.c_void_p), ("size", ctypes.c_size_t), ("word", ctypes.c_size_t))
    _fields_ += (("is_written", ctypes.c_long), ("name", ctypes.c_char_p))

    @classmethod
    def of(cls, array, word, is_written, name):
        low, high = _array_utils.byte_bounds(array)
        return cls(low, high - low, word, is_written, name.encode())


def _sorted(ranges):
    """Ranges as functions take them: written ones first, because lookups start there."""
    ranges = sorted(ranges, key=lambda one: -one.is_written)
    return (_Range * len(ranges))(*ranges), ctypes.c_long(len(ranges))


class _View(ctypes.Structure):
    """Mirrors `on_host::View`."""

    _counts = ctypes.c_ssize_t * 16
    _fields_ = (("first", ctypes.c_void_p), ("shape", _counts), ("strides", _counts))
    _fields_ += (("ndim", ctypes.c_ssize_t),)

    @classmethod
    def of(cls, array):
        counts = cls._counts(*array.shape), cls._counts(*array.strides)
        return cls(array.ctypes.data, *counts, array.ndim)


def parsed(parameters):
    """(is raw, type or its letter, name) of each of CuPy's parameters, `"T x, raw T y"`."""
    found = []
    for text in filter(None, map(str.strip, parameters.split(","))):
        *raw, kind, name = text.split()
        found.append((bool(raw), kind, name))
    return found


def is_available():
    """Whether there is a C++ compiler."""
    return shutil.which(_compiler()) is not None


@functools.cache
def compiled(source, is_checked=False):
    """The library of a text after the header, in which memory accesses may be checked."""
    flags = (*FLAGS, *_CHECKED * is_checked)
    libraries = _LIBRARIES * is_checked
    key = repr((source, flags, libraries, _version())).encode()
    path = cache() / f"{hashlib.sha256(key).hexdigest()[:32]}.so"
    if not path.exists():
        build(f'#include "cuda_on_host.hpp"\n{source}', path, (*flags, f"-I{_FOLDER}"), libraries)
    return ctypes.CDLL(os.fspath(path))


def build(source, path, flags, libraries=()):
    """Compiles a source text to a library; several processes may do it at once."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = pathlib.Path(folder) / path.name
        command = [_compiler(), *flags, "-x", "c++", "-", "-o", os.fspath(made), *libraries]
        result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompilationError(result.stderr)
        made.replace(path)


def cache():
    """The folder of compiled libraries."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "hpcstrat-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compiler():
    return os.environ.get("CXX", "c++")


@functools.cache
def _version():
    """That of the compiler and of the headers."""
    headers = [path.read_text() for path in sorted(_FOLDER.glob("*.hpp"))]
    return headers, subprocess.check_output([_compiler(), "--version"], text=True)


def _by_value(argument):
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, np.ndarray) and argument.ndim:
        return np.uint64(argument.ctypes.data).tobytes()
    return np.asarray(argument).tobytes()
