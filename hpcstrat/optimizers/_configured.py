"""What an optimizer is set to: its learning rate, and its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcstrat._variable.variable import Variable
from hpcstrat.optimizers import _options
from hpcstrat.optimizers._options import LearningRate

if TYPE_CHECKING:
    from typing_extensions import Self


class Configured:
    """The part of `Optimizer` that has its learning rate and its config."""

    def __init__(self, learning_rate: LearningRate) -> None:
        self.learning_rate = learning_rate

    @property
    def learning_rate(self) -> Any:
        """The learning rate as you set it: a number, a variable or a callable.

        Examples:
            >>> w = hs.Variable(np.zeros(1))
            >>> optimizer = hs.optimizers.SGD(lambda step: 1 / (1 + step))
            >>> for _ in range(2):  # 1 and 1/2
            ...     optimizer.apply_gradients([(np.ones(1), w)])
            >>> optimizer.learning_rate = hs.Variable(0.25)  # from the next step on
            >>> optimizer.apply_gradients([(np.ones(1), w)])
            >>> w.numpy()
            array([-1.75])
        """
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        self._rate_after = _options.rate_function(type(self).__name__, value)
        may_change = callable(value) or isinstance(value, Variable)
        self._constant_rate: float | None = None if may_change else self._rate_after(0)
        self._learning_rate = value

    @property
    def lr(self) -> Any:
        """`learning_rate`, by its name in Keras 2.

        Examples:
            >>> hs.optimizers.SGD(0.5).lr
            0.5
        """
        return self.learning_rate

    @lr.setter
    def lr(self, value: LearningRate) -> None:
        self.learning_rate = value

    def get_config(self) -> dict[str, Any]:
        """The arguments for `from_config`, as JSON can hold them; without steps and slots.

        Raises:
            ValueError: it has `steps`, or a learning rate that is a function of the program.

        Examples:
            >>> hs.optimizers.Lion(0.5, clipnorm=1.0).get_config()
            {'name': 'Lion', 'learning_rate': 0.5, 'beta_1': 0.9, 'beta_2': 0.99, 'clipnorm': 1.0}
        """
        return _options.config_of(self)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """A new optimizer from what `get_config` returned; `custom_objects`: schedules by name.

        Examples:
            >>> rate = hs.optimizers.schedules.CosineDecay(0.5, decay_steps=100)
            >>> config = hs.optimizers.SGD(rate, weight_decay=0.1).get_config()
            >>> copy = hs.optimizers.SGD.from_config(config)
            >>> copy.weight_decay, copy.learning_rate == rate, copy.iterations
            (0.1, True, 0)
        """
        return cls(**_options.arguments_in(cls.__name__, config, custom_objects))
