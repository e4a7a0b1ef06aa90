"""Unknown names on optimizers: each message says what there is."""

from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

OPTIMIZERS: Any = hs.optimizers  # for calls that no type checker would accept
ADAM: Any = hs.optimizers.Adam(0.5)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "beta1",
            r"beta1 is not an argument; did you mean beta_1\? It takes learning_rate, .*, name$",
        ),
        ("lr", r"lr is not an argument\. It takes learning_rate, beta_1, .*, name$"),
    ],
)
def test_an_unknown_argument(argument, message):
    with pytest.raises(TypeError, match=f"^Adam: {message}"):
        OPTIMIZERS.Adam(**{argument: 0.5})


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
