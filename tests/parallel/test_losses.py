"""Losses and their gradients: against difference quotients, and at the limits of floats."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from slow import slow_but
from strategies import STRATEGIES

import hpcstrat as hs

losses = hs.losses
RANK = MPI.COMM_WORLD.rank
N = MPI.COMM_WORLD.size

RANDOM = np.random.default_rng(RANK)
LOGITS = RANDOM.normal(0, 3, (4, 2, 3))
CLASSES = RANDOM.integers(0, 3, (4, 2))
LABELS = RANDOM.integers(0, 9, (4, 2, 3)) / 8  # exact in each dtype
CASES = {
    "class indices": (losses.softmax_cross_entropy, CLASSES),
    "one-hot": (losses.softmax_cross_entropy, np.eye(3)[CLASSES]),
    "any labels": (losses.softmax_cross_entropy, LABELS),  # they do not sum to 1
    "sigmoid": (losses.sigmoid_cross_entropy, LABELS),
    "squared": (losses.squared_error, LABELS),
    "Huber's": (losses.huber, LABELS),
    "Huber's of delta 3": (lambda labels, x: losses.huber(labels, x, delta=3.0), LABELS),
}
on_one_strategy = pytest.mark.parametrize(
    "strategy", slow_but(STRATEGIES[:1], STRATEGIES), indirect=True
)


def quotients(loss, labels, x, step=1e-5):
    """The derivatives of the sum of the losses by central differences."""
    found = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        above, below = x.copy(), x.copy()
        above[index] += step
        below[index] -= step
        found[index] = (loss(labels, above)[0].sum() - loss(labels, below)[0].sum()) / (2 * step)
    return found


@pytest.mark.parametrize("case", slow_but(["any labels", "sigmoid", "Huber's of delta 3"], CASES))
def test_gradient(xp, case):
    loss, labels = CASES[case]
    found, gradient = loss(xp.asarray(labels), xp.asarray(LOGITS))
    assert type(found) is type(gradient) is xp.ndarray
    assert gradient.shape == LOGITS.shape
    assert found.shape == (
        LOGITS.shape[:-1] if loss is losses.softmax_cross_entropy else LOGITS.shape
    )
    np.testing.assert_allclose(
        hs.asnumpy(gradient), quotients(loss, labels, LOGITS), rtol=1e-7, atol=1e-7
    )


def test_values(xp):
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True)
    found, _ = losses.softmax_cross_entropy(xp.asarray(LABELS), xp.asarray(LOGITS))
    np.testing.assert_allclose(hs.asnumpy(found), -(LABELS * np.log(p)).sum(axis=-1), rtol=1e-13)
    found, _ = losses.softmax_cross_entropy(CLASSES.tolist(), xp.asarray(LOGITS))
    np.testing.assert_allclose(
        hs.asnumpy(found),
        -np.log(np.take_along_axis(p, CLASSES[..., None], -1)[..., 0]),
        rtol=1e-13,
    )
    p = 1 / (1 + np.exp(-LOGITS))
    found, _ = losses.sigmoid_cross_entropy(LABELS, xp.asarray(LOGITS))
    np.testing.assert_allclose(
        hs.asnumpy(found), -LABELS * np.log(p) - (1 - LABELS) * np.log1p(-p), rtol=1e-12
    )
    found, gradient = losses.huber(xp.zeros(5), xp.array([-3, -1, 0.5, 1, 2]))
    assert found.tolist() == [2.5, 0.5, 0.125, 0.5, 1.5]
    assert gradient.tolist() == [-1, -1, 0.5, 1, 1]


SHORT = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", slow_but(SHORT, [np.float64, np.float32, *SHORT]))
@pytest.mark.parametrize("case", CASES)
def test_dtypes(xp, case, dtype):
    loss, labels = CASES[case]
    x = LOGITS.astype(dtype)
    found = loss(xp.asarray(labels), xp.asarray(x))
    assert [one.dtype for one in found] == [dtype, dtype]
    for one, exact in zip(found, loss(labels, x.astype(np.float64)), strict=True):
        epsilon = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(
            hs.asnumpy(one).astype(np.float64), exact, rtol=8 * epsilon, atol=20 * epsilon
        )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_large_logits_do_not_overflow(xp, dtype):
    x = xp.asarray(np.array([[1e4, -1e4, 0], [-1e4, -1e4, -1e4]], dtype))
    for labels in (xp.array([1, 2]), xp.asarray(np.eye(3)[[1, 2]])):
        found, gradient = losses.softmax_cross_entropy(labels, x)
        assert found.tolist() == pytest.approx([2e4, np.log(3)], rel=1e-6)
        assert gradient.tolist()[0] == [1, -1, 0]
        assert gradient.tolist()[1] == pytest.approx([1 / 3, 1 / 3, -2 / 3], rel=1e-6)
    found, gradient = losses.sigmoid_cross_entropy(
        xp.array([0, 1, 1, 0]), xp.asarray(np.array([1e4, 1e4, -1e4, -1e4], dtype))
    )
    assert found.tolist() == [1e4, 0, 1e4, 0]
    assert gradient.tolist() == [1, 0, -1, 0]


def test_a_class_that_is_masked_out_counts_only_if_it_is_right(xp):
    x = xp.array([[0.0, -np.inf, 0.0]])
    for labels in (xp.array([0]), xp.array([[1.0, 0.0, 0.0]])):
        found, gradient = losses.softmax_cross_entropy(labels, x)
        assert found.tolist() == pytest.approx([np.log(2)], rel=1e-15)
        assert gradient.tolist() == [pytest.approx([-0.5, 0, 0.5])]
    assert losses.softmax_cross_entropy(xp.array([1]), x)[0].tolist() == [np.inf]


@pytest.mark.parametrize("case", slow_but(["class indices", "one-hot", "squared"], CASES))
def test_no_examples(xp, case):
    loss, labels = CASES[case]
    found, gradient = loss(xp.asarray(labels[:0]), xp.asarray(LOGITS[:0]))
    assert gradient.shape == (0, 2, 3)
    assert found.shape[0] == 0


@pytest.mark.core
def test_replicas_take_the_step_of_the_whole_batch(strategy, xp):
    """Losses and gradients over the global batch size add up; the last replica has no part."""
    random = np.random.default_rng(9)
    x, y = random.normal(size=(7, 3)), random.integers(0, 3, 7)
    w = random.normal(size=(3, 3))
    parts = np.array_split(np.arange(7), max(N - 1, 1))
    part = parts[RANK] if RANK < len(parts) else np.arange(0)
    with strategy.scope():
        variable = hs.Variable(w)
        optimizer = hs.optimizers.SGD(1.0)

    def step():
        own = xp.asarray(x[part])
        found, gradient = losses.softmax_cross_entropy(xp.asarray(y[part]), own @ variable.value())
        optimizer.apply_gradients([(own.T @ (gradient / 7), variable)])
        return losses.compute_average_loss(found, global_batch_size=7)

    total = strategy.reduce("SUM", strategy.run(step), axis=None)
    expected, gradient = losses.softmax_cross_entropy(y, x @ w)
    assert float(total) == pytest.approx(expected.mean(), rel=1e-13)
    np.testing.assert_allclose(variable.numpy(), w - x.T @ gradient / 7, rtol=1e-12, atol=1e-14)


def test_an_index_that_is_no_class(xp):
    """An error on the host; NaN on a GPU, where the host does not wait to check."""
    x = xp.zeros((3, 2))
    for wrong in 2, -1:
        labels = xp.array([1, wrong, 0])
        if xp is np:
            with pytest.raises(
                ValueError,
                match="softmax_cross_entropy: labels has class indices that are negative",
            ):
                losses.softmax_cross_entropy(labels, x)
        else:
            for one in losses.softmax_cross_entropy(labels, x):
                assert np.isnan(hs.asnumpy(one)).reshape(3, -1).all(axis=1).tolist() == [
                    False,
                    True,
                    False,
                ]


WEIGHTED = [
    ((3,), (3,)),
    ((3,), (3, 1)),
    ((3,), ()),
    ((3,), (1,)),
    ((3, 2), (3,)),
    ((3, 2), (3, 1)),
    ((3, 2), (3, 2)),
    ((3, 2), (3, 2, 1)),
    ((0,), (0, 1)),
]


@on_one_strategy
@pytest.mark.parametrize(("shape", "weights"), WEIGHTED, ids=str)
def test_weights_never_repeat_losses(strategy, xp, shape, weights):
    """The sum over replicas of r + 1 times a loss of 2 to the i, times its weight."""
    own = 2.0 ** np.arange(np.prod(shape, dtype=int)).reshape(shape)
    weight = 1.0 + np.arange(np.prod(weights, dtype=int)).reshape(weights)
    of_each = np.broadcast_to(
        weight.reshape(weight.shape[: own.ndim] + (1,) * (own.ndim - weight.ndim)), shape
    )
    found = strategy.run(
        lambda: losses.compute_average_loss(
            xp.asarray(own * (RANK + 1)), xp.asarray(weight), global_batch_size=4
        )
    )
    assert float(strategy.reduce("SUM", found, None)) == (own * of_each).sum() * N * (N + 1) / 2 / 4


@on_one_strategy
@pytest.mark.parametrize("weights", [(2,), (1, 3), (3, 3), (3, 1, 1)], ids=str)
def test_weights_that_do_not_fit(strategy, xp, weights):
    def step():
        losses.compute_average_loss(xp.ones(3), xp.ones(weights))

    with pytest.raises(
        ValueError, match=rf"compute_average_loss: sample_weight has shape \({weights[0]},.*\(3,\)"
    ):
        strategy.run(step)


@pytest.mark.parametrize(
    "call, kind, says",
    [
        (
            lambda: losses.softmax_cross_entropy([0, 1], [[1, 2], [3, 4]]),
            TypeError,
            "logits is of dtype int64",
        ),
        (
            lambda: losses.softmax_cross_entropy([0.0], [[1.0, 2.0]]),
            TypeError,
            "class indices of dtype float64",
        ),
        (
            lambda: losses.softmax_cross_entropy([0, 1], [[1.0, 2.0]]),
            ValueError,
            r"labels has shape \(2,\) and logits",
        ),
        (
            lambda: losses.softmax_cross_entropy(0, 1.0),
            ValueError,
            r"logits has shape \(\); its last dimension",
        ),
        (
            lambda: losses.softmax_cross_entropy(np.zeros(2, int), np.zeros((2, 0))),
            ValueError,
            r"logits has shape \(2, 0",
        ),
        (
            lambda: losses.sigmoid_cross_entropy([1], [[1.0]]),
            ValueError,
            r"labels has shape \(1,\) and logits \(1, 1\)",
        ),
        (lambda: losses.squared_error(["x"], [1.0]), TypeError, "labels is of dtype"),
        (lambda: losses.squared_error([1j], [1.0]), TypeError, "labels is of dtype complex128"),
        (
            lambda: losses.squared_error([1.0], [1j]),
            TypeError,
            "predictions is of dtype complex128",
        ),
        (
            lambda: losses.huber([1.0], [1.0], delta=0),
            ValueError,
            "huber: delta is 0; it must be positive",
        ),
        (
            lambda: losses.huber([1.0], [1.0], delta="x"),  # pyright: ignore[reportArgumentType]
            TypeError,
            "huber: delta is 'x'; it must be a number",
        ),
        (
            lambda: losses.huber([1.0], [1.0, 2.0]),
            ValueError,
            r"huber: labels has shape \(1,\) and predictions \(2,\)",
        ),
    ],
    ids=[
        "softmax_cross_entropy of int logits",
        "softmax_cross_entropy of float classes",
        "softmax_cross_entropy of more labels",
        "softmax_cross_entropy of a number",
        "softmax_cross_entropy of no classes",
        "sigmoid_cross_entropy of fewer dimensions",
        "squared_error of text",
        "squared_error of complex labels",
        "squared_error of complex predictions",
        "huber of delta 0",
        "huber of text as delta",
        "huber of more predictions",
    ],
)
def test_what_is_refused(call, kind, says):
    with pytest.raises(kind, match=says):
        call()


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda: losses.compute_average_loss(["x"]),
            "compute_average_loss: per_example_loss is of dtype str",
        ),
        (
            lambda: losses.compute_average_loss(np.array([None])),
            "compute_average_loss: per_example_loss is of dtype ob",
        ),
        (
            lambda: losses.compute_average_loss([1.0], ["2"]),
            "compute_average_loss: sample_weight is of dtype str",
        ),
        (
            lambda: losses.compute_average_loss([1.0], global_batch_size="8"),  # pyright: ignore[reportArgumentType]
            "compute_average_loss: global_batch_size is '8'; it must be a number",
        ),
        (
            lambda: losses.scale_regularization_loss("x"),
            "scale_regularization_loss: regularization_loss is of dtype s",
        ),
    ],
    ids=["losses", "objects", "weights", "batch size", "regularization"],
)
def test_losses_of_a_replica_that_are_no_numbers(call, says):
    with pytest.raises(TypeError, match=says):
        hs.MirroredStrategy().run(call)
