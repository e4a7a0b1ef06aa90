"""The public names of the library: what a program can write."""

import inspect

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
