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


def case_optimizer_ftrl(hs, strategy):
    strengths = {"l1_regularization_strength": 0.05, "l2_regularization_strength": 0.1, "l2_shrinkage_regularization_strength": 0.02}
    return {**stepped(hs, strategy, "Ftrl"),
            "all": stepped(hs, strategy, "Ftrl", beta=0.3, initial_accumulator_value=0.5, **strengths),
            "no power": stepped(hs, strategy, "Ftrl", learning_rate_power=0, l1_regularization_strength=0.1),
            "power of 1": stepped(hs, strategy, "Ftrl", learning_rate_power=-1, beta=0.5),
            "clipped": stepped(hs, strategy, "Ftrl", weight_decay=0.1, clipnorm=0.5),
            "averages": stepped(hs, strategy, "Ftrl", 5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)}


def case_optimizer_ftrl_of_rows(hs, strategy):
    """Rows that no replica names change in TensorFlow; here every replica names both, one of them twice."""
    with strategy.scope():
        v = hs.Variable(np.array([[1, 2], [-0.5, 0.25]], np.float32))
        optimizer = hs.optimizers.Ftrl(0.1, l1_regularization_strength=0.05, beta=0.3)
    labels = {}
    for t in range(4):
        def step():
            values = np.array([[1, -2], [0.5, 0.125], [0.25, 1]], np.float32) * (replica(hs) + 1) / np.float32(t + 1)
            optimizer.apply_gradients([(hs.IndexedSlices(values, np.array([1, 0, 1]), (2, 2)), v)])
        strategy.run(step)
        labels[f"step {t}"] = plain(hs, v.read_value())
    return labels


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
