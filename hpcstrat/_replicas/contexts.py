"""Which context a line runs in: outside every strategy, in a strategy's cross-replica context, or in a replica."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, final

from hpcstrat._core.call_name import current_call
from hpcstrat._process import output
from hpcstrat._replicas.group import ReplicaGroup, default_group


class Context:
    """Where a line runs within a strategy, of which only the group of replicas is known here.

    Attributes:
        group: the replicas.
        owner: the user's object for the context: the strategy or, in a replica function, the
            `ReplicaContext`.
    """

    __slots__ = ("group", "owner")

    def __init__(self, group: ReplicaGroup, owner: object) -> None:
        self.group: ReplicaGroup = group
        self.owner: object = owner


@final
class InReplica(Context):
    """Inside the function of `Strategy.run`, which runs on every replica."""

    __slots__ = ()


class AcrossReplicas(Context):
    """The script's own level within a strategy, which TensorFlow calls the cross-replica context."""

    __slots__ = ()


@final
class InUpdate(AcrossReplicas):
    """Inside the function of `StrategyExtended.update`, which one rank may run alone: nothing here may communicate.

    Attributes:
        variables: those that may be written.
    """

    __slots__ = ("variables",)

    def __init__(self, group: ReplicaGroup, owner: object, variables: Sequence[object]) -> None:
        super().__init__(group, owner)
        self.variables = variables

    def require_writable(self, variable: object) -> None:
        """Refuses to write any but those variables.

        Raises:
            RuntimeError: it is another one.
        """
        if not any(variable is one for one in self.variables):
            raise RuntimeError(
                f"{current_call()}: this update may write only the variables that were passed to "
                "it, not ON_READ ones together with ones that live once; pass it too, or write it "
                "in an update of its own"
            )


_get_group: Callable[[Any], ReplicaGroup] = operator.attrgetter("_group")

# A context variable, so that threads of the program each have a context, and a thread that it
# starts has none.
current: ContextVar[Context | None] = ContextVar("hpcstrat_context", default=None)
"""The context; None outside of every strategy."""

# Of the process and not of a thread, as in TensorFlow: it stands for every line outside of scopes.
_set_by_user: AcrossReplicas | None = None


def context() -> Context | None:
    """The context of this line, what `experimental_set_strategy` set included."""
    found = current.get()
    return _set_by_user if found is None else found


def group() -> ReplicaGroup:
    """The replicas of this line's strategy; outside of every scope the default strategy's one."""
    found = context()
    return default_group() if found is None else found.group


def set_outside_scopes(context: AcrossReplicas | None) -> None:
    """Sets the context of every line outside of scopes; None is that of the default strategy.

    Raises:
        RuntimeError: called inside a scope or a replica.
    """
    global _set_by_user
    if current.get() is not None:
        raise RuntimeError(
            "experimental_set_strategy was called inside a strategy's scope; call it outside of "
            "all scopes"
        )
    _set_by_user = context


def in_cross_replica_context() -> bool:
    """Whether this line runs in the cross-replica context of a strategy."""
    return isinstance(context(), AcrossReplicas)


def require_cross_replica(group: ReplicaGroup, call: str = "") -> None:
    """Refuses a call that is not made in the cross-replica context of this group, or outside of every scope.

    Args:
        group: the replicas.
        call: the name of the call, where that is not the current one.

    Raises:
        RuntimeError: it is not, or the strategy is closed.
    """
    found = current.get()
    if found is None:
        found = _set_by_user
    # By type and not by `isinstance`: an update's context is a cross-replica one too, but must not
    # communicate.
    is_here = found is None or (type(found) is AcrossReplicas and found.group is group)
    if is_here and not group.lifetime.is_closed:
        group.communicator.require_open(call)
        return
    call = call or current_call()
    if group.lifetime.is_closed:
        raise RuntimeError(f"{call} was called on a strategy that is closed; make another")
    if isinstance(found, InUpdate):
        raise RuntimeError(
            f"{call} was called inside an update, which one rank runs: nothing may communicate "
            "there; call it before or after"
        )
    if isinstance(found, InReplica):
        raise RuntimeError(
            f"{call} was called inside a replica function; call it outside of Strategy.run, or "
            "inside ReplicaContext.merge_call. For a sum over replicas there is "
            "ReplicaContext.all_reduce"
        )
    raise RuntimeError(
        f"{call} was called in the scope of another strategy; leave that scope first"
    )


def check_cross_replica(owner: Any) -> None:
    """`require_cross_replica` of the group that a strategy, or what belongs to one, has.

    For `@collective`.
    """
    require_cross_replica(_get_group(owner))


def check_arguments(fn: Any, args: Any, call: str = "") -> None:
    """Checks what is to be called as `fn(*args)`.

    Raises:
        TypeError: `fn` is not callable, or `args` is not a tuple or list, such as an array, whose
            elements would become arguments.
    """
    if not callable(fn):
        raise TypeError(
            f"{call or current_call()}: fn is {fn!r}; pass the function itself, as in run(fn, "
            "args=(x,)), and not fn(x)"
        )
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"{call or current_call()}: args is of type {type(args).__name__}; it must be a tuple: "
            "args=(x,) for one argument x"
        )


def _shows() -> bool | None:
    """Whether this line's output is a replica's own; None where this thread has no context."""
    found = context()
    if found is None:
        return None
    return isinstance(found, InReplica) and found.group.communicator.size > 1


# Filled in from above: the output lies below the contexts, and must not import them.
output.replica_context = _shows
