"""The public names of the library."""

import importlib
import inspect
import pkgutil
import re

import hpcstrat as hs

# Programs import from these, not from the files of a package such as hpcstrat.data.options.
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
    """Whether a message starts with a public name: `Strategy.reduce: `, `barrier: `."""
    name, colon = re.findall(r"^([\w.]*)(:?)", text)[0]
    # `rank` and `function` start other sentences too.
    is_a_word = re.fullmatch("[a-z]*", name) is not None
    return name in _CALLS and (colon == ":" or not is_a_word)
