"""Options of optimizers, and Lion."""
import numpy as np

from _common import plain, replica


def stepped(hs, strategy, kind, **options):
    """A variable after each of four steps; replica r's gradient is (r + 1) [1, -2] / (step + 1)."""
    with strategy.scope():
        v = hs.Variable(np.array([1, 2], np.float32))
        optimizer = getattr(hs.optimizers, kind)(0.1, **options)
    labels = {}
    for t in range(4):
        gradient = lambda: np.array([1, -2], np.float32) * (replica(hs) + 1) / np.float32(t + 1)
        strategy.run(lambda: (optimizer.apply_gradients([(gradient(), v)]), None)[1])
        labels[f"step {t}"] = plain(hs, v.read_value())
    return labels


def case_optimizer_lion(hs, strategy):
    return {**stepped(hs, strategy, "Lion"), "betas": stepped(hs, strategy, "Lion", beta_1=0.5, beta_2=0.75)}


def case_optimizer_clips(hs, strategy):
    return {f"{kind} {name}": stepped(hs, strategy, kind, **{name: 0.5})
            for kind in ("SGD", "Adam", "Adagrad") for name in ("clipnorm", "clipvalue", "global_clipnorm")}


def case_optimizer_weight_decay(hs, strategy):
    return {kind: stepped(hs, strategy, kind, weight_decay=0.2) for kind in ("SGD", "Adam", "AdamW", "RMSprop", "Lion")}
