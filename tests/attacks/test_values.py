"""Attacks on values: replicas' odd calls, variables written directly, metrics, losses, PyTorch."""

import pytest


@pytest.mark.parametrize("rounds", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_wrong_calls_of_one_replica_raise_on_all_and_the_next_call_is_right(cell, rounds):
    cell.write(f"""
        import numpy as np
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        random = np.random.default_rng({rounds})
        right = np.arange(6.0).reshape(2, 3)
        CALLS = {{
            "all_reduce": lambda c, v, op, axis: c.all_reduce(op, v),
            "all_gather": lambda c, v, op, axis: c.all_gather(v, axis),
            "broadcast": lambda c, v, op, axis: c.broadcast(v, axis),
            "reduce_scatter": lambda c, v, op, axis: c.reduce_scatter(op, v, axis),
            "all_to_all": lambda c, v, op, axis: c.all_to_all([v] * (3 if axis < 2 else 2)),
            "neighbor_exchange": lambda c, v, op, axis: c.neighbor_exchange(v, v, periodic=op == "SUM"),
        }}
        WRONG = [None, "x", b"x", [right], {{"a": right}}, right.astype("f4"), right.astype("M8[s]"), object(),
                 right[0, 0], np.zeros((0, 3, 2)), right > 1, np.array([right, None], object), hs.data.Dataset.range(3)]
        raised = 0
        for number in range({rounds}):
            culprit, name, odd = (int(random.integers(n)) for n in (hs.size(), len(CALLS), len(WRONG)))
            call = list(CALLS.values())[name]
            other = list(CALLS.values())[random.integers(len(CALLS))] if number % 4 == 0 else call

            def fn():
                context = hs.get_replica_context()
                if context.replica_id_in_sync_group != culprit:
                    return call(context, right, "SUM", 0)
                if number % 4 == 0:
                    return other(context, right, "SUM", 0)
                if number % 4 == 1:
                    return call(context, right, "MEAN", 9)
                return call(context, WRONG[odd], "SUM", 0)

            try:
                strategy.run(fn)
                failed = 0
            except (hs.ReplicaMismatchError, TypeError, ValueError, NotImplementedError) as error:
                failed = 1
            total = strategy.run(lambda: hs.get_replica_context().all_reduce("SUM", np.array([failed, hs.rank() + 1])))
            found = strategy.experimental_local_results(total)[0].tolist()
            assert found[1] == 6 and found[0] in (0, 3), (number, found, culprit, name, odd)
            raised += failed
        print(raised > {rounds} // 3)
    """)
    ended = cell("hpcstrat", "run", "-n", "3", "program.py")
    assert (ended.status, ended.stdout) == (0, "True\n")


@pytest.mark.slow
def test_odd_layouts_and_dtypes_have_numpys_results(cell):
    cell.write("""
        import numpy as np
        import hpcstrat as hs

        strategy = hs.MirroredStrategy()
        LAYOUTS = {
            "turned": lambda a: a[::-1, ::2], "fortran": np.asfortranarray, "transposed": lambda a: a.T,
            "none": lambda a: a[:0], "scalars": lambda a: a[0, 0],
            "one row for all": lambda a: np.broadcast_to(a[0], (5, 8)), "rows": lambda a: a[1::3],
            "readonly": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape), "odd address":
            lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape),
        }
        DTYPES = ["bool", "int8", "uint8", "int16", "uint32", "int64", "uint64", "float16", "float32", "float64",
                  "complex64", "complex128", ">f8", ">i4", "longdouble"]
        for dtype in DTYPES:
            for name, layout in LAYOUTS.items():
                def of(rank):
                    return layout((np.random.default_rng(rank).integers(0, 9, (6, 8))).astype(dtype))

                def fn():
                    context = hs.get_replica_context()
                    own = of(hs.rank())
                    out = [context.broadcast(own, 1)]
                    if own.ndim:
                        out += [context.all_gather(own, 0), *context.all_to_all([own, own[:1], own[:0]])]
                    return out

                everyones = [of(rank) for rank in range(3)]
                expected = [everyones[1]]
                if everyones[0].ndim:
                    parts = [[one, one[:1], one[:0]][hs.rank()] for one in everyones]
                    expected += [np.concatenate(everyones), *parts]
                try:
                    found = strategy.experimental_local_results(strategy.run(fn))[hs.rank()]
                except TypeError as error:
                    refused = str(error)
                    assert np.dtype(dtype).str[1:] in refused or np.dtype(dtype).name in refused, (dtype, name, refused)
                    continue
                for one, wanted in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(one, wanted, err_msg=f"{dtype} {name}")
                    assert np.asarray(one).dtype == np.dtype(dtype).newbyteorder("="), (dtype, name, one.dtype)
        hs.barrier()
        print("all right")
    """)
    ended = cell("hpcstrat", "run", "-n", "3", "program.py")
    assert (ended.status, ended.stdout) == (0, "all right\n")


def test_a_variable_is_written_by_assign_or_not_at_all(cell):
    cell.write("""
        import copy, pickle
        import numpy as np
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        with strategy.scope():
            w = hs.Variable(np.arange(6.0).reshape(2, 3))
        WAYS = {
            "item": lambda v: v.__setitem__(0, 9), "sum": lambda v: v.__iadd__(1), "out": lambda v: np.add(v, 1, out=v),
            "copyto": lambda v: np.copyto(v, 9), "put": lambda v: np.put(v, 0, 9),
            "place": lambda v: np.place(v, v > 0, 9),
            "putmask": lambda v: np.putmask(v, v > 0, 9), "fill": lambda v: v.fill(9), "sort": lambda v: v[::-1].sort(),
            "shuffle": lambda v: np.random.default_rng(0).shuffle(v), "flat": lambda v: v.flat.__setitem__(0, 9),
            "flags": lambda v: v.setflags(write=True), "view": lambda v: v.view(np.int64).fill(9),
            "swap": lambda v: v.byteswap(True), "reshape": lambda v: v.reshape(-1).__setitem__(0, 9),
            "memory": lambda v: memoryview(v).__setitem__((0, 0), 9.0),
            "base": lambda v: v.base.__setitem__(..., 9), "random": lambda v: np.random.default_rng(0).random(out=v),
        }
        def write(way):
            try:
                way(w.value())
            except (ValueError, TypeError, AttributeError, BufferError, NotImplementedError):
                pass
        for name, way in WAYS.items():
            strategy.run(write, args=(way,))
            assert (w.numpy() == np.arange(6.0).reshape(2, 3)).all(), name
        for copied in (copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))):
            try:
                copied({"w": w})["w"].value().fill(9)
            except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
                pass
            assert (w.numpy() == np.arange(6.0).reshape(2, 3)).all()
        print("as it was")
    """)
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    assert (ended.status, ended.stdout) == (0, "as it was\n")


@pytest.mark.slow
def test_what_numpy_is_told_to_raise_on_one_rank_is_no_exception_there_alone(cell):
    """Overflows, divisions and invalid numbers in everything that sums over ranks."""
    cell.write("""
        import warnings
        import numpy as np
        import hpcstrat as hs

        if hs.rank() == 1:
            np.seterr(all="raise")
            warnings.simplefilter("error")
        strategy = hs.MirroredStrategy()
        with strategy.scope():
            w = hs.Variable(np.full(3, 6e4, np.float16))
            metrics = [hs.metrics.Mean(dtype="float16"), hs.metrics.Sum(dtype="float32")]
            optimizers = [hs.optimizers.Adam(1e30), hs.optimizers.SGD(1e30, momentum=0.9)]
        for value in (np.float16([6e4]), np.float32([3e38, np.inf, np.nan, 1e-45]), np.array([1.7e308, -np.inf])):
            for op in ("SUM", "MEAN", "MAX"):
                def fn():
                    context = hs.get_replica_context()
                    return [context.all_reduce(op, value)] + [context.reduce_scatter(op, np.repeat(value, 2))][:0]
                inside = strategy.experimental_local_results(strategy.run(fn))[0][0]
                top = strategy.reduce(op, strategy.run(lambda: value), axis=None)
                rows = strategy.reduce(op, strategy.run(lambda: np.stack([value, value])), axis=0)
                with np.errstate(all="ignore"):
                    assert np.array_equal(inside, top, equal_nan=True) and rows.shape == value.shape
        for optimizer in optimizers:
            strategy.run(lambda: optimizer.apply_gradients([(np.full(3, 6e4, np.float16), w)]))
        for metric in metrics:
            strategy.run(lambda: metric.update_state(np.full(4, 3e38)))
            assert np.isposinf(metric.result())
        hs.barrier()
        print("no exception")
    """)
    ended = cell("hpcstrat", "run", "-n", "3", "program.py")
    assert (ended.status, ended.stdout) == (0, "no exception\n")


METRICS = """
import fractions
import numpy as np
import hpcstrat as hs

random = np.random.default_rng(1)
labels, classes = random.integers(0, 4, 50), random.integers(0, 4, 50)
scores, weights = random.random((50, 4)), random.integers(0, 3, 50) / 2
matrix = np.zeros((4, 4))
np.add.at(matrix, (labels, classes), weights)
strategy = hs.CentralStorageStrategy()
with strategy.scope():
    m = hs.metrics
    CASES = [
        (m.Mean(), (scores[:, 0],), np.average(scores[:, 0], weights=weights)),
        (m.Sum(), (scores[:, 0],), (weights * scores[:, 0]).sum()),
        (m.ConfusionMatrix(4), (labels, classes), matrix),
        (m.SparseCategoricalAccuracy(), (labels, scores), np.average(scores.argmax(1) == labels, weights=weights)),
        (m.MeanSquaredError(), (labels, scores[:, 0]), np.average((labels - scores[:, 0]) ** 2, weights=weights)),
        (m.BinaryAccuracy(), (labels % 2, scores[:, 0]), np.average(labels % 2 == (scores[:, 0] > 0.5), weights=weights)),
    ]
ODD = [None, "x", "1.5", b"1", [], [[]], object(), [None], [1, "x"], {"a": 1}, {1}, np.array("x"), lambda: 1,
       [[1], [2, 3]], np.zeros(3, "M8[s]"), np.zeros(2, [("a", int)])]
CLASSES = [0.5, [0.0, 0.25], -1, 4, 2**62, -2**63, float("nan"), float("inf"), 1e300, [1.0, 3.999],
           fractions.Fraction(1, 2)]
"""


def test_refused_updates_of_metrics_name_the_call_and_change_no_total(cell):
    """The halves are uneven, with odd values between them."""
    cell.write(f"""{METRICS}
halves = [slice(0, 13), slice(13, 50)]
for metric, values, expected in CASES:
    name, rows = type(metric).__name__, halves[hs.rank()]
    strategy.run(lambda: metric.update_state(*(v[rows] for v in values), sample_weight=weights[rows]))
    for odd in ODD:
        def update():
            try:
                metric.update_state(*len(values) * [odd])
            except (TypeError, ValueError) as error:
                assert str(error).startswith(name), (name, odd, error)
            else:
                assert np.size(odd) == 0, (name, odd)
        strategy.run(update)
    np.testing.assert_allclose(metric.result(), expected, rtol=1e-12, err_msg=name)
    for odd in CLASSES if name == "ConfusionMatrix" else []:
        metric.reset_state()
        refused = 0
        try:
            strategy.run(lambda: metric.update_state(np.zeros_like(odd, dtype=float), odd))
            print(name, odd, metric.result())
        except ValueError as error:
            assert "num_classes" in str(error), (odd, error)
hs.barrier()
print("as expected")
""")
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    assert (ended.status, ended.stdout) == (0, "as expected\n")


@pytest.mark.slow
def test_losses_of_extreme_numbers_are_right_and_odd_arguments_are_named(cell):
    cell.write("""
        import numpy as np
        import hpcstrat as hs

        ODD = [None, "x", b"x", [None], object(), {"a": 1}, np.array("x"), [[1.0], [2.0, 3.0]], 2 + 1j,
               np.zeros(3, "M8[s]")]
        for name in ("softmax_cross_entropy", "sigmoid_cross_entropy", "squared_error", "huber", "compute_average_loss",
                     "scale_regularization_loss"):
            for odd in ODD:
                for values in ([odd], [odd, np.ones(2)], [np.ones(2), odd], [np.ones((2, 2)), np.ones((2, 2)), odd]):
                    try:
                        getattr(hs.losses, name)(*values)
                    except (TypeError, ValueError) as error:
                        assert name in str(error) and len(str(error)) < 500, (name, values, error)
        with np.errstate(all="ignore"):
            x = np.array([[0.0, 1e4, -1e4], [1e300, 1e300, -1e300], [-745.0, -746.0, -747.0], [1e-320, 0.0, -0.0]])
            y = np.array([0, 1, 2, 0])
            losses, gradient = hs.losses.softmax_cross_entropy(y, x)
            shifted = x - x.max(axis=1, keepdims=True)
            total = np.exp(shifted).sum(axis=1)
            np.testing.assert_allclose(losses, np.log(total) - shifted[range(4), y], rtol=1e-12)
            expected = np.exp(shifted) / total[:, None] - np.eye(3)[y]
            np.testing.assert_allclose(gradient, expected, rtol=1e-12, atol=1e-300)
            z = np.array([-1e300, -1e4, -40.0, 0.0, 40.0, 1e4, 1e300])
            losses, gradient = hs.losses.sigmoid_cross_entropy(np.ones(7), z)
            np.testing.assert_allclose(losses, np.logaddexp(0.0, -z), rtol=1e-12)
            assert np.isfinite(gradient).all() and gradient[3] == -0.5 and gradient[0] == -1.0 and gradient[-1] == 0.0
        print("right")
    """)
    ended = cell("python", "program.py")
    assert (ended.status, ended.stdout) == (0, "right\n")


def test_without_pytorch_its_calls_say_so_and_end_the_job(cell):
    cell.write("""
        import sys
        sys.modules["torch"] = None  # as where it is not installed
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        hs.torch.device(strategy)
    """)
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    assert ended.status == 1 and "ImportError: device needs PyTorch" in ended.stderr
