"""Every kernel of the package is compiled by CUDA's compiler, as CuPy does, for many GPUs."""

import io

import numpy as np
import pytest
from internals import device_update, packing, rows
from on_host import array, cupy
from package_kernels import DTYPES, optimizers_of, rule_of

compiler = pytest.importorskip("cupy.cuda.compiler")
_kernel = pytest.importorskip("cupy._core._kernel")
nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
core = pytest.importorskip("cupy._core.core")
ARRAY, INDEXER, SCALAR = 1, 2, 3  # the kinds of a kernel's arguments


def text(kernel, name, arguments):
    """CuPy's source of an elementwise kernel for such arguments; the values do not matter."""
    declared = (*kernel.in_params, *kernel.out_params)
    assert len(declared) == len(arguments)
    inputs = len(kernel.in_params)
    dtypes = [one.dtype if isinstance(one, cupy.ndarray) else None for one in arguments]
    ins, _, types = kernel._decide_params_type(tuple(dtypes[:inputs]), tuple(dtypes[inputs:]))
    infos = []
    for i, one in enumerate(arguments):
        if isinstance(one, cupy.ndarray):
            ndim = one.ndim if declared[i].raw else 1
            infos.append(_kernel._ArgInfo(ARRAY, cupy.ndarray, one.dtype, ndim, True, True))
        else:
            scalar = cupy._core._scalar.CScalar, np.dtype(ins[i])
            infos.append(_kernel._ArgInfo(SCALAR, *scalar, 0, True, True))
    infos.append(_kernel._ArgInfo(INDEXER, cupy._core._carray.Indexer, None, 1, True, True))
    return _kernel._get_elementwise_kernel_code(
        tuple(infos), types, kernel.params, kernel.operation, name, kernel.preamble
    )


def kernels_of(rule, dtype):
    """The kernels of an update, each with arguments for it."""
    # Of as many dimensions as the update's: CuPy declares arrays by them.
    number, sums = array((), np.float64), array((2, 128), np.float64)
    given = [array(3, dtype) for _ in range(2 + rule.kernel.slots)]
    kernel, count = device_update.update_kernel(rule.kernel, dtype), rule.kernel.numbers
    yield kernel, [*[number] * count, *given]  # in a graph
    yield kernel, [*[number] * (count - len(rule.numbers)), *rule.numbers, *given]
    if rule.clip is not None:
        elements = array(1, np.int32)
        yield device_update.squares_kernel(dtype), [given[0], elements, 3, 128, sums[0]]
        yield device_update.add_kernel(), [sums, 128, sums]
        yield device_update.scale_kernel(), [sums, 0.5, sums[0]]


def sources():
    """All kernels in one program: compiling them one by one takes a minute."""
    texts = []
    for dtype in DTYPES:
        for make in optimizers_of(dtype).values():
            for kernel, arguments in kernels_of(rule_of(make(), 1), dtype):
                texts.append(text(kernel, f"kernel_{len(texts)}", arguments))
        arrays = [array((3, 2), dtype), array(3, np.int64), array(3, np.int64)]
        for combination in rows.IN_CUDA:
            kernel = rows._kernel(combination, dtype.itemsize == 2)
            given = [*arrays, 1, 2, 3, array((2, 2), dtype)]
            texts.append(text(kernel, f"kernel_{len(texts)}", given))
    numbers = device_update.numbers_kernel(2)
    texts.append(text(numbers, "numbers", [1.0, 2.0, array(3, np.float64)]))
    for word in packing._WORDS:
        code = packing._kernel(word).code
        texts.append(code.replace("copy_arrays(", f"copy_arrays_{word}("))
    spaces = [f"namespace n{i} {{\n{one}\n}}" for i, one in enumerate(texts)]
    lines = [f"#include <{name}>" for name in core._cupy_header_list]
    lines += "\n".join(spaces).splitlines()
    return "\n".join(sorted(lines, key=lambda line: not line.lstrip().startswith("#include")))


@pytest.mark.parametrize("architecture", [70, 80, 90, 100])
def test_every_kernel_compiles(architecture):
    if architecture not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not compile for sm_{architecture} any more")
    options = [*core.assemble_cupy_compiler_options(()), "-ftz=true"]
    options += ["--device-as-default-execution-space", f"-arch=sm_{architecture}"]
    program = compiler._NVRTCProgram(sources(), method="cubin")
    log = io.StringIO()
    cubin, _ = program.compile(tuple(options), log)
    assert len(cubin) > 10_000
    said = log.getvalue().strip("\0\n ").splitlines()
    # No warnings either, except about the age of the GPU.
    assert [line for line in said if "Architectures prior to" not in line] == []
