"""Updates of large variables by a compiled loop: the bits are those of NumPy's operations."""

import functools

import ml_dtypes
import numpy as np
import pytest
from internals import compiled
from mpi4py import MPI
from slow import slow_but

import hpcstrat as hs

RANK = MPI.COMM_WORLD.rank
STEPS = 3

pytestmark = [
    pytest.mark.skipif(compiled.compiler() is None, reason="there is no C compiler"),
    pytest.mark.parametrize("place", ["CPU"], indirect=True),  # a GPU has kernels
]

SHAPES = [(7,), (300, 401), (), (40_000,), (5, 9)]
OPTIMIZERS = {
    "SGD": lambda: hs.optimizers.SGD(0.5),
    "Adam": lambda: hs.optimizers.Adam(0.5),
    "global_clipnorm": lambda: hs.optimizers.Adam(0.5, global_clipnorm=1.0),
    "clipnorm": lambda: hs.optimizers.SGD(0.5, clipnorm=1.0),
    "RMSprop": lambda: hs.optimizers.RMSprop(0.5, momentum=0.5, centered=True),
}


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


def trained(strategy, make, dtypes, gradients, shapes=SHAPES):
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


def read_only(optimizer, given, variables):
    for array in given:
        array.flags.writeable = False
    plain(optimizer, given, variables)


def in_columns(optimizer, given, variables):
    plain(optimizer, [array.T.copy().T for array in given], variables)


def in_another_order(optimizer, given, variables):
    plain(optimizer, given[::-1], variables[::-1])


def from_buffers(optimizer, given, variables):
    buffers = optimizer.gradient_buffers(variables)
    for buffer, array in zip(buffers, given, strict=True):
        buffer[...] = array
    plain(optimizer, buffers, variables)


GRADIENTS = [plain, read_only, in_columns, in_another_order, from_buffers]
FLOATS = ["float32"] * 5


def check(strategy, loops, make, dtypes, gradients):
    run = loops(True)
    found = trained(strategy, make, dtypes, gradients)
    # A rank without elements of a dtype has nothing to do for it.
    assert set(run) <= {np.dtype(dtype).name for dtype in dtypes} - {"complex64"}
    assert MPI.COMM_WORLD.allreduce(len(run)) >= STEPS
    loops(False)
    assert found == trained(strategy, make, dtypes, gradients)


@pytest.mark.parametrize("gradients", GRADIENTS)
def test_any_gradients(strategy, loops, gradients):
    check(strategy, loops, OPTIMIZERS["Adam"], FLOATS, gradients)


@pytest.mark.parametrize("name", slow_but(["Adam", "global_clipnorm"], OPTIMIZERS))
def test_any_dtypes(strategy, loops, name):
    check(
        strategy,
        loops,
        OPTIMIZERS[name],
        ["float64", "float32", "float16", "float64", ml_dtypes.bfloat16],
        plain,
    )


def test_a_complex_variable_among_them(strategy, loops):
    """Complex numbers have no loop: NumPy updates them, and loops the others."""
    check(strategy, loops, OPTIMIZERS["SGD"], ["complex64", *FLOATS[1:]], plain)


def test_small_updates_are_compiled_after_some_steps(strategy, loops, monkeypatch):
    """Their calls are bound: in each step the same addresses, with that step's numbers."""
    shapes, make = [(7,), (), (31, 3), (5, 9), (40,)], OPTIMIZERS["Adam"]
    run = loops(True)
    trained(strategy, make, FLOATS, plain, shapes)
    assert run == []
    monkeypatch.setattr(compiled, "FEWEST_UPDATES", 1)
    found = trained(strategy, make, FLOATS, plain, shapes)
    assert len(run) in (0, STEPS - 1)
    assert MPI.COMM_WORLD.allreduce(len(run)) >= STEPS - 1
    loops(False)
    assert found == trained(strategy, make, FLOATS, plain, shapes)
