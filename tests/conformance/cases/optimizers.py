"""Options of optimizers, and the optimizers that training.py does not have."""
import numpy as np

from _common import plain, replica


def stepped(hs, strategy, kind, steps=4, **options):
    """A variable after each of some steps; replica r's gradient is (r + 1) [1, -2] / (step + 1)."""
    with strategy.scope():
        v = hs.Variable(np.array([1, 2], np.float32))
        optimizer = getattr(hs.optimizers, kind)(0.1, **options)
    labels = {}
    for t in range(steps):
        gradient = lambda: np.array([1, -2], np.float32) * (replica(hs) + 1) / np.float32(t + 1)
        strategy.run(lambda: (optimizer.apply_gradients([(gradient(), v)]), None)[1])
        labels[f"step {t}"] = plain(hs, v.read_value())
    return labels


def case_optimizer_adadelta(hs, strategy):
    return {**stepped(hs, strategy, "Adadelta"),
            "rho": stepped(hs, strategy, "Adadelta", rho=0.5, epsilon=1e-3)}


def case_optimizer_adamax(hs, strategy):
    return {**stepped(hs, strategy, "Adamax"), "betas": stepped(hs, strategy, "Adamax", beta_1=0.5, beta_2=0.9)}


def case_optimizer_nadam(hs, strategy):
    return {**stepped(hs, strategy, "Nadam"), "betas": stepped(hs, strategy, "Nadam", beta_1=0.5, beta_2=0.9)}


def case_optimizer_lion(hs, strategy):
    return {**stepped(hs, strategy, "Lion"), "betas": stepped(hs, strategy, "Lion", beta_1=0.5, beta_2=0.75)}


def case_optimizer_clips(hs, strategy):
    return {f"{kind} {name}": stepped(hs, strategy, kind, **{name: 0.5})
            for kind in ("SGD", "Adam", "Adagrad") for name in ("clipnorm", "clipvalue", "global_clipnorm")}


def case_optimizer_weight_decay(hs, strategy):
    return {kind: stepped(hs, strategy, kind, weight_decay=0.2) for kind in ("SGD", "Adam", "AdamW", "RMSprop", "Lion")}


def case_optimizer_overwrites_by_averages(hs, strategy):
    return {kind: stepped(hs, strategy, kind, 5, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=2)
            for kind in ("SGD", "Adam", "Nadam")}


def case_optimizer_finalizes_averages(hs, strategy):
    with strategy.scope():
        v = hs.Variable(np.array([1, 2], np.float32))
        optimizer = hs.optimizers.SGD(0.1, momentum=0.5, use_ema=True, ema_momentum=0.75)
    for t in range(3):
        gradient = lambda: np.array([1, -2], np.float32) * (replica(hs) + 1) / np.float32(t + 1)
        strategy.run(lambda: (optimizer.apply_gradients([(gradient(), v)]), None)[1])
    labels = {"trained": plain(hs, v.read_value())}
    optimizer.finalize_variable_values([v])
    return {**labels, "averages": plain(hs, v.read_value())}
