"""Copies to a GPU and between two, and streams with two GPUs: what CuPy does, on simulated GPUs."""

import fnmatch

import pytest

PINNED = """
import cupy
import numpy as np

stream = cupy.cuda.Stream(non_blocking=True)


def pinned():
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(4096), np.float64).reshape(16, 32)


def copied(array, **options):
    array[...] = 1
    with stream:
        made = cupy.asarray(array, **options)
    array[...] = 2
    stream.synchronize()
    assert made.get().tolist() == np.ones_like(array).tolist()


copied(np.empty((16, 32)))
copied(pinned(), blocking=True)
# By way of pinned memory of CuPy's own:
copied(pinned()[:, ::2])
copied(pinned(), order="F")
copied(pinned(), dtype=np.float32)
copied(pinned()[0, 0, ...])
with stream:
    kept = cupy.asarray(pinned())  # CuPy keeps the memory
    stream.synchronize()
for array in pinned(), pinned().T, pinned()[3:5]:
    try:
        copied(array)
        raise SystemExit("it is not found")
    except AssertionError as error:
        print(error)
    stream.synchronize()
    array[...] = 2
"""


@pytest.mark.gpu
def test_pinned_memory_is_read_while_the_host_goes_on(simulated):
    result = simulated(PINNED, None)
    assert (result.status, result.leftovers) == (0, []), result.stderr
    found = result.stdout.splitlines()
    assert len(found) == 3
    for line in found:
        assert fnmatch.fnmatchcase(
            line, "the simulated GPU: at *, the host writes to pinned memory, *"
        )


BETWEEN = """
import cupy

here, there = cupy.cuda.Device(0), cupy.cuda.Device(1)
with there:
    grid = cupy.arange(12.0).reshape(3, 4)
    there.synchronize()
copies = [cupy.asarray(grid), cupy.asarray(grid.T), cupy.array(grid[:2]), grid.copy()]
assert [one.device for one in copies] == [here] * 4
assert [float(one.sum()) for one in copies] == [66, 66, 28, 66]
for copied in (lambda: cupy.asarray(grid[:, ::2]), lambda: cupy.asarray(grid[:, ::2], order="C"), lambda: grid + 1):
    try:
        copied()
    except (AssertionError, NotImplementedError) as error:
        print(error)
"""


@pytest.mark.gpu
def test_strided_arrays_between_gpus(simulated):
    """CuPy refuses them, or runs them in order on their own GPU and copies too early."""
    result = simulated(BETWEEN, None)
    assert (result.status, result.leftovers) == (0, []), result.stderr
    expected = [
        "CuPy cannot copy non-contiguous array between devices.",
        "the simulated GPU: a read at * on the null stream of GPU 0 is not ordered with the write "
        "at * of GPU 1, *",
        "the simulated GPU: an array on GPU 1 is used at *",
    ]
    found = result.stdout.splitlines()
    assert [fnmatch.fnmatchcase(*pair) for pair in zip(found, expected, strict=True)] == [
        True
    ] * 3, found


STREAMS = """
import cupy

null, current = cupy.cuda.Stream.null, cupy.cuda.get_current_stream
inner, outer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with cupy.cuda.Device(1):
    other = cupy.cuda.Stream(non_blocking=True).use()
for below in (null, outer):
    with below:
        with inner:
            cupy.cuda.Device(1).use()
        print(current(0) == inner, current(0) == outer, current(1) == other, current(1) == null)
        cupy.cuda.Device(0).use()
        with cupy.cuda.Device(1):
            other.use()
"""


@pytest.mark.gpu
def test_a_stream_is_left_while_another_gpu_is_current(simulated):
    """The stream below becomes its own GPU's; the null stream, without one, the current GPU's."""
    result = simulated(STREAMS, None)
    assert (result.status, result.leftovers) == (0, []), result.stderr
    assert result.stdout.splitlines() == ["True False False True", "False True True False"]
