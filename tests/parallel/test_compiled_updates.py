"""Updates of large variables by a compiled loop: the bits are those of NumPy's operations."""

import functools

import ml_dtypes
import numpy as np
import pytest
from internals import compiled
from mpi4py import MPI

import hpcstrat as hs

RANK, STEPS = MPI.COMM_WORLD.rank, 3

pytestmark = [
    pytest.mark.skipif(compiled.compiler() is None, reason="there is no C compiler"),
    pytest.mark.parametrize("place", ["CPU"], indirect=True),  # a GPU has kernels
]

SHAPES = [(7,), (300, 401), (), (40_000,), (5, 9)]


def make():
    """One for all tests: a compiler takes half a second for each dtype."""
    return hs.optimizers.Adam(0.5, global_clipnorm=1.0)


@pytest.fixture
def loops(monkeypatch):
    """The dtypes of the loops that were run, and a switch."""
    run, real = [], compiled.loops

    def noted(kernel, dtype):
        def bound(bind, memory):
            call = bind(memory)
            return lambda *table: (run.append(dtype.name), call(*table))

        made = real(kernel, dtype)
        return made and type(made)(*[functools.partial(bound, bind) for bind in made])

    def switch(is_on):
        run.clear()
        monkeypatch.setattr(compiled, "loops", noted if is_on else lambda kernel, dtype: None)
        return run

    return switch


def numbers(step, shape, dtype):
    return np.random.default_rng([RANK, step]).standard_normal(shape).astype(dtype)


def trained(strategy, dtypes, gradients, shapes=SHAPES):
    with strategy.scope():
        variables = [hs.Variable(np.full(s, 0.5, d)) for s, d in zip(shapes, dtypes, strict=True)]
        optimizer = make()
    for step in range(STEPS):
        given = [numbers(step, v.shape, v.dtype) for v in variables]
        strategy.run(lambda given=given: gradients(optimizer, given, variables))
    slots = [strategy.extended.read_var(v).copy() for v in variables]
    return [array.tobytes() for array in slots]


def plain(optimizer, given, variables):
    optimizer.apply_gradients(zip(given, variables, strict=True))


def in_columns(optimizer, given, variables):
    plain(optimizer, [array.T.copy().T for array in given], variables)


def in_another_order(optimizer, given, variables):
    plain(optimizer, given[::-1], variables[::-1])


def from_buffers(optimizer, given, variables):
    buffers = optimizer.gradient_buffers(variables)
    for buffer, array in zip(buffers, given, strict=True):
        buffer[...] = array
    plain(optimizer, buffers, variables)


GRADIENTS = [plain, in_columns, in_another_order, from_buffers]
FLOATS = ["float32"] * 5


def check(strategy, loops, dtypes, gradients):
    run = loops(True)
    found = trained(strategy, dtypes, gradients)
    # A rank without elements of a dtype has nothing to do for it.
    assert set(run) <= {np.dtype(dtype).name for dtype in dtypes} - {"complex64"}
    assert MPI.COMM_WORLD.allreduce(len(run)) >= STEPS
    loops(False)
    assert found == trained(strategy, dtypes, gradients)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_any_gradients(strategy, loops, gradients):
    check(strategy, loops, FLOATS, gradients)


def test_any_dtypes(strategy, loops):
    """Complex numbers have no loop: NumPy updates them, and loops the others."""
    dtypes = ["complex64", "float32", "float16", "float64", ml_dtypes.bfloat16]
    check(strategy, loops, dtypes, plain)


def test_small_updates_are_compiled_after_some_steps(strategy, loops, monkeypatch):
    """Their calls are bound: in each step the same addresses, with that step's numbers."""
    shapes = [(7,), (), (31, 3), (5, 9), (40,)]
    run = loops(True)
    trained(strategy, FLOATS, plain, shapes)
    assert run == []
    monkeypatch.setattr(compiled, "FEWEST_UPDATES", 1)
    found = trained(strategy, FLOATS, plain, shapes)
    assert len(run) in (0, 2 * (STEPS - 1))  # for the norm, and for the update
    assert MPI.COMM_WORLD.allreduce(len(run)) >= STEPS - 1
    loops(False)
    assert found == trained(strategy, FLOATS, plain, shapes)
