"""What an update does to this rank's shards of the variables, once the gradients are there.

It goes through *runs*, which are contiguous in memory and message: large shards, or several small
ones. In central storage on a host, for example, each rank has an equal share of all elements,
although one variable may be larger than all others together:

    variables  |     w      |b |        v         |c|d|   u    |
    ranks      |    rank 0     |    rank 1     |    rank 2     |
    runs       |------------|--|---------------|------|--------|

Small shards that follow each other, such as the end of v, c and d, are one run: they cost no calls
of their own. This is right because updates are elementwise. If the norm of each gradient is
clipped, each variable is a run, with a scale of its own.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from hpcstrat._core.types import Array
from hpcstrat._memory.intervals import ElementRange
from hpcstrat._memory.shards import Shard, runs
from hpcstrat._update.rule import UpdateRule

T = TypeVar("T")


class GradientInPlace(NamedTuple):
    """A gradient that this rank reads where it is.

    Attributes:
        elements: those that it reads, which are therefore not in its message.
        gradient: the whole gradient, flat.
    """

    elements: ElementRange
    gradient: Array


InPlace: TypeAlias = Mapping[int, GradientInPlace]
"""Such gradients by variable."""
NOTHING_IN_PLACE: InPlace = MappingProxyType({})


class Run(NamedTuple):
    """A run of elements in storage.

    Attributes:
        shard: which elements they are.
        value: those of the variables.
        slots: those of each slot.
    """

    shard: Shard
    value: Array
    slots: tuple[Array, ...]


def runs_in_memory(
    part_of_memory: Callable[[int, int], Array],
    shards: Sequence[Shard],
    alone: int = sys.maxsize,
    alignment: int = 1,
) -> list[Run]:
    """The runs of some shards.

    Args:
        part_of_memory: returns the bytes between two addresses as a flat array.
        shards: in the order of the message.
        alone: see `shards.runs`.
        alignment: likewise.
    """
    found = []
    for run in runs(shards, alignment, alone):
        value, *slots = [part_of_memory(*place).view(run.dtype) for place in run.memory]
        found.append(Run(run, value, tuple(slots)))
    return found


def gradients_of(
    shards: Sequence[Shard],
    messages: Sequence[Array],
    rank: int = 0,
    in_place: InPlace = NOTHING_IN_PLACE,
) -> list[list[Array]]:
    """For each shard, or run, its gradient in each message, of which `rank` is this rank's."""
    found = [[m[shard.message.slice].view(shard.dtype) for m in messages] for shard in shards]
    for shard, of_shard in zip(shards, found, strict=True) if in_place else ():
        # Only large shards are read in place, and these are runs of their own.
        if shard.variable in in_place:
            of_shard[rank] = in_place[shard.variable].gradient[shard.elements.slice]
    return found


class KeptByMessage(Generic[T]):
    """What is made once for each message. An update's messages are mostly the same few arrays.

    Args:
        make: makes it from all ranks' messages, and from gradients in place if there are any.
    """

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._kept: dict[tuple[int, int], tuple[Sequence[Array], T]] = {}

    def of(self, messages: Sequence[Array], in_place: InPlace = NOTHING_IN_PLACE) -> T:
        """What was made from these; the first one stands for all.

        What depends on gradients that are read `in_place` is not kept.
        """
        if in_place:
            return self._make(messages, in_place)
        # By id, because arrays have no hash; messages are kept, so that no other gets their ids.
        key = id(messages[0]), len(messages)
        if key not in self._kept:
            if len(self._kept) == 3:  # two records that alternate or a mailbox, and buffers
                self.clear()
            self._kept[key] = messages, self._make(messages)
        return self._kept[key][1]

    def clear(self) -> None:
        """Drops all, and so the messages."""
        self._kept.clear()


class Update(abc.ABC):
    """The update of this rank's shards of some variables."""

    @abc.abstractmethod
    def forget_messages(self) -> None:
        """Drops what it keeps for the next update with the same messages, and so the messages."""

    def prepare(self, rule: UpdateRule) -> None:
        """Checks that `run` can apply a rule, and compiles what it needs; here there is nothing.

        It changes no variable. What fails here would leave some updated and others not.

        Args:
            rule: the first with its kernel and its kind of clipping.

        Raises:
            TypeError: it cannot, because of a dtype.
        """
        return

    @abc.abstractmethod
    def run(self, rule: UpdateRule, messages: Sequence[Array]) -> None:
        """Sums the messages, and updates the variables and slots.

        Args:
            rule: the update.
            messages: all ranks', or the only one that counts.
        """
