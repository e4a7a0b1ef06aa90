"""The public names of the library: what a program can write."""

import inspect
import re

import hpcstrat as hs

PUBLIC_MODULES = [
    *(hs, hs.data, hs.optimizers, hs.optimizers.schedules, hs.metrics, hs.checkpoint, hs.losses, hs.compat.v1),
    hs.cluster_resolver,
]


def public_names():
    """(name, object) of all public functions, classes and methods."""
    found = {}
    for module in PUBLIC_MODULES:
        for name, thing in vars(module).items():
            if name.startswith("_") or not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            if not thing.__module__.startswith("hpcstrat"):
                continue
            found[f"{module.__name__}.{name}"] = thing
            if inspect.isclass(thing):
                for method in dir(thing):
                    inner = inspect.getattr_static(thing, method)
                    inner = getattr(inner, "__func__", inner)
                    is_ours = str(getattr(inner, "__module__", "")).startswith("hpcstrat") or isinstance(
                        inner, property
                    )
                    if not method.startswith("_") and is_ours:
                        found[f"{module.__name__}.{name}.{method}"] = inner
    return found


_MODULES = "|".join(sorted((module.__name__ for module in PUBLIC_MODULES), key=len, reverse=True))
_CALLS = {re.sub(rf"^({_MODULES})\.", "", name) for name in public_names()}


def begins_with_a_call(text):
    """Whether a message begins with a public name: `Strategy.reduce: `, `barrier: `, `Variable 'w' `."""
    name, colon = re.findall(r"^([\w.]*)(:?)", text)[0]
    is_a_word = re.fullmatch("[a-z]*", name) is not None  # `rank` and `agree` begin other sentences as well
    return name in _CALLS and (colon == ":" or not is_a_word)
