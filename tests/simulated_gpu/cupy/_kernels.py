"""CuPy's kernels of the user's own: their very text runs, compiled for the host."""

import functools
import re

import kernels_on_host
import numpy as np

from . import _checker, _faults, _memory, _streams
from ._arrays import ndarray
from ._launch import launch, operand


class CompileException(Exception):
    """CuPy's."""


def _compiled(make, *args):
    _faults.counted["kernels"] += 1
    if _faults.value("compile", "kernels") is not None:
        raise CompileException("the simulated GPU: this kernel is not to compile")
    try:
        return make(*args)
    except kernels_on_host.CompilationError as error:
        raise CompileException(str(error)) from error


class RawKernel:
    """CuPy's."""

    def __init__(self, code, name, options=(), backend="nvrtc", **refused):
        if refused:
            raise TypeError(f"the simulated GPU: RawKernel does not take {sorted(refused)}")
        self.code, self.name, self.options, self.backend = code, name, options, backend
        self._kernel = None
        parameters = re.search(rf"\b{name}\s*\(([^)]*)\)", code)
        assert parameters is not None, f"there is no function {name}"
        self._writes = ["*" in one and not one.strip().startswith("const ") for one in parameters[1].split(",")]

    def __call__(self, grid, block, args, *, shared_mem=0):
        if shared_mem:
            raise TypeError("the simulated GPU: RawKernel does not take shared_mem")
        if self._kernel is None:
            self._kernel = _compiled(kernels_on_host.RawKernel, self.code, self.name)
        kernel, queue = self._kernel, _streams.current_queue()
        queue.begin()
        passed, kept = [], []
        for argument, writes in zip(args, self._writes, strict=True):
            if isinstance(argument, ndarray):
                argument.touch(queue, writes=False)
                if writes:
                    argument.touch(queue, writes=True)
                passed.append(np.uint64(argument.data.ptr))
                kept.append(argument.host)
            else:
                passed.append(argument.copy() if isinstance(argument, np.ndarray) else argument)
                if isinstance(argument, (np.ndarray, np.generic)) and argument.nbytes >= 8:
                    kept += _touch_addresses(argument, queue)
        queue.put(functools.partial(_run, kernel, grid, block, passed, kept))


def _run(kernel, grid, block, passed, kept):
    """Runs a kernel. `kept`: its memory, until then."""
    kernel(grid, block, passed)


def _touch_addresses(value, queue):
    """Counts words of a value that are addresses on a GPU as reads of what is there, which it returns."""
    found = []
    words = np.frombuffer(value.tobytes()[: value.nbytes // 8 * 8], np.uint64)
    first, last = _memory.span()
    for address in words[(first <= words) & (words < last)].tolist():
        block = _memory.block_at(address)
        if block is not None:
            if block.is_free:
                raise _checker.report(
                    f"the simulated GPU: a kernel at {_checker.shown(_checker.place())} gets the address of memory "
                    "that was given back; keep the array until it is launched"
                )
            if block.device != queue.device:
                raise _checker.report(
                    f"the simulated GPU: a kernel at {_checker.shown(_checker.place())} on {queue.name} gets the "
                    f"address of memory on GPU {block.device}; copy the array first"
                )
            block.history.access(queue, address - block.ptr, address - block.ptr + 1, writes=False)
            found.append(block.buffer)
    return found


class ElementwiseKernel:
    """CuPy's."""

    def __init__(self, in_params, out_params, operation, name="kernel", reduce_dims=True, preamble="", **options):
        if unknown := options.keys() - {"no_return", "return_tuple", "options"}:
            raise TypeError(f"the simulated GPU: ElementwiseKernel does not take {sorted(unknown)}")
        self.name, self.operation = name, operation
        self._returns = not options.get("no_return", False)
        self._kernel = kernels_on_host.ElementwiseKernel(in_params, out_params, operation, name, preamble)
        self._seen = set()

    def __call__(self, *args, size=None):
        kernel = self._kernel
        nin, nout = len(kernel.inputs), len(kernel.outputs)
        if len(args) not in (nin, nin + nout):
            raise TypeError(f"Wrong number of arguments for {self.name}. It must be {nin} or {nin + nout}")
        args = [operand(one) for one in args]
        if any(not isinstance(one, ndarray) for one in args[nin:]):
            raise TypeError(f"{self.name}: output arguments must be cupy.ndarray")
        given = [one.dtype if isinstance(one, ndarray) else None for one in args] + [None] * nout
        dtypes = kernel.dtypes(given[: nin + nout])
        if dtypes not in self._seen:
            _compiled(kernel.compile, dtypes)
            self._seen.add(dtypes)
        if len(args) == nin:
            pairs = zip(kernel.inputs, args, strict=True)
            shapes = [one.shape for (raw, _, _), one in pairs if isinstance(one, ndarray) and not raw]
            shape = np.broadcast_shapes(*shapes) if size is None else (size,)
            args += [ndarray(shape, dtype) for dtype in dtypes[nin:]]
        numbers = [None if isinstance(one, ndarray) else one for one in args]
        outs = args[nin:]

        def compute(*hosts, out):
            each = iter((*hosts, out))
            values = [next(each) if one is None else one for one in numbers]
            kernel(*values, size=size)

        arrays = [one for one in args if isinstance(one, ndarray)]
        launch(compute, *arrays[:-1], out=arrays[-1], also_writes=outs[:-1], reads_out=True)
        return (outs[0] if nout == 1 else tuple(outs)) if self._returns else None
