"""Losses and their gradients; as TensorFlow's tape has them, for each replica's own numbers."""
import numpy as np

from _common import local, on, raises, replica

RANDOM = np.random.default_rng(1)
LOGITS = (4 * RANDOM.normal(size=(4, 5, 3))).astype(np.float32)
LOGITS[:, 0] = [[1000, -1000, 0], [-200, -200, -200], [88, 89, 90], [0, 0, 0]]
CLASSES = RANDOM.integers(0, 3, (4, 5))
LABELS = RANDOM.integers(0, 2, (4, 5, 3)).astype(np.float32)
CHANCES = RANDOM.dirichlet([1, 1, 1], (4, 5)).astype(np.float32)


def own(hs, array):
    """This replica's part; the last replica of several has none of it."""
    r = replica(hs)
    return array[r][:0] if r and r + 1 == hs.get_replica_context().num_replicas_in_sync else array[r][:5 - r]


def of(hs, strategy, loss):
    """Losses and gradient on every replica; `loss(part)` calls it, where `part` takes a replica's part of an array."""
    return local(hs, strategy, strategy.run(lambda: loss(lambda array: own(hs, array))))


@on("central", "mirrored")
def case_losses_of_classes(hs, strategy):
    loss = hs.losses.softmax_cross_entropy
    return {
        "sparse": of(hs, strategy, lambda part: loss(part(CLASSES), part(LOGITS))),
        "one-hot": of(hs, strategy, lambda part: loss(np.eye(3, dtype=np.float32)[part(CLASSES)], part(LOGITS))),
        "probabilities": of(hs, strategy, lambda part: loss(part(CHANCES), part(LOGITS))),
        "pixels": of(hs, strategy, lambda part: loss(part(CLASSES)[:, None], part(LOGITS)[:, None])),
        "float64": of(hs, strategy, lambda part: loss(part(CLASSES), part(LOGITS).astype(np.float64))),
    }


@on("central", "mirrored")
def case_losses_of_labels(hs, strategy):
    loss = hs.losses.sigmoid_cross_entropy
    return {
        "labels": of(hs, strategy, lambda part: loss(part(LABELS), part(LOGITS))),
        "probabilities": of(hs, strategy, lambda part: loss(part(CHANCES), part(LOGITS))),
        "float64": of(hs, strategy, lambda part: loss(part(LABELS), part(LOGITS).astype(np.float64))),
    }


@on("central", "mirrored")
def case_losses_of_errors(hs, strategy):
    values = CHANCES * 3
    return {
        "squared": of(hs, strategy, lambda part: hs.losses.squared_error(part(LABELS), part(values))),
        "huber": of(hs, strategy, lambda part: hs.losses.huber(part(LABELS), part(values))),
        "huber of 0.3": of(hs, strategy, lambda part: hs.losses.huber(part(LABELS), part(values), delta=0.3)),
        "at the corner": of(hs, strategy, lambda part: hs.losses.huber(part(LABELS), part(LABELS) + 1)),
    }


@on("central", "mirrored")
def case_average_losses_with_weights(hs, strategy):
    """Uneven and empty parts; weights with a dimension more or less than the losses."""
    def average(loss, weight):
        def step(part):
            return hs.losses.compute_average_loss(part(loss), sample_weight=part(weight), global_batch_size=15)
        return of(hs, strategy, step)

    weights = CHANCES[..., 0]
    return {
        "one each": average(CHANCES[..., 1], weights),
        "in a column": average(CHANCES[..., 1], weights[..., None]),
        "of rows": average(CHANCES, weights),
        "of rows in a column": average(CHANCES, weights[..., None]),
        "of elements": average(CHANCES, CHANCES[..., ::-1].copy()),
        "in a row": raises(lambda: strategy.run(lambda: hs.losses.compute_average_loss(
            CHANCES[0, :, 0], sample_weight=weights[:1], global_batch_size=15))),
    }


def case_losses_that_do_not_fit(hs, strategy):
    loss = hs.losses.softmax_cross_entropy
    return {
        "no class": raises(lambda: loss(np.array([0, 3]), LOGITS[0][:2])),
        "negative": raises(lambda: loss(np.array([0, -1]), LOGITS[0][:2])),
        "fewer labels": raises(lambda: loss(CLASSES[0][:1], LOGITS[0][:2])),
        "logits of no classes": raises(lambda: loss(CLASSES[0][0], LOGITS[0][0, 0])),
        "labels of another shape": raises(lambda: hs.losses.sigmoid_cross_entropy(LABELS[0][:2], LOGITS[0][:3])),
    }
