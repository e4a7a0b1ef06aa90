"""Losses and their gradients: of any dtype, at the limits of floats, averages, wrong uses."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

losses = hs.losses
N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank

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


@pytest.mark.parametrize("case", CASES)
def test_lists_are_arrays(xp, case):
    loss, labels = CASES[case]
    found = loss(xp.asarray(labels), xp.asarray(LOGITS))
    assert [type(one) for one in found] == [xp.ndarray] * 2
    for one, other in zip(loss(labels.tolist(), xp.asarray(LOGITS)), found, strict=True):
        assert one.tolist() == other.tolist()


def test_labels_need_not_sum_to_1(xp):
    """The conformance kit has TensorFlow's values of labels that do."""
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True)
    found, gradient = map(
        hs.asnumpy, losses.softmax_cross_entropy(xp.asarray(LABELS), xp.asarray(LOGITS))
    )
    np.testing.assert_allclose(found, -(LABELS * np.log(p)).sum(axis=-1), rtol=1e-13)
    wanted = LABELS.sum(axis=-1, keepdims=True) * p - LABELS
    np.testing.assert_allclose(gradient, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(xp, dtype):
    x, epsilon = LOGITS.astype(dtype), float(ml_dtypes.finfo(dtype).eps)
    for loss, labels in CASES.values():
        found = loss(xp.asarray(labels), xp.asarray(x))
        assert [one.dtype for one in found] == [dtype, dtype]
        for one, exact in zip(found, loss(labels, x.astype(np.float64)), strict=True):
            np.testing.assert_allclose(
                hs.asnumpy(one).astype(np.float64), exact, rtol=8 * epsilon, atol=20 * epsilon
            )


def test_a_class_that_is_masked_out_counts_only_if_it_is_right(xp):
    x = xp.array([[0.0, -np.inf, 0.0]])
    for labels in (xp.array([0]), xp.array([[1.0, 0.0, 0.0]])):
        found, gradient = losses.softmax_cross_entropy(labels, x)
        assert found.tolist() == pytest.approx([np.log(2)], rel=1e-15)
        assert gradient.tolist() == [pytest.approx([-0.5, 0, 0.5])]
    assert losses.softmax_cross_entropy(xp.array([1]), x)[0].tolist() == [np.inf]


def test_an_index_that_is_no_class(xp):
    """An error on the host; NaN on a GPU, where the host does not wait to check."""
    for wrong in 2, -1:
        labels, x = xp.array([1, wrong, 0]), xp.zeros((3, 2))
        if xp is np:
            said = "softmax_cross_entropy: labels has class indices that are negative"
            with pytest.raises(ValueError, match=said):
                losses.softmax_cross_entropy(labels, x)
            continue
        for one in losses.softmax_cross_entropy(labels, x):
            are_nan = np.isnan(hs.asnumpy(one)).reshape(3, -1).all(axis=1)
            assert are_nan.tolist() == [False, True, False]


# ---- the average loss of the global batch


def of_replicas(strategy, loss, *args, **kwargs):
    return strategy.reduce("SUM", strategy.run(loss, args, kwargs), None)


def test_the_average_loss_of_the_global_batch(mirrored, xp):
    """Uneven parts with a given global batch size: their sum is the mean of all."""
    parts = [np.arange(rank + 1, dtype=np.float32) + rank for rank in range(N)]
    size, average = sum(map(len, parts)), losses.compute_average_loss
    found = of_replicas(mirrored, average, xp.asarray(parts[RANK]), global_batch_size=size)
    assert found.dtype == np.float32
    assert float(found) == pytest.approx(np.concatenate(parts).mean(), rel=1e-6)
    found = of_replicas(mirrored, average, xp.full((4, 2), RANK + 1.0), xp.array([1, 0, 2, 1]))
    assert float(found) == pytest.approx(2 * 4 * N * (N + 1) / 2 / (4 * N), rel=1e-15)
    for weight in 3.0, [3.0]:
        found = of_replicas(mirrored, average, xp.ones(2), xp.asarray(weight))
        assert float(found) == pytest.approx(3, rel=1e-15)
    found = of_replicas(mirrored, losses.scale_regularization_loss, xp.array([1.0, 5.0]))
    assert float(found) == pytest.approx(6, rel=1e-15)


def test_weights_that_do_not_fit(mirrored, xp):
    for weights in [(2,), (1, 3), (3, 3), (3, 1, 1)]:
        said = rf"compute_average_loss: sample_weight has shape \({weights[0]},.*\(3,\)"
        with pytest.raises(ValueError, match=said):
            mirrored.run(losses.compute_average_loss, args=(xp.ones(3), xp.ones(weights)))


# ---- what is refused

softmax, sigmoid = losses.softmax_cross_entropy, losses.sigmoid_cross_entropy
squared = losses.squared_error
REFUSED = [
    (softmax, ([0, 1], [[1, 2]]), TypeError, "logits is of dtype int64"),
    (softmax, ([0.0], [[1.0]]), TypeError, "class indices of dtype float64"),
    (softmax, ([0, 1], [[1.0]]), ValueError, r"labels has shape \(2,\) and logits"),
    (softmax, (0, 1.0), ValueError, r"logits has shape \(\); its last dimension"),
    (softmax, ([0, 0], np.zeros((2, 0))), ValueError, r"logits has shape \(2, 0"),
    (sigmoid, ([1], [[1.0]]), ValueError, r"labels has shape \(1,\) and logits \(1, 1\)"),
    (squared, (["x"], [1.0]), TypeError, "labels is of dtype"),
    (squared, ([1j], [1.0]), TypeError, "labels is of .* complex128"),
    (squared, ([1.0], [1j]), TypeError, "predictions is of dtype complex128"),
    (losses.huber, ([1.0], [1.0], 0), ValueError, "delta is 0; it must be positive"),
    (losses.huber, ([1.0], [1.0], "x"), TypeError, "delta is 'x'; it must be a n"),
    (losses.huber, ([1.0], [1.0, 2.0]), ValueError, r"shape \(1,\) and predictions \(2,\)"),
]


def test_what_is_refused():
    for loss, given, kind, said in REFUSED:
        with pytest.raises(kind, match=f"{loss.__name__}: .*{said}"):
            loss(*given)


NO_NUMBERS = [
    (losses.compute_average_loss, (["x"],), "per_example_loss is of dtype str"),
    (losses.compute_average_loss, (np.array([None]),), "per_example_loss is of dtype ob"),
    (losses.compute_average_loss, ([1.0], ["2"]), "sample_weight is of dtype str"),
    (losses.compute_average_loss, ([1.0], None, "8"), "global_batch_size is '8'; it must be a"),
    (losses.scale_regularization_loss, ("x",), "regularization_loss is of dtype s"),
]


def test_losses_of_a_replica_that_are_no_numbers(mirrored):
    for call, given, said in NO_NUMBERS:
        with pytest.raises(TypeError, match=f"{call.__name__}: {said}"):
            mirrored.run(call, args=given)
