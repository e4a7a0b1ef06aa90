"""Optimizers: they sum the replicas' gradients and update the variables once."""

from hpcstrat._storage.rule import UpdateRule as UpdateRule
from hpcstrat.optimizers import schedules as schedules
from hpcstrat.optimizers._buffers import GradientBuffers as GradientBuffers
from hpcstrat.optimizers._options import CommonOptions as CommonOptions
from hpcstrat.optimizers._options import OptimizerOptions as OptimizerOptions
from hpcstrat.optimizers.adadelta import Adadelta as Adadelta
from hpcstrat.optimizers.adagrad import Adagrad as Adagrad
from hpcstrat.optimizers.adam import Adam as Adam
from hpcstrat.optimizers.adam import Adamax as Adamax
from hpcstrat.optimizers.adam import AdamW as AdamW
from hpcstrat.optimizers.adam import Nadam as Nadam
from hpcstrat.optimizers.base import Optimizer as Optimizer
from hpcstrat.optimizers.lion import Lion as Lion
from hpcstrat.optimizers.rmsprop import RMSprop as RMSprop
from hpcstrat.optimizers.sgd import SGD as SGD

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CommonOptions",
    "GradientBuffers",
    "Lion",
    "Nadam",
    "Optimizer",
    "OptimizerOptions",
    "RMSprop",
    "UpdateRule",
    "schedules",
]
