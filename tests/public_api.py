"""The public names of the library: what a program can write."""

import importlib
import inspect
import pkgutil
import re

import hpcstrat as hs

# What a program imports from; the files of a package, such as hpcstrat.data.options, are not.
PUBLIC_MODULES = [
    importlib.import_module(name)
    for name in (
        "hpcstrat",
        *(
            name
            for _, name, _ in pkgutil.iter_modules(hs.__path__, "hpcstrat.")
            if "._" not in name
        ),
        *("hpcstrat.compat.v1", "hpcstrat.optimizers.schedules"),
    )
]


def public_names(with_methods=True):
    """(name, object) of all public functions, classes and methods."""
    found = {}
    for module in PUBLIC_MODULES:
        for name, thing in vars(module).items():
            if name.startswith("_") or not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            if not thing.__module__.startswith("hpcstrat"):
                continue
            found[f"{module.__name__}.{name}"] = thing
            if inspect.isclass(thing) and with_methods:
                for method in dir(thing):
                    inner = inspect.getattr_static(thing, method)
                    inner = getattr(inner, "__func__", inner)
                    is_ours = str(getattr(inner, "__module__", "")).startswith(
                        "hpcstrat"
                    ) or isinstance(inner, property)
                    if not method.startswith("_") and is_ours:
                        found[f"{module.__name__}.{name}.{method}"] = inner
    return found


_MODULES = "|".join(sorted((module.__name__ for module in PUBLIC_MODULES), key=len, reverse=True))
_CALLS = {re.sub(rf"^({_MODULES})\.", "", name) for name in public_names()}


def begins_with_a_call(text):
    """Whether a message begins with a public name: `Strategy.reduce: `, `barrier: `, `Variable 'w' `."""
    name, colon = re.findall(r"^([\w.]*)(:?)", text)[0]
    is_a_word = (
        re.fullmatch("[a-z]*", name) is not None
    )  # `rank` and `agree` begin other sentences as well
    return name in _CALLS and (colon == ":" or not is_a_word)
