"""A typed program: pyright and strict mypy find no errors in it, and it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

import hpcstrat as hs
from hpcstrat.optimizers import SGD, Adam, Optimizer
from hpcstrat.optimizers.schedules import CosineDecay, ExponentialDecay

if TYPE_CHECKING:
    from typing_extensions import assert_type

Floats = npt.NDArray[np.float32]
BATCH = 16


class Model:
    """A layer of weights and its optimizer."""

    def __init__(self, strategy: hs.Strategy, optimizer: Optimizer) -> None:
        self.strategy = strategy
        self.optimizer = optimizer
        with strategy.scope():
            self.w = hs.Variable(np.zeros((3, 1), np.float32))
            self.b = hs.Variable([0.0], trainable=False, name="b", aggregation="SUM")
            self.seen = hs.Variable(0, dtype=np.int64, aggregation=hs.VariableAggregation.SUM)
            self.loss = hs.metrics.Mean("loss")

    def step(self, x: Floats, y: Floats) -> float:
        errors: Floats = x @ self.w + self.b - y
        gradient = 2 * x.T @ errors / BATCH
        self.optimizer.apply_gradients([(gradient, self.w)])
        self.optimizer.apply_gradients(zip([errors.sum(axis=0)], [self.b], strict=True))
        self.seen.assign_add(len(x))
        self.loss.update_state(errors**2)
        context = hs.get_replica_context()
        share: float = context.all_reduce("SUM", 1.0) / context.num_replicas_in_sync
        return share * float(self.w.sum())


def trained(optimizer: Optimizer) -> Model:
    strategy = hs.CentralStorageStrategy()
    model = Model(strategy, optimizer)
    x = np.random.default_rng(0).random((40, 3), np.float32)
    data = hs.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True)))
    batches = data.shuffle(40, seed=0).batch(BATCH)
    total = 0.0
    for batch in strategy.experimental_distribute_dataset(batches):
        total = strategy.reduce(hs.ReduceOp.SUM, strategy.run(model.step, args=batch), axis=None)
    assert float(total) == float(strategy.num_replicas_in_sync * model.w.sum())
    return model


def facts(v: hs.Variable) -> tuple[tuple[int, ...], str, int]:
    if TYPE_CHECKING:
        assert_type(v.shape, tuple[int, ...])
        assert_type(hs.Variable(1.0), hs.Variable)
        assert_type(hs.get_strategy(), hs.Strategy)
    return v.shape, v.name, v.size


def test_it_runs() -> None:
    optimizers: list[Optimizer] = [SGD(0.1), SGD(lambda: 0.1), SGD(lambda step: 0.1 / (step + 1))]
    optimizers += [SGD(CosineDecay(0.1, 10), momentum=0.9), Adam(ExponentialDecay(0.1, 10, 0.5))]
    for optimizer in optimizers:
        model = trained(optimizer)
        assert int(model.seen) == 40 and model.loss.result() > 0
        b = model.b
        shown = f"{b.item():.3f}", f"{float(b[0]):.3f}", f"{b.assign(b).numpy()[0]:.3f}"
        assert len(set(shown)) == 1
        assert facts(model.w) == ((3, 1), "Variable", 3)
        assert (model.w.T @ model.w).shape == (1, 1)
