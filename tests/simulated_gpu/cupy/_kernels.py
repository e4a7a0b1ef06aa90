"""CuPy's user-defined kernels: their actual source runs, compiled for the host."""

import contextlib
import functools

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
    def __init__(self, code, name, options=(), backend="nvrtc", **refused):
        if refused:
            raise TypeError(f"the simulated GPU: RawKernel does not take {sorted(refused)}")
        self.code, self.name, self.options, self.backend = code, name, options, backend
        self._kernel = None

    def __call__(self, grid, block, args, *, shared_mem=0):
        if shared_mem:
            raise TypeError("the simulated GPU: RawKernel does not take shared_mem")
        if self._kernel is None:
            self._kernel = _compiled(kernels_on_host.RawKernel, self.code, self.name)
        kernel, queue, where = self._kernel, _streams.current_queue(), _checker.place()
        queue.start()
        passed = []
        for argument, parameter in zip(args, kernel.parameters, strict=True):
            if isinstance(argument, ndarray):
                argument.touch(queue, writes=False)
                if parameter.is_written:
                    argument.touch(queue, writes=True)
                # An array without dimensions would be passed by value.
                passed.append(np.atleast_1d(argument.host))
            else:
                passed.append(argument.copy() if isinstance(argument, np.ndarray) else argument)
        kept = [_touch_address(queue, where, *one) for one in kernel.pointed_to(passed)]
        queue.put(functools.partial(_run, kernel, where, grid, block, passed, kept))
        _checker.raise_overdue()


def _run(kernel, where, grid, block, passed, kept):
    """Runs a kernel. `kept` keeps its memory alive until then."""
    with _faults_of(where):
        kernel(grid, block, passed)


@contextlib.contextmanager
def _faults_of(where):
    """A block that runs a kernel, at once or after earlier work on the stream."""
    try:
        yield
    except kernels_on_host.Fault as fault:
        _checker.report_later(
            f"the simulated GPU: the kernel that is launched at {_checker.shown(where)}, {fault}"
        )


def _touch_address(queue, where, address, nbytes, writes):
    """Records that memory a structure points to is used. Returns what keeps it alive."""
    block = _memory.block_at(address)
    if block is None or block.is_free or address + nbytes > block.ptr + block.size:
        raise _checker.report(
            f"the simulated GPU: a kernel at {_checker.shown(where)} gets the address of "
            f"{nbytes:,} bytes that are not on a GPU, or of memory that was given back; keep the "
            "array until it is launched"
        )
    if block.device != queue.device:
        raise _checker.report(
            f"the simulated GPU: a kernel at {_checker.shown(where)} on {queue.name} gets the "
            f"address of memory on GPU {block.device}; copy the array first"
        )
    block.history.access(queue, address - block.ptr, address - block.ptr + nbytes, writes)
    return block.buffer


class ElementwiseKernel:
    def __init__(
        self,
        in_params,
        out_params,
        operation,
        name="kernel",
        reduce_dims=True,
        preamble="",
        **options,
    ):
        if unknown := options.keys() - {"no_return", "return_tuple", "options"}:
            raise TypeError(f"the simulated GPU: ElementwiseKernel does not take {sorted(unknown)}")
        self.name, self.operation = name, operation
        self._returns = not options.get("no_return", False)
        self._kernel = kernels_on_host.ElementwiseKernel(
            in_params, out_params, operation, name, preamble
        )
        self._seen = set()

    def __call__(self, *args, size=None):
        kernel = self._kernel
        nin, nout = len(kernel.inputs), len(kernel.outputs)
        if len(args) not in (nin, nin + nout):
            raise TypeError(
                f"Wrong number of arguments for {self.name}. It must be {nin} or {nin + nout}"
            )
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
            shapes = [
                one.shape for (raw, _, _), one in pairs if isinstance(one, ndarray) and not raw
            ]
            shape = np.broadcast_shapes(*shapes) if size is None else (size,)
            args += [ndarray(shape, dtype) for dtype in dtypes[nin:]]
        numbers = [None if isinstance(one, ndarray) else one for one in args]
        outs, where = args[nin:], _checker.place()
        for one, (_, _, name) in zip(args, [*kernel.inputs, *kernel.outputs], strict=True):
            if isinstance(one, ndarray) and one.size and one.data.ptr % one.itemsize:
                raise _checker.report(
                    f"the simulated GPU: the kernel that is launched at {_checker.shown(where)}, "
                    f"{self.name}, gets {name} of {one.dtype} at an address that is not a multiple "
                    f"of {one.itemsize}"
                )

        def compute(*hosts, out):
            each = iter((*hosts, out))
            values = [next(each) if one is None else one for one in numbers]
            with _faults_of(where):
                kernel(*values, size=size)

        arrays = [one for one in args if isinstance(one, ndarray)]
        launch(compute, *arrays[:-1], out=arrays[-1], also_writes=outs[:-1], reads_out=True)
        _checker.raise_overdue()
        return (outs[0] if nout == 1 else tuple(outs)) if self._returns else None
