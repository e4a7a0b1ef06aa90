"""Learning rates by the number of steps done, named as in `tf.keras.optimizers.schedules`."""

from hpcstrat._core.public import set_module as _set_module
from hpcstrat.optimizers.schedules._schedules import CosineDecay as CosineDecay
from hpcstrat.optimizers.schedules._schedules import ExponentialDecay as ExponentialDecay
from hpcstrat.optimizers.schedules._schedules import InverseTimeDecay as InverseTimeDecay
from hpcstrat.optimizers.schedules._schedules import (
    PiecewiseConstantDecay as PiecewiseConstantDecay,
)
from hpcstrat.optimizers.schedules._schedules import PolynomialDecay as PolynomialDecay

_set_module(globals())
