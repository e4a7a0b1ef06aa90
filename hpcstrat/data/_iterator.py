"""Iterating over a distributed dataset: the ranks agree on every step that code of the user's has a part in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from hpcstrat import _context, _nest, _settings
from hpcstrat._context import InReplica
from hpcstrat._errors import ReplicaMismatchError
from hpcstrat._group import Workers
from hpcstrat._spans import INPUT, span
from hpcstrat._types import PerReplicaSpec
from hpcstrat._values import PerReplica
from hpcstrat._warnings import warn_together
from hpcstrat.data._checksum import Checksum
from hpcstrat.data._node import INFINITE, EpochPass, Node
from hpcstrat.data._pass import InputCommunicator, ResumableIterator, after
from hpcstrat.data._splitting import Prefetcher, Step, assign_elements

_END = Step(None, None)


@dataclass(eq=False)
class Distribution:
    """How a dataset is shared out to the replicas: what it and its iterators have in common.

    Attributes:
        node: the last prefetcher of the pipeline.
        communicator: the replicas.
        share_out: gives this replica's steps of the pipeline.
        call: the user's name of the method that distributed it.
        prefetcher: what the steps pass through on their way; `None` for nothing.
        workers: those that have a pipeline each.
        has_warned: whether a step without elements for some replicas was warned of.
    """

    node: Node
    communicator: InputCommunicator
    share_out: Callable[[Node, EpochPass, int, int], Iterator[Step]]
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
        whole = self.share_out is assign_elements and self.workers.count == 1
        whole = whole and (steps == INFINITE or (steps >= 0 and steps % size == 0))

        def component(leaf: Any) -> PerReplicaSpec:
            if not leaf.shape or whole:
                return PerReplicaSpec(leaf.shape, leaf.dtype)
            rows = leaf.shape[0]
            if self.share_out is assign_elements or rows is None or rows % size:
                return PerReplicaSpec((None, *leaf.shape[1:]), leaf.dtype)
            return PerReplicaSpec((rows // size, *leaf.shape[1:]), leaf.dtype)

        return _nest.map_leaves(component, spec)


@final
class DistributedIterator(ResumableIterator):
    """One iteration over a `DistributedDataset`."""

    def __init__(self, distribution: Distribution, epoch: EpochPass, taken: int) -> None:
        super().__init__(distribution.node)
        self._call = f"iterating over {distribution.call}"
        self._communicator = distribution.communicator
        self._distribution = distribution
        self._deals = distribution.share_out is assign_elements
        self._begin(epoch, taken)

    def _begin(self, epoch: EpochPass, taken: int) -> None:
        distribution, communicator = self._distribution, self._communicator
        self._agree = communicator.size > 1 and (self._node.user_code or distribution.workers.count > 1)
        epoch.checksum = Checksum(self._agree, every=_settings.is_on("HPCSTRAT_CHECK"))
        peers = distribution.workers.peers
        steps = distribution.share_out(after(self._node, taken), epoch, peers.index(communicator.rank), len(peers))
        self._steps = steps if distribution.prefetcher is None else distribution.prefetcher(steps)
        self._number = 0
        self._epoch, self._taken = epoch, taken

    @property
    def element_spec(self) -> Any:
        """As `DistributedDataset.element_spec`."""
        return self._distribution.element_spec()

    def get_next(self) -> Any:
        """The next step, as `next` gives it.

        Raises:
            StopIteration: there is none.
        """
        return next(self)

    def __iter__(self) -> DistributedIterator:
        return self

    @span(INPUT, "next batch")
    def __next__(self) -> Any:
        """The next step: a nest of `PerReplica`, or of arrays where there is one replica.

        Collective, and without communication where no code of the user's is part of the pipeline.

        Raises:
            ValueError: called inside a replica function.
            ReplicaMismatchError: the ranks' pipelines had different numbers of elements, or different elements.
            Exception: What a function of the pipeline raised on any rank. The next call gives the step after this one.
        """
        if isinstance(_context.current.get(), InReplica):
            raise ValueError(
                f"{self._call}: next was called inside a replica function, and a step is of all replicas; call it "
                "outside, and pass on what it gives: strategy.run(fn, args=(next(iterator),))"
            )
        step = self._agreed() if self._agree else next(self._steps, _END)
        if step.total is None and step.error is None:
            self._end()
            raise StopIteration
        self._number += 1
        assert self._taken is not None
        self._taken += (step.total or 0) if self._deals else 1
        if step.error is not None:
            try:
                raise step.error
            finally:
                del step  # which the error's traceback would keep
        if step.is_scarce and not self._distribution.has_warned:
            self._warn(step.total)
        if self._communicator.size == 1:
            return step.part
        part, rank, size = step.part, self._communicator.rank, self._communicator.size
        if type(part) is np.ndarray:  # The short way for the commonest nest.
            return PerReplica(part, rank, size)
        leaves, structure = _nest.flatten(part)
        return structure.unflatten([PerReplica(leaf, rank, size) for leaf in leaves])

    def _end(self) -> None:
        """Lets go of the pipeline: from now on there is no step, on any rank."""
        self._steps, self._agree, self._taken = iter(()), False, None

    def _agreed(self) -> Step:
        """The next step, once all ranks are known to have the same one."""
        try:
            with self._communicator.raise_together(self._call):
                step = next(self._steps, _END)
                own = step.total, step.checksum, step.error is not None, step.is_scarce
                everyones = self._communicator.all_gather_obj(self._call, own)
        except BaseException:
            self._end()
            raise
        totals, checksums, failed, scarce = zip(*everyones, strict=True)
        if any(failed):
            return step._replace(error=self._error_of_all(step.error))
        if seen := self._differences(totals):
            raise ReplicaMismatchError(
                f"{self._call}: the ranks have different numbers of elements in step {self._number}: {seen}. Every "
                "rank's generator, functions and files must give the same elements; each replica is then given its part"
            )
        if seen := self._differences(checksums):
            raise ReplicaMismatchError(
                f"{self._call}: the ranks have different elements up to step {self._number}, of checksums {seen}. "
                f"{self._node} must give the same elements in the same order on every rank; each replica is then given "
                "its part. What shuffles takes a seed that all ranks share: DataLoader(..., shuffle=True, "
                "generator=torch.Generator().manual_seed(0)), or torch.manual_seed(0) before each epoch. Leave a "
                "DistributedSampler out: each replica is given its part of every batch as it is"
            )
        if None in totals and any(total is not None for total in totals):
            empty = self._empty()
            return (step if step.total is not None else empty)._replace(is_scarce=True)
        return step._replace(is_scarce=True) if any(scarce) else step

    def _error_of_all(self, error: Exception | None) -> Exception | None:
        """The error of this step: this rank's, or the first other rank's."""
        try:
            with self._communicator.raise_together(self._call):
                if error is not None:
                    raise error
                self._communicator.all_gather_obj(self._call, None)
        except Exception as found:
            return found

    def _warn(self, total: int | None) -> None:
        """Warns, once for each dataset, of a step in which some replicas have no elements."""
        self._distribution.has_warned = True
        size = self._communicator.size
        if self._deals:
            count = total if self._distribution.workers.count == 1 else "some"
            what = f"a step has batches for {count} of {size} replicas, and the others have no elements"
            remedy = "let their number be a multiple of the replicas"
        else:
            what = f"a batch of {total} elements does not reach all {size} replicas, and the last have no elements"
            remedy = "leave the batch out: Dataset.batch(..., drop_remainder=True)"
            if total and total >= size:
                remedy += ", or have it split evenly: InputOptions(even_batches=True)"
        warn_together(
            f"{self._call}: {what}: a mean over none is nan, on all replicas as soon as it is summed; make it a sum "
            f"that is divided by the size of the global batch, or {remedy}. The dataset is {self._node!r}",
            UserWarning,
            is_lead=self._communicator.rank == 0,
        )

    def _differences(self, values: Sequence[int | None]) -> str:
        """Every rank's value, where those of a worker differ: the iteration has then ended. Else empty."""
        if all(len(set(of_worker)) == 1 for of_worker in self._distribution.workers.grouped(values)):
            return ""
        self._end()
        return ", ".join(f"rank {rank} {'none' if n is None else n}" for rank, n in enumerate(values))

    def _empty(self) -> Step:
        """The step of a worker whose elements have ended, while another's go on."""
        spec = self._node.spec()
        if any(not leaf.shape for leaf in _nest.flatten(spec)[0]):
            self._end()
            raise ValueError(
                f"{self._call}: the elements of one worker end before another's, and elements without dimensions have "
                "no empty form; batch the dataset"
            )
        part = _nest.map_leaves(lambda leaf: np.empty((0, *[n or 0 for n in leaf.shape[1:]]), leaf.dtype), spec)
        prefetcher = self._distribution.prefetcher
        return Step(0, part) if prefetcher is None else next(prefetcher(iter([Step(0, part)])))
