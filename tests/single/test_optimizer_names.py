"""Names of Keras, PyTorch and optax on optimizers: each message says what to write instead."""

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

OPTIMIZERS: Any = hs.optimizers  # for calls that no type checker would accept
ADAM: Any = hs.optimizers.Adam(0.5)
CHECKPOINT = r"hs\.checkpoint\.Checkpoint\(optimizer=optimizer\) saves and restores what it keeps"

ARGUMENTS = {
    "lr": (lambda: OPTIMIZERS.Adam(lr=0.1), "lr is not an argument: write learning_rate$"),
    "lr behind params": (
        lambda: OPTIMIZERS.Adam([1.0], lr=0.1),
        "lr is not an argument: write learning_rate$",
    ),
    "params and lr": (
        lambda: OPTIMIZERS.Adam(params=[], lr=0.1),
        "write learning_rate; params is not an argument: apply_gradients.* takes the variables$",
    ),
    "betas": (lambda: OPTIMIZERS.Adam(betas=(0.9, 0.99)), "betas .*: write beta_1 and beta_2$"),
    "eps": (lambda: OPTIMIZERS.Adam(eps=1e-8), "eps is not an argument: write epsilon$"),
    "decay": (lambda: OPTIMIZERS.Adam(decay=0.1), "decay .*: pass a schedule as learning_rate"),
    "maximize": (lambda: OPTIMIZERS.Adam(maximize=True), "pass the negative gradients$"),
    "amsgrad": (lambda: OPTIMIZERS.Adam(amsgrad=True), "write your own Optimizer"),
    "jit_compile": (lambda: OPTIMIZERS.Adam(jit_compile=True), "leave it out"),
    "misspelt": (
        lambda: OPTIMIZERS.Adam(beta1=0.5),
        r"beta1 is not an argument; did you mean beta_1\? It takes learning_rate, beta_1, .*, name$",
    ),
}
ATTRIBUTES = {
    "step": r"apply_gradients\(zip\(gradients, variables\)\) is one step",
    "update": r"apply_gradients\(zip\(gradients, variables\)\) is one step",
    "zero_grad": "each apply_gradients takes new gradients",
    "param_groups": "learning_rate is an attribute; make one optimizer for each group",
    "state_dict": rf"{CHECKPOINT}, and get_config\(\) returns its arguments",
    "load_state_dict": CHECKPOINT,
    "get_weights": rf"write \[v\.numpy\(\) for v in optimizer\.variables\]; {CHECKPOINT}",
    "weights": "optimizer.variables lists what it keeps",
    "get_slot": "optimizer.variables lists the slots, with names such as Adam/m/w",
    "set_weights": CHECKPOINT,
    "compute_gradients": r"minimize\(loss, variables\) takes a function that returns",
    "aggregate_gradients": r"hs\.get_replica_context\(\)\.all_reduce\('SUM', gradients\)",
    "build": "the first step makes the slots",
    "exclude_from_weight_decay": "make a second optimizer without weight_decay",
    "add_variable": "the property `slots` of your own Optimizer",
    "add_variable_from_reference": "the property `slots` of your own Optimizer",
    "update_step": "the `formula` of your own Optimizer",
}
MODULE = {
    "Adafactor": "its second moments are means over rows and columns, .*; use Adam, or the step",
    "legacy": "hs.optimizers itself has the optimizers",
    "experimental": "hs.optimizers itself has the optimizers",
    "get": r"write the class, such as hs\.optimizers\.Adam\(\)",
    "serialize": r"optimizer\.get_config\(\) returns",
    "deserialize": r"hs\.optimizers\.Adam\.from_config\(config\) makes",
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_of_another_library(case):
    make, message = ARGUMENTS[case]
    with pytest.raises(TypeError, match=f"^Adam: .*{message}"):
        make()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_another_library(name):
    with pytest.raises(
        AttributeError, match=rf"^Adam\.{name} does not exist: .*{ATTRIBUTES[name]}"
    ):
        getattr(ADAM, name)
    assert not hasattr(ADAM, name)


@pytest.mark.parametrize("name", MODULE)
def test_a_name_of_tensorflows_module(name):
    with pytest.raises(
        AttributeError, match=rf"^hpcstrat\.optimizers\.{name} does not exist: .*{MODULE[name]}"
    ):
        getattr(OPTIMIZERS, name)


def test_names_that_nothing_has():
    with pytest.raises(AttributeError, match=r"^'Adam' object has no attribute 'momentm'$"):
        ADAM.momentm  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"^module 'hpcstrat\.optimizers' has no attribute 'Adm'"
    ):
        OPTIMIZERS.Adm  # noqa: B018


def test_an_error_in_a_property_is_shown():
    class Broken(hs.optimizers.Optimizer):
        @property
        def slots(self):
            return {"m": self.initial}  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(AttributeError, match="^'Broken' object has no attribute 'initial'$"):
        Broken(0.1).slots  # noqa: B018


def test_another_name_of_an_operation_changes_nothing():
    v = hs.Variable(np.ones(2))
    hs.optimizers.SGD(0.5).apply_gradients([(np.ones(2), v)], "step")
    hs.optimizers.SGD(0.5).apply_gradients([(np.ones(2), v)], name="step")
    assert v.numpy().tolist() == [0.0, 0.0]
