"""Names public calls: for messages and signatures, at the program's line.

A public method names itself here once. Messages, signatures and spans of everything that it calls
ask for that name, so no layer in between carries it. It is a context variable because each thread
may be in its own call.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, TypeVar, cast, final

from hpcstrat._core.public_names import ARGUMENTS
from hpcstrat._process import output

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OWN = ("hpcstrat", "tqdm")  # packages whose lines are not the program's
_MOST = 8
"""Items of a list and ranges of a line that are shown; the others are counted."""
# Words with a digit: numbers, checksums, names such as v17. Not the line in train.py:12.
_NUMBERS = re.compile(r"(?<![:\w])\w*\d\w*")

_call: ContextVar[str] = ContextVar("hpcstrat_call", default="hpcstrat")

# The variable's own methods, which are C: every step uses them, and a Python function would cost
# several times as much.
current_call: Callable[[], str] = _call.get
"""The user's name of the running call, such as `Strategy.reduce`."""
enter_call: Callable[[str], Token[str]] = _call.set
"""Names the call that starts. Pass the result to `leave_call`, in a `finally`."""
leave_call: Callable[[Token[str]], None] = _call.reset
"""Ends the call: the name of the call around it counts again."""


# A class, because a generator with `contextmanager` would cost several times as much.
@final
class call_named:
    """A block that runs as a call of this name."""

    __slots__ = ("_name", "_token")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._token = enter_call(self._name)

    def __exit__(self, *_: object) -> None:
        leave_call(self._token)


def names_call(name: str | Callable[..., str]) -> Callable[[_Function], _Function]:
    """Names calls of a function that does not communicate, or whose ranks do not raise together.

    Args:
        name: the user's name of the call, or a function of the call's arguments that returns it.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer = enter_call(name if isinstance(name, str) else name(*args, **kwargs))
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                explain_arguments(error)
                raise
            finally:
                leave_call(outer)

        return cast("_Function", call)

    return decorate


def explain_arguments(error: BaseException) -> None:
    """Adds what to pass, where Python has refused the arguments of the current call.

    Call this in the frame that made the call.
    """
    known = ARGUMENTS.get(current_call())
    if known is not None and isinstance(error, TypeError) and _is_of_this_frame(error):
        text = str(error)
        for part, instead in known.items():
            if part in text:
                error.args = (f"{text}; {instead}",)


def explained(function: Callable[..., Any], given: str) -> Callable[..., Any]:
    """A function of the program's: if it does not take its arguments, a note says what is given."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if refuses_arguments(error, function, args, kwargs):
                output.add_note(error, f"{current_call()}: {given}")
            raise

    return call


def refuses_arguments(
    error: TypeError, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether Python has refused the arguments of `function`, which the caller's frame called."""
    # An error from within may come of a call that fits the signature of a wrapped function only.
    if not _is_of_this_frame(error):
        return False
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return True
    except ValueError:  # a function in C, without a signature
        pass
    return False


def _is_of_this_frame(error: TypeError) -> bool:
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def constructor_signature(cls: type) -> inspect.Signature:
    """A class's arguments, for `inspect`, which would find those of its metaclass's `__call__`."""
    _, *arguments = inspect.signature(cls.__init__).parameters.values()
    return inspect.Signature(arguments)


# ---- warnings


def warn_together(message: str, category: type[Warning], is_lead: bool) -> None:
    """Warns on the lead, at the line of the program.

    If a filter makes it an error, all ranks that call this raise.

    Raises:
        Warning: `category`, if a filter makes it an error.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _module(frame.f_globals).partition(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    if is_lead:
        warnings.warn(message, category, stacklevel=level)
    elif _is_error(message, category, _module(frame.f_globals), frame.f_lineno):
        # The other ranks stay silent, since one warning is enough, but must raise if the lead does.
        raise category(message)


def _module(names: dict[str, object]) -> str:
    return str(names.get("__name__", ""))


def _is_error(message: str, category: type[Warning], module: str, line: int) -> bool:
    """Whether the filters make a warning an error; a trial would change which others show."""
    for action, text, kind, of_module, of_line in warnings.filters:
        if (
            (text is None or text.match(message))
            and issubclass(category, kind)
            and (of_module is None or of_module.match(module))
            and of_line in (0, line)
        ):
            return action == "error"
    return False


# ---- ranks in words, for however many there are


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-255, 257-511` or `ranks 0, 2, 5` of one rank or more."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges_in_words(ranks)}"


def ranges_in_words(numbers: Iterable[int]) -> str:
    """`0-3, 6` of 0, 1, 2, 3 and 6. Of many ranges the first, and how many numbers more."""
    ranges: list[list[int]] = []
    for _, group in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in group]
        ranges += [found] if len(found) > 2 else [[number] for number in found]
    shown = [f"{a}-{more[-1]}" if more else str(a) for a, *more in ranges[:_MOST]]
    left_out = sum(map(len, ranges[_MOST:]))
    return ", ".join(shown) + (f" and {left_out} more" if left_out else "")


def list_by_rank(said: Iterable[tuple[int, str]], form: str = "{ranks}: {text}") -> list[str]:
    """One item for the ranks that say the same, in the order of the first of them.

    If very many differ, one of each kind comes before others of it, and a last item counts those
    that are left out; kinds differ in more than numbers. So the one rank that makes another call
    is not lost among hundreds that make the same call with numbers of their own.

    Args:
        said: ranks in ascending order, and what each says; one that says nothing is left out.
        form: how an item looks.
    """
    groups: dict[str, list[int]] = {}
    for rank, text in said:
        if text:
            groups.setdefault(text, []).append(rank)
    if len(groups) > _MOST:
        kinds = {_NUMBERS.sub("", text): text for text in reversed(groups)}
        shown = set(list(dict.fromkeys([*reversed(kinds.values()), *groups]))[:_MOST])
        others = [rank for text, ranks in groups.items() if text not in shown for rank in ranks]
        left_out = f"{len(groups) - _MOST} more"
        groups = {text: ranks for text, ranks in groups.items() if text in shown}
        groups[left_out] = others
    return [form.format(ranks=ranks_in_words(ranks), text=text) for text, ranks in groups.items()]


def join_by_rank(said: Iterable[tuple[int, str]]) -> str:
    """The same in a sentence: `(3,) on ranks 0-2; (4,) on rank 3`."""
    return "; ".join(list_by_rank(said, "{text} on {ranks}"))
