"""Who has a hand in making a variable."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

creators: ContextVar[tuple[Callable[..., Any], ...]] = ContextVar("hpcstrat_variable_creators", default=())
"""Those of every scope that this line is in, from the outside in."""


@contextmanager
def variable_creator_scope(variable_creator: Callable[..., Any]) -> Iterator[None]:
    """Inside, every variable is made by `variable_creator(next_creator, **kwargs)`.

    `next_creator(**kwargs)` makes it; the innermost scope is asked first. `kwargs` are the arguments of `Variable`.
    """
    token = creators.set((*creators.get(), variable_creator))
    try:
        yield
    finally:
        creators.reset(token)


class VariableType(type):
    """Lets the creators of `variable_creator_scope` have a hand in `Variable(...)`."""

    if not TYPE_CHECKING:  # to which a variable is made by its `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            make, asked = super().__call__, creators.get()
            if not asked:
                return make(*args, **kwargs)
            given = cls.__signature__.bind(*args, **kwargs)
            given.apply_defaults()
            for creator in asked:
                make = functools.partial(creator, make)
            return make(**given.arguments)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of the class, for `inspect`, which would find those of `__call__`."""
        _, *arguments = inspect.signature(cls.__init__).parameters.values()
        return inspect.Signature(arguments)
