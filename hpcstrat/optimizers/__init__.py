"""Optimizers: they sum the replicas' gradients and update the variables once."""

from typing import TYPE_CHECKING

from hpcstrat._core.public_names import getattr_of as _getattr_of
from hpcstrat.optimizers._adagrad import Adagrad as Adagrad
from hpcstrat.optimizers._adam import Adam as Adam
from hpcstrat.optimizers._adam import AdamW as AdamW
from hpcstrat.optimizers._lion import Lion as Lion
from hpcstrat.optimizers._optimizer import Optimizer as Optimizer
from hpcstrat.optimizers._rmsprop import RMSprop as RMSprop
from hpcstrat.optimizers._sgd import SGD as SGD

if TYPE_CHECKING:
    from hpcstrat.optimizers import schedules as schedules
else:
    __getattr__ = _getattr_of(__name__, ["schedules"])  # 4 of 90 ms of the import

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lion",
    "Optimizer",
    "RMSprop",
    "schedules",
]


def __dir__() -> list[str]:
    return __all__  # `schedules` too, before it is there
