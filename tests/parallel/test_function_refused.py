"""hs.function on GPUs: what a graph cannot have raises, on all ranks, and leaves all as it was."""

import contextlib
import types
from typing import Any

import numpy as np
import pytest
from graphs import CALLS, MARKS, OPTIMIZERS, RANK, Model, N, batches, captured, check_equal, own
from internals import function, gpu

import hpcstrat as hs

pytestmark = MARKS
RANKS = pytest.mark.parametrize("ranks", [range(N), [N - 1]], ids=["all", "last"])


def check_refused(mirrored, step, args, state, said, calls=3):
    """The third call raises, or an earlier one; then the state is as before, and so on."""
    for _ in range(calls - 1):
        mirrored.run(step, args=args)
    before = state()
    for _ in range(2):
        with pytest.raises((RuntimeError, TypeError, MemoryError, OSError)) as caught:
            mirrored.run(step, args=args)
        text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "hs.function" in text and said in text, text
        check_equal(state(), before)
    assert captured(step) == 0


def check_others(mirrored, model, batch):
    """The program goes on: the same model's step is captured by another function."""
    other = Model(mirrored, OPTIMIZERS["SGD"])
    for v, w in zip(other.weights, model.weights, strict=True):
        v.assign(w.numpy())
    step = hs.function(model.step)
    for _ in range(5):
        check_equal(
            [own(mirrored.run(step, args=(batch,)))], [own(mirrored.run(other.step, args=(batch,)))]
        )
    assert captured(step) == 1


LAST: Any = None


def keep_in_a_global(_, loss):
    global LAST
    LAST = loss


def apply(model, gradients):
    model.optimizer.apply_gradients(zip(gradients, model.weights, strict=False))


def elsewhere(model, work):
    with model.other:
        work()
    model.other.synchronize()


def waits(model, loss):
    """CUDA's refusal ends the capture."""
    with contextlib.suppress(RuntimeError):
        model.xp.cuda.get_current_stream().synchronize()
    return loss


def across(call):
    return hs.get_replica_context().merge_call(lambda _: call())


def first_step_of_another(model):
    variables = model.kept[: len(model.calls)]
    model.optimizer.apply_gradients([(v + 1, v) for v in variables])


ON_HOST, FROM_HOST = "D2H", "H2D"
CANNOT: Any = {  # what is done after the step, with the model, the batch and the loss
    "float": (lambda m, b, loss: float(loss), ON_HOST),
    "a mask": (lambda m, b, loss: b[0][b[0] > 0.5].sum(), ON_HOST),
    "a NumPy array": (lambda m, b, loss: m.xp.asarray(np.ones(3)), FROM_HOST),
    "a list": (lambda m, b, loss: b[0][[0, 1]], FROM_HOST),
    "a wait": (lambda m, b, loss: m.xp.cuda.get_current_stream().synchronize(), "capturing"),
    "a wait whose refusal is caught": (lambda m, b, loss: waits(m, loss), "capture"),
    "another stream": (
        lambda m, b, loss: elsewhere(m, lambda: m.xp.add(m.ones, 1, out=m.ones)),
        "another stream",
    ),
    "iterations": (lambda m, b, loss: m.optimizer.iterations, "SGD.iterations"),
    "a rate": (lambda m, b, loss: setattr(m.optimizer, "learning_rate", 0.5), "SGD.learning_rate"),
    "any_rank": (lambda m, b, loss: hs.any_rank(True), "any_rank"),
    "any_rank across replicas": (lambda m, b, loss: across(lambda: hs.any_rank(True)), "any_rank"),
    "broadcast_object": (lambda m, b, loss: hs.broadcast_object(1), "broadcast_object"),
    "on_lead": (lambda m, b, loss: hs.on_lead(lambda: 1), "on_lead"),
    "a variable": (
        lambda m, b, loss: m.kept.append(hs.Variable(np.zeros(3, np.float32))),
        "a new variable",
    ),
    "a first step": (lambda m, b, loss: first_step_of_another(m), "this step of SGD"),
    "float64 gradients": (
        lambda m, b, loss: apply(m, [m.weights[0].value().astype(np.float64)]),
        "not a float32 array",
    ),
    "gradients of rows": (
        lambda m, b, loss: apply(m, [hs.IndexedSlices(m.ones.reshape(1, 5) * loss, m.rows)]),
        "SGD",
    ),
    "a seed": (lambda m, b, loss: m.random.binomial(1000, 0.5, 8), "seed"),
    "a generator": (lambda m, b, loss: m.xp.random.default_rng().random(8), "seed"),
    "kept in a global": (lambda m, b, loss: keep_in_a_global(m, loss), "outlives it"),
    "kept in a cycle": (lambda m, b, loss: m.kept.append([m.kept, loss]), "outlives it"),
    "kept and returned": (lambda m, b, loss: (m.kept.append(loss), loss)[1], "outlives it"),
    "returned in an object": (lambda m, b, loss: types.SimpleNamespace(loss=loss), "outlives it"),
}
if N == 1:
    CANNOT["no strategy's"] = lambda m, b, loss: m.of_none.assign_add(1), "of no strategy"


@pytest.mark.parametrize(("change", "said"), CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_captured(mirrored, change, said):
    xp, of_none = mirrored.xp, hs.Variable(0.0)
    model: Any = Model(mirrored, OPTIMIZERS["SGD"])
    model.calls, model.of_none, model.other = [], of_none, xp.cuda.Stream(non_blocking=True)
    model.ones, model.rows = xp.ones(5, np.float32), xp.zeros(1, np.int64)
    model.random = xp.random.RandomState(RANK)
    if change is CANNOT["a first step"][0]:
        with mirrored.scope():
            model.kept += [hs.Variable(np.zeros(3, np.float32)) for _ in range(9)]
    xp.cuda.Stream.null.synchronize()  # which made the arrays

    def step(batch):
        model.calls.append(0)
        return change(model, batch, model.step(batch))

    (batch,) = batches(mirrored, (4,))
    check_refused(mirrored, hs.function(step), (batch,), model.state, said)
    if said != "this step of SGD":
        check_others(mirrored, model, batch)
    keep_in_a_global(0, None)


def test_a_refusal_that_is_caught(mirrored):
    """The library's, and CuPy's: what the handler does is captured."""
    xp, model = mirrored.xp, Model(mirrored, OPTIMIZERS["SGD"])
    for read in (lambda x: model.optimizer.iterations + 3, lambda x: float(x.max())):

        @hs.function
        def step(x, read=read):
            try:
                return x * read(x)
            except RuntimeError:
                return x + 10

        found = [own(mirrored.run(step, args=(xp.full(2, 3.0),)))[0] for _ in range(6)]
        assert found == [9, 9, 13, 13, 13, 13] and captured(step) == 1


@RANKS
def test_an_error_of_the_program(mirrored, ranks):
    """Raised as itself where the function is captured, and again; the state is as before."""
    model, calls = Model(mirrored, OPTIMIZERS["Adam"]), []
    (batch,) = batches(mirrored, (4,))

    @hs.function
    def step(batch):
        calls.append(0)
        loss = model.step(batch)
        if 2 < len(calls) < 5 and RANK in ranks:
            raise ValueError("odd")
        return loss + model.step(batch)  # of all ranks, which others capture meanwhile

    for _ in range(2):
        mirrored.run(step, args=(batch,))
    before = model.state()
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match="odd") as caught:
            mirrored.run(step, args=(batch,))
        assert RANK not in ranks or type(caught.value) is ValueError
        check_equal(model.state(), before)
    for _ in range(3):
        mirrored.run(step, args=(batch,))
    assert captured(step) == 1 and len(calls) == 5
    assert model.optimizer.iterations == 10


# ---- at the first call


@RANKS
@pytest.mark.parametrize("said", ["on the host", "numpy", "libcublas"])
def test_what_no_call_may_have(mirrored, monkeypatch, said, ranks):
    """An argument on the host, a module with arrays of its own, and no cuBLAS."""

    def load(_):
        raise OSError("libcublas.so.13: cannot open shared object file")

    step, ones = hs.function(lambda given: given["x"] @ given["x"]), np.ones((2, 2))
    x = ones if said == "on the host" and RANK in ranks else mirrored.xp.asarray(ones)
    with monkeypatch.context() as patched:
        if said == "numpy" and RANK in ranks:
            patched.setattr(function, "FOREIGN", ("numpy",))
        if said == "libcublas" and RANK in ranks:
            patched.setattr(gpu.Stream, "products", property(load))
        check_refused(mirrored, step, ({"x": x},), list, said if RANK in ranks else "rank", 1)
    found = mirrored.run(step, args=({"x": mirrored.xp.asarray(ones)},))
    assert own(found).tolist() == [[2, 2], [2, 2]]


def test_arrays_of_another_gpu(mirrored):
    xp = mirrored.xp
    if (count := xp.cuda.runtime.getDeviceCount()) == 1:
        pytest.skip("there is one GPU")
    with mirrored.scope():
        v = hs.Variable(np.zeros(3), aggregation="SUM")
    with xp.cuda.Device((RANK + 1) % count):
        other = xp.ones(3)
    step = hs.function(lambda x: v.assign_add(x, read_value=False))
    check_refused(mirrored, step, (other,), lambda: [v.numpy()], "GPU", 1)
    step = hs.function(lambda: v.assign_add(other, read_value=False))
    check_refused(mirrored, step, (), lambda: [v.numpy()], "another GPU")


@RANKS
def test_no_memory_for_a_graph(mirrored, monkeypatch, ranks):
    """CUDA takes it when a graph is uploaded."""
    xp, model = mirrored.xp, Model(mirrored, OPTIMIZERS["SGD"])
    stream, end = xp.cuda.Stream, xp.cuda.Stream.end_capture

    class Graph:
        def __init__(self, graph):
            self.graph = graph

        def upload(self, _):
            del self.graph
            raise MemoryError("no memory for the graph")

    (batch,) = batches(mirrored, (4,))
    step, said = hs.function(model.step), "no memory" if RANK in ranks else f"rank {ranks[0]}"
    with monkeypatch.context() as patched:
        if RANK in ranks:
            patched.setattr(stream, "end_capture", lambda self: Graph(end(self)))
        check_refused(mirrored, step, (batch,), model.state, said)
    check_others(mirrored, model, batch)
    for _ in range(CALLS):
        mirrored.run(step, args=(batch,))
    assert captured(step) == 1  # there is memory by now
