"""Optimizers: they sum the replicas' gradients and update the variables once."""

from typing import TYPE_CHECKING

from hpcstrat._core.public_names import getattr_of as _getattr_of
from hpcstrat._update.rule import UpdateRule as UpdateRule
from hpcstrat.optimizers._momentum import SGD as SGD
from hpcstrat.optimizers._momentum import Adam as Adam
from hpcstrat.optimizers._momentum import Adamax as Adamax
from hpcstrat.optimizers._momentum import AdamW as AdamW
from hpcstrat.optimizers._momentum import Lion as Lion
from hpcstrat.optimizers._momentum import Nadam as Nadam
from hpcstrat.optimizers._optimizer import Optimizer as Optimizer
from hpcstrat.optimizers._options import CommonOptions as CommonOptions
from hpcstrat.optimizers._options import OptimizerOptions as OptimizerOptions
from hpcstrat.optimizers._squares import Adadelta as Adadelta
from hpcstrat.optimizers._squares import Adagrad as Adagrad
from hpcstrat.optimizers._squares import Ftrl as Ftrl
from hpcstrat.optimizers._squares import RMSprop as RMSprop
from hpcstrat.optimizers._state import GradientBuffers as GradientBuffers
from hpcstrat.optimizers._steps import UpdateStep as UpdateStep

if TYPE_CHECKING:
    from hpcstrat.optimizers import schedules as schedules
else:
    __getattr__ = _getattr_of(__name__, ["schedules"])  # 4 of 90 ms of the import

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CommonOptions",
    "Ftrl",
    "GradientBuffers",
    "Lion",
    "Nadam",
    "Optimizer",
    "OptimizerOptions",
    "RMSprop",
    "UpdateRule",
    "UpdateStep",
    "schedules",
]


def __dir__() -> list[str]:
    return __all__  # `schedules` too, before it is there
