"""Optimizers: they sum the replicas' gradients and update the variables once."""

from hpcstrat._storage.rule import UpdateRule as UpdateRule
from hpcstrat.optimizers import schedules as schedules
from hpcstrat.optimizers.adagrad import Adagrad as Adagrad
from hpcstrat.optimizers.adam import Adam as Adam
from hpcstrat.optimizers.adam import AdamW as AdamW
from hpcstrat.optimizers.base import Optimizer as Optimizer
from hpcstrat.optimizers.rmsprop import RMSprop as RMSprop
from hpcstrat.optimizers.sgd import SGD as SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Optimizer", "RMSprop", "UpdateRule", "schedules"]
