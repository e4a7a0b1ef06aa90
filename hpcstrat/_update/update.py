"""What an update does to this rank's shards of the variables, once the gradients are there."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._communicators.reduction import CHUNK
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard, runs
from hpcstrat._update.chunks import Chunk, Memory, chunk_of, cut_at_variables, local_shards
from hpcstrat._update.rule import Norms, UpdateRule


class InPlace(NamedTuple):
    """A large gradient of this rank, which its update reads where it is.

    Attributes:
        shard: what only this rank reads, and what is therefore not in its message.
        gradient: the whole gradient, flat.
    """

    shard: Shard
    gradient: Array


NONE_IN_PLACE: Mapping[int, InPlace] = MappingProxyType({})


class Backend(abc.ABC):
    """Updates some chunks: by NumPy, by compiled loops, or on a GPU."""

    @abc.abstractmethod
    def bind(self, messages: Sequence[Array], in_place: Mapping[int, InPlace]) -> Any:
        """The chunks with the gradients of one update, for the calls below."""

    @abc.abstractmethod
    def apply(self, rule: UpdateRule, bound: Any, chunks: Interval, op: ReduceOp) -> None:
        """Reduces the gradients of some of the chunks, and applies a rule without norms."""

    @abc.abstractmethod
    def sums(self, norms: Norms, bound: Any, op: ReduceOp) -> Array:
        """Each chunk's sums of squares, of shape `(chunks, norms.size)`; changes nothing."""

    @abc.abstractmethod
    def forget_messages(self) -> None:
        """Drops what it keeps for the next update with the same messages, and so the messages."""


class Update:
    """The update of this rank's shards of some variables.

    Args:
        memory: the memory that they are in.
        shards: for each variable this rank's part, in the order of the message.
        backend: makes the back end for some chunks, given the local shards too.
        count: the most elements of a chunk.
        alignment: see `runs`.

    Attributes:
        local: for large variables, the shard that consists of whole chunks. If each rank updates
            its own elements, no other rank reads this rank's gradient there.
    """

    def __init__(
        self,
        memory: Memory,
        shards: Sequence[Shard],
        backend: Callable[[Sequence[Chunk], Mapping[int, Shard]], Backend],
        count: int = CHUNK,
        alignment: int = 1,
    ) -> None:
        self._memory = memory
        self._shards = shards
        self._make = backend
        self._backends: list[Backend] = []
        self._chunks = [part for run in runs(shards, alignment) for part in run.split(count)]
        self.local: dict[int, Shard] = local_shards(self._chunks, shards)
        self._whole = self._backend_of(self._chunks)
        self._all = Interval(0, len(self._chunks))

    def _backend_of(self, shards: Sequence[Shard]) -> Backend:
        backend = self._make([chunk_of(self._memory, shard) for shard in shards], self.local)
        self._backends.append(backend)
        return backend

    @functools.cached_property
    def _of_variables(self) -> tuple[list[int], Backend]:
        """The variable of each chunk, and the back end, where no chunk has two variables."""
        parts = cut_at_variables(self._chunks, self._shards)
        return [part.variable for part in parts], self._backend_of(parts)

    def in_place(self, gradients: Sequence[Array]) -> Mapping[int, InPlace]:
        """Those of this rank's gradients, by variable, that can be read in place."""
        if not self.local:
            return NONE_IN_PLACE
        return {
            i: InPlace(shard, gradients[i].reshape(-1))
            for i, shard in self.local.items()
            if _is_readable_in_place(gradients[i], shard.dtype)
        }

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: Mapping[int, InPlace] = NONE_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Reduces the messages, and updates the variables and slots.

        Args:
            rule: the update.
            messages: all ranks', or the only one that counts.
            op: how the messages are reduced.
            in_place: this rank's gradients that are not, or not wholly, in its message.
            add_up: adds up an array of float64 over the ranks that have the other shards; `None` if
                this rank has all.
        """
        if rule.norms is None:
            whole = self._whole
            whole.apply(rule, whole.bind(messages, in_place), self._all, op)
        else:
            self._run_with_norms(rule.norms, messages, op, in_place, add_up)

    def _run_with_norms(
        self,
        norms: Norms,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: Mapping[int, InPlace],
        add_up: Callable[[Array], Array] | None,
    ) -> None:
        """Two passes: the norms of all variables, then the update of each variable."""
        variables, backend = self._of_variables
        bound = backend.bind(messages, in_place)
        sums = np.zeros((len(self._shards), norms.size))
        np.add.at(sums, np.array(variables, np.intp), backend.sums(norms, bound, op))
        # A norm needs all elements of a variable, some of them on other ranks, so nothing can be
        # updated before. The gradients are reduced again: a copy would cost as much memory.
        roots = np.sqrt(sums if add_up is None else add_up(sums)).tolist()
        stop = 0
        for variable, of_variable in itertools.groupby(variables):
            start, stop = stop, stop + len(list(of_variable))
            rule = norms.rule_with(roots[variable])
            backend.apply(rule, bound, Interval(start, stop), op)

    def forget_messages(self) -> None:
        """See `Backend.forget_messages`."""
        for backend in self._backends:
            backend.forget_messages()


def _is_readable_in_place(gradient: Array, dtype: np.dtype[Any]) -> bool:
    # A read-only array may be a variable, which other ranks update meanwhile. A strided or cast
    # gradient has to be copied in any case, so it goes through the message.
    flags = gradient.flags
    return bool(flags.c_contiguous and flags.writeable and gradient.dtype == dtype)
