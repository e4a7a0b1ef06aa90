"""Iterators over datasets, plain and distributed.

If user code is part of a distributed pipeline, the ranks compare every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat._core import nests
from hpcstrat._core.call_name import names_call, warn_together
from hpcstrat._core.span import INPUT, span
from hpcstrat._core.types import PerReplicaSpec, ReplicaMismatchError
from hpcstrat._core.values import PerReplica
from hpcstrat._process import settings
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import Workers
from hpcstrat.data import _elements
from hpcstrat.data._checksum import PipelineChecksum
from hpcstrat.data._epoch import EpochPass
from hpcstrat.data._node import INFINITE, UNKNOWN, Node
from hpcstrat.data._pass import InputCommunicator, ResumableIterator, after, prefetch
from hpcstrat.data._splitting import Prefetcher, Step, assign_elements

_END = Step(None, None)


@final
class DatasetIterator(ResumableIterator):
    """One iteration over a `Dataset`."""

    def __init__(self, node: Node, epoch: EpochPass, taken: int) -> None:
        super().__init__(node)
        self._start(epoch, taken)

    def _start(self, epoch: EpochPass, taken: int) -> None:
        self._epoch, self._taken = epoch, taken
        self._elements = prefetch(after(self._node, taken).elements(epoch), self._node, epoch)

    def _end(self) -> None:
        self._elements, self._taken = iter(()), None

    @property
    def element_spec(self) -> Any:
        """As `Dataset.element_spec`."""
        return self._node.spec()

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        """The next element: a nest of NumPy arrays and scalars.

        Raises:
            StopIteration: the pass is over.
            Exception: whatever a function of the pipeline raised. The next call returns the next
                element; if `batch` follows the function, the next batch.
        """
        try:
            return next(self._elements)
        except StopIteration:
            self._end()
            raise
        finally:
            # A failed element counts too: a program that resumes after it must not meet it again.
            if self._taken is not None:
                self._taken += 1


@dataclass(eq=False)
class Distribution:
    """How a dataset is split between replicas; a distributed dataset shares it with its iterators.

    Attributes:
        node: the last node of the pipeline.
        communicator: the replicas.
        split: a function that returns one replica's steps of a pipeline.
        call: the public name of the method that distributed the dataset.
        prefetcher: moves the arrays of steps, perhaps ahead of their use; `None` for no moves.
        workers: the workers, each with its own pipeline.
        has_warned: whether the warning that some replicas had no elements was issued.
    """

    node: Node
    communicator: InputCommunicator
    split: Callable[[Node, EpochPass, int, int], Iterator[Step]]
    call: str
    prefetcher: Prefetcher | None
    workers: Workers
    has_warned: bool = False

    def element_spec(self) -> Any:
        """See `DistributedDataset.element_spec`."""
        spec = self.node.spec()
        size = self.communicator.size
        if size == 1:
            return spec
        steps = self.node.cardinality()
        whole = self.split is assign_elements and self.workers.count == 1
        whole = whole and (steps == INFINITE or (steps >= 0 and steps % size == 0))

        def component(leaf: Any) -> PerReplicaSpec:
            if not leaf.shape or whole:
                return PerReplicaSpec(leaf.shape, leaf.dtype)
            rows = leaf.shape[0]
            if self.split is assign_elements or rows is None or rows % size:
                return PerReplicaSpec((None, *leaf.shape[1:]), leaf.dtype)
            return PerReplicaSpec((rows // size, *leaf.shape[1:]), leaf.dtype)

        return nests.map_leaves(component, spec)

    def cardinality(self) -> int:
        """See `DistributedDataset.cardinality`."""
        count, size = self.node.cardinality(), self.communicator.size
        if self.workers.count > 1:
            return UNKNOWN
        if self.split is not assign_elements or size == 1 or count < 0:
            return count
        steps, rest = divmod(count, size)
        return steps + (rest > 0 and all(leaf.shape for leaf in nests.flatten(self.node.spec())[0]))


@final
class DistributedIterator(ResumableIterator):
    """One iteration over a `DistributedDataset`."""

    def __init__(self, distribution: Distribution, epoch: EpochPass, taken: int) -> None:
        super().__init__(distribution.node)
        self._call = f"iterating over {distribution.call}"
        self._communicator = distribution.communicator
        self._rank, self._size = distribution.communicator.rank, distribution.communicator.size
        self._distribution = distribution
        self._assigns = distribution.split is assign_elements
        self._start(epoch, taken)

    def _start(self, epoch: EpochPass, taken: int) -> None:
        distribution, communicator = self._distribution, self._communicator
        # Without user code, all ranks of a worker walk the same keys and need no exchange. Several
        # workers have separate pipelines, which may end at different steps.
        self._compares = communicator.size > 1 and (
            self._node.user_code or distribution.workers.count > 1
        )
        epoch.checksum = PipelineChecksum(self._compares, every=settings.is_on("HPCSTRAT_CHECK"))
        peers = distribution.workers.peers
        steps = distribution.split(
            after(self._node, taken), epoch, peers.index(communicator.rank), len(peers)
        )
        prefetcher = distribution.prefetcher
        self._steps = (
            prefetch(steps, self._node, epoch) if prefetcher is None else prefetcher(steps)
        )
        self._number = 0
        self._epoch, self._taken = epoch, taken

    @property
    def element_spec(self) -> Any:
        """As `DistributedDataset.element_spec`."""
        return self._distribution.element_spec()

    def __iter__(self) -> DistributedIterator:
        return self

    @span(INPUT, "next batch")
    def __next__(self) -> Any:
        """The next step: a nest of `PerReplica`, or of arrays if there is one replica.

        Collective. It communicates only if user code is part of the pipeline.

        Raises:
            ValueError: called inside a replica function.
            ReplicaMismatchError: the ranks' pipelines have different elements, or different numbers
                of them.
            Exception: whatever a function of the pipeline raised on any rank. The next call returns
                the next step.
        """
        if type(contexts.current.get()) is InReplica:
            raise ValueError(
                f"{self._call}: next was called inside a replica function, but a step is for all "
                "replicas; call it outside, and pass the result: strategy.run(fn, "
                "args=(next(iterator),))"
            )
        step = self._compare_step() if self._compares else next(self._steps, _END)
        total, value, _, error, is_scarce = step
        if total is None and error is None:
            self._end()
            raise StopIteration
        assert self._taken is not None
        # Positions count elements of the pipeline: one per step, or as many as the replicas got.
        self._taken += (total or 0) if self._assigns else 1
        if error is not None:
            try:
                raise error
            finally:
                del step, value, error  # the traceback keeps this frame alive, and thus the batch
        if is_scarce and not self._distribution.has_warned:
            self._warn(total)
        rank, size = self._rank, self._size
        if size == 1:
            return value
        # The most common nests need no flattening: an array, and a tuple of arrays.
        if type(value) is np.ndarray:
            return PerReplica(value, rank, size)
        if type(value) is tuple:
            parts = []
            for array in value:
                if type(array) is not np.ndarray:
                    break
                parts.append(PerReplica(array, rank, size))
            else:
                return tuple(parts)
        leaves, structure = nests.flatten(value)
        return structure.unflatten([PerReplica(leaf, rank, size) for leaf in leaves])

    def _end(self) -> None:
        """Ends the pass and releases the pipeline, at the same step on all ranks."""
        self._steps, self._compares, self._taken = iter(()), False, None

    @names_call(lambda self: self._call)
    def _compare_step(self) -> Step:
        """The next step, after all ranks have checked that theirs are the same. Collective."""
        try:
            with self._communicator.raise_together():
                step = next(self._steps, _END)
                # One exchange covers everything that can differ. Without it, a rank whose generator
                # ends early would leave the other ranks waiting in a collective of the step.
                own = (
                    step.total,
                    step.checksum,
                    step.error is not None,
                    step.is_scarce,
                    self._kinds(step.value),
                )
                everyones = self._communicator.all_gather_obj(own)
        except BaseException:
            self._end()
            raise
        number = self._number
        self._number += 1
        totals, checksums, failed, scarce, kinds = zip(*everyones, strict=True)
        if any(failed):
            return step._replace(error=self._error_of_all(step.error))
        if seen := self._differences(totals):
            raise ReplicaMismatchError(
                f"{self._call}: the ranks have different numbers of elements in step {number}: "
                f"{seen}. Every rank's generator, functions and files must give the same elements; "
                "each replica then gets its share"
            )
        if seen := self._differences(checksums):
            raise ReplicaMismatchError(
                f"{self._call}: the ranks have different elements up to step {number}, with "
                f"checksums {seen}. {self._node} must give the same elements in the same order on "
                "every rank; each replica then gets its share. Give shuffles a seed that all ranks "
                "share: DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0)), "
                "or torch.manual_seed(0) before each epoch. Do not use a DistributedSampler: every "
                "batch is split between the replicas anyway"
            )
        if kinds.count(kinds[0]) < len(kinds):  # no replica alone has seen all rows of the batch
            return step._replace(error=_elements.mismatch_error(kinds))
        if None in totals and any(total is not None for total in totals):
            empty = self._empty()
            return (step if step.total is not None else empty)._replace(is_scarce=True)
        return step._replace(is_scarce=True) if any(scarce) else step

    def _kinds(self, value: Any) -> tuple[Any, ...] | None:
        """What all parts of a batch must share; `None` if parts were not loaded separately."""
        if value is None or self._assigns or self._node.rows is None:
            return None
        return _elements.kinds_of_rows(value)

    def _error_of_all(self, error: Exception | None) -> Exception | None:
        """The error of this step: this rank's own, or that of the first rank that has one.

        Collective.
        """
        try:
            with self._communicator.raise_together():
                if error is not None:
                    raise error
                self._communicator.all_gather_obj(None)
        except Exception as raised:
            return raised

    def _warn(self, total: int | None) -> None:
        """Warns, once per dataset, that some replicas have no elements in a step."""
        self._distribution.has_warned = True
        size = self._communicator.size
        if self._assigns:
            what = "some replicas have no elements in a step"
            remedy = "make the number of batches a multiple of the number of replicas"
        else:
            what = f"some of {size} replicas have no elements of a batch of {total}"
            remedy = "drop the batch: batch(..., drop_remainder=True)"
            if total and total >= size:
                remedy += ", or do without AutoShardPolicy.OFF"
        warn_together(
            f"{self._call}: {what}, and a mean over no elements is nan; divide sums by the global "
            f"batch size, or {remedy}",
            UserWarning,
            is_lead=self._communicator.rank == 0,
        )

    def _differences(self, values: Sequence[int | None]) -> str:
        """The values as text, and ends the iteration, if they differ within a worker; else ""."""
        if all(
            len(set(of_worker)) == 1
            for of_worker in self._distribution.workers.group_by_worker(values)
        ):
            return ""
        self._end()
        return ", ".join(
            f"rank {rank} {'none' if n is None else n}" for rank, n in enumerate(values)
        )

    def _empty(self) -> Step:
        """The step of a worker whose elements have ended before another worker's."""
        spec = self._node.spec()
        if any(not leaf.shape for leaf in nests.flatten(spec)[0]):
            self._end()
            raise ValueError(
                f"{self._call}: one worker's elements end before another's, and elements without "
                "dimensions have no empty form; batch the dataset"
            )
        value = nests.map_leaves(
            lambda leaf: np.empty((0, *[n or 0 for n in leaf.shape[1:]]), leaf.dtype), spec
        )
        prefetcher = self._distribution.prefetcher
        step = Step(0, value)
        return step if prefetcher is None else next(prefetcher(iter([step])))
