"""What a function uses: the globals that it names, and the memory that it can reach."""

from __future__ import annotations

import dis
import functools
import gc
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

from hpcstrat._core import gpu
from hpcstrat._core.user_frames import is_of_program
from hpcstrat._variable.variable import Variable

MOST_OBJECTS = 1_000_000
"""Objects among which a function's arrays are looked for."""
# `co_names` has the names of attributes, too.
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_PLAIN = (bool, int, float, complex, str, type(None), CodeType)


@functools.lru_cache(maxsize=1024)
def globals_in(code: CodeType) -> tuple[str, ...]:
    """The globals that some code reads, and the code of the functions in it."""
    own = [one.argval for one in dis.get_instructions(code) if one.opname in _READS]
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    found = [*own, *[name for one in inner for name in globals_in(one)]]
    return tuple(dict.fromkeys(found))


def _named_in(code: CodeType) -> set[str]:
    """The names of globals and attributes in some code."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names}.union(*map(_named_in, inner))


def memory_behind(objects: list[Any]) -> list[Any]:
    """The objects of CuPy, and variables, that a function and its arguments can reach now.

    A graph has their addresses, and the program may drop them, as where it binds an attribute anew.

    Raises:
        TypeError: they reach too many objects.
    """
    found, seen, left = list[Any](), set[int](), [*objects]
    while left:
        thing = left.pop()
        kind = type(thing)
        if id(thing) in seen or kind in _PLAIN or isinstance(thing, ModuleType):
            continue
        if len(seen) == MOST_OBJECTS:
            raise TypeError(f"it can reach more than {MOST_OBJECTS:,} objects")
        seen.add(id(thing))
        if gpu.is_on_gpu(thing) or isinstance(thing, Variable):
            found.append(thing)
        elif kind is FunctionType:
            left += _behind_function(thing)
        elif isinstance(thing, type):
            module = sys.modules.get(thing.__module__)
            if module is not None and _is_of_program(module):
                left += [*vars(thing).values(), *thing.__bases__]
        elif (library := kind.__module__.partition(".")[0]) not in ("hpcstrat", "numpy"):
            if library == "cupy":  # such as the plan of a transform, which has memory
                found.append(thing)
            left += gc.get_referents(thing)
    return found


def _behind_function(fn: FunctionType) -> list[Any]:
    left = [*gc.get_referents(*(fn.__closure__ or ())), *(fn.__defaults__ or ())]
    left += [*(fn.__kwdefaults__ or {}).values(), *vars(fn).values()]
    # Of modules, also in packages or imported by the function, only what it names.
    names, seen = _named_in(fn.__code__), set[ModuleType]()
    left += map(fn.__globals__.get, names)
    modules = [*left, *map(sys.modules.get, names)]
    while modules:
        module = modules.pop()
        if isinstance(module, ModuleType) and module not in seen and _is_of_program(module):
            seen.add(module)
            inside = [vars(module).get(name) for name in names]
            modules += inside
            left += inside
    return left


def _is_of_program(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return module.__name__ == "__main__" or (path is not None and is_of_program(path))
