"""Distributed datasets, whose steps all ranks take together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core.call_name import call_named, current_call, names_call
from hpcstrat._core.ranks_in_words import join_by_rank, list_by_rank
from hpcstrat._core.timeline import INPUT, span
from hpcstrat._core.types import PerReplica, PerReplicaSpec, ReplicaMismatchError
from hpcstrat._core.user_frames import warn
from hpcstrat._process import settings
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import Workers
from hpcstrat._transports.verbs import Communicator
from hpcstrat.data import _elements
from hpcstrat.data._iterators import DatasetIterator, Position, Progress, incompatibility, length
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node, PipelineChecksum
from hpcstrat.data._splitting import Prefetcher, Step, assign_elements

_END = Step(None, None)


@final
class DistributedDataset:
    """A dataset whose steps are nests of `PerReplica`, or of plain arrays if there is one replica.

    Strategies make them. They can be iterated over repeatedly but not transformed: transform the
    dataset before you distribute it. Iterating is collective: all ranks take the same steps.

    Examples:
        With one replica; of two, the first gets `[0 1]` and `[4 5]`, and the sums are the same:

        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> dataset = hs.data.Dataset.range(7).batch(4)
        >>> for x in strategy.experimental_distribute_dataset(dataset):
        ...     sums = strategy.run(lambda x: x.sum(), args=(x,))
        ...     print(x, strategy.reduce("SUM", sums, axis=None))
        [0 1 2 3] 6
        [4 5 6] 15
    """

    def __init__(
        self,
        node: Node,
        communicator: Communicator,
        split: Callable[[Node, EpochPass, int, int], Iterator[Step]],
        call: str,
        prefetcher: Prefetcher | None,
        workers: Workers,
    ) -> None:
        self._node, self._progress = node, Progress(node)
        self._communicator, self._workers = communicator, workers
        self._split = split  # returns one replica's steps of a pipeline
        self._prefetcher = prefetcher
        self._call = call  # the public name of the method that distributed the dataset
        self._is_compared = False
        self._has_warned = False

    @property
    def element_spec(self) -> Any:
        """A step's nest of `PerReplicaSpec`, or of `TensorSpec` if there is one replica.

        A first dimension that may differ between replicas or steps is `None`.

        Examples:
            With one replica; with two, it is `PerReplicaSpec(shape=(2,), ...)`:

            >>> strategy = hs.CentralStorageStrategy()
            >>> batches = hs.data.Dataset.range(8).batch(4, drop_remainder=True)
            >>> strategy.experimental_distribute_dataset(batches).element_spec
            TensorSpec(shape=(4,), dtype=int64, name=None)
        """
        spec, size, steps = self._node.spec(), self._communicator.size, self._node.cardinality()
        if size == 1:
            return spec
        assigns = self._split is assign_elements
        whole = assigns and self._workers.count == 1
        whole = whole and (steps == INFINITE or (steps >= 0 and steps % size == 0))

        def component(leaf: Any) -> PerReplicaSpec:
            if not leaf.shape or whole:
                return PerReplicaSpec(leaf.shape, leaf.dtype)
            rows = leaf.shape[0]
            share = None if assigns or rows is None or rows % size else rows // size
            return PerReplicaSpec((share, *leaf.shape[1:]), leaf.dtype)

        return _elements.map_leaves(component, spec)

    @property
    def cardinality(self) -> int:
        """The number of steps; -1 if infinite, -2 if unknown, as it is with several workers.

        Examples:
            >>> strategy = hs.CentralStorageStrategy()
            >>> batches = hs.data.Dataset.range(7).batch(4)
            >>> strategy.experimental_distribute_dataset(batches).cardinality
            2
        """
        count, size = self._node.cardinality(), self._communicator.size
        if self._workers.count > 1:
            return UNKNOWN
        if self._split is not assign_elements or size == 1 or count < 0:
            return count
        steps, rest = divmod(count, size)
        return steps + (
            rest > 0 and all(leaf.shape for leaf in _elements.flatten(self._node.spec())[0])
        )

    def __len__(self) -> int:
        """The number of steps.

        Raises:
            TypeError: it is infinite or unknown.
        """
        return length(self.cardinality, self._call)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> DistributedIterator:
        """Starts an iteration.

        Collective: the ranks compare their pipelines and share the seeds of shuffles.

        In the first iteration they also compare samples of the arrays that elements come from; with
        `HPCSTRAT_CHECK=1` they compare all arrays in memory, in every iteration.

        Raises:
            ReplicaMismatchError: the ranks' pipelines, or arrays, differ.
        """
        with call_named(f"iterating over {self._call}"):
            epoch, taken = self._begin_together()
        self._is_compared = True
        iterator = DistributedIterator(self, epoch, taken)
        self._progress.note(iterator)
        return iterator

    def _begin_together(self) -> tuple[EpochPass, int]:
        """Counts a new pass, in which all ranks of a worker meet the same elements in one order.

        Collective.

        Returns:
            The pass, and how many elements it skips.
        """
        node, communicator, workers = self._node, self._communicator, self._workers
        if communicator.size == 1:
            return self._progress.begin()
        with communicator.raise_together():
            epoch, taken = self._progress.begin()
            pipeline = f"{node!r} with {node.cardinality()} elements" + (
                f" after the first {taken}" if taken else ""
            )
            orders = [(shuffle.drawn(), number) for shuffle, number in epoch.numbers.items()]
            # Arrays seldom change between epochs, so their samples, which may have to be read from
            # disk, are compared only once.
            every = settings.is_on("HPCSTRAT_CHECK")
            arrays = [] if self._is_compared and not every else node.checksums(every)
            everyones = communicator.all_gather_obj((pipeline, orders, arrays))
        pipelines, all_orders, contents = zip(*everyones, strict=True)
        if any(len(set(of_worker)) > 1 for of_worker in workers.group_by_worker(pipelines)):
            seen = "".join(f"\n  {line}" for line in list_by_rank(enumerate(pipelines)))
            raise ReplicaMismatchError(
                f"{current_call()}: every rank must make the same dataset; each replica then gets "
                f"its share:{seen}"
            )
        for of_worker in workers.group_by_worker(list(enumerate(contents))):
            _require_equal_arrays(of_worker)
        # All take the orders of the worker's first rank: the seeds of shuffles without one may
        # differ, and a rank may have iterated on its own.
        orders = all_orders[workers.peers[0]]
        numbers = {}
        for shuffle, (seed, number) in zip(epoch.numbers, orders, strict=True):
            shuffle.seed, shuffle.passes = seed, number + 1
            numbers[shuffle] = number
        epoch.numbers = numbers
        return epoch, taken

    def _position(self) -> Position:
        return self._gather_position(self._progress.position)

    def _gather_position(self, own: Callable[[], Position]) -> Position:
        """The position; if workers have pipelines of their own, with all of theirs. Collective."""
        if self._workers.count == 1:
            return own()
        with self._communicator.raise_together():
            everyones = self._communicator.all_gather_obj(own())
        of_workers = self._workers.group_by_worker(everyones)
        return everyones[0]._replace(by_worker=tuple([first for first, *_ in of_workers]))

    def _incompatibility(self, position: Position) -> str | None:
        saved, count = len(position.by_worker) or 1, self._workers.count
        if saved != count:
            return f"its pipelines are those of {count} workers and the saved ones of {saved}"
        return incompatibility(self._node, self._of_worker(position))

    def _of_worker(self, position: Position) -> Position:
        """The position of this rank's worker."""
        return position.by_worker[self._workers.index] if position.by_worker else position

    def _seek(self, position: Position) -> None:
        self._progress.seek(self._of_worker(position))

    def __repr__(self) -> str:
        return f"{self._call}({self._node!r})"


def _require_equal_arrays(of_worker: Sequence[tuple[int, list[tuple[str, int]]]]) -> None:
    """Compares the checksums of a worker's ranks, given as pairs of a rank and its arrays'."""
    ranks, contents = zip(*of_worker, strict=True)
    for checksums in zip(*contents, strict=True):
        if len(set(checksums)) > 1:
            seen = join_by_rank(
                (rank, f"{checksum:08x}")
                for rank, (_, checksum) in zip(ranks, checksums, strict=True)
            )
            raise ReplicaMismatchError(
                f"{current_call()}: the ranks have different arrays in {checksums[0][0]}, with "
                f"checksums {seen}. Every rank must have the same data in the same order; each "
                "replica then gets its share. Draw, shuffle and split with a seed that all ranks "
                "share, such as np.random.default_rng(0) or train_test_split(..., random_state=0), "
                "or send rank 0's arrays to all: hs.broadcast_object(arrays)"
            )


@final
class DistributedIterator(DatasetIterator):
    """One iteration over a `DistributedDataset`.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy()
        >>> batches = strategy.experimental_distribute_dataset(hs.data.Dataset.range(9).batch(3))
        >>> iterator = iter(batches)
        >>> print(next(iterator), next(iterator))
        [0 1 2] [3 4 5]
        >>> print(*iterator)
        [6 7 8]
    """

    def __init__(self, dataset: DistributedDataset, epoch: EpochPass, taken: int) -> None:
        self._dataset = dataset
        self._call = f"iterating over {dataset._call}"
        self._communicator, self._workers = dataset._communicator, dataset._workers
        self._rank, self._size = self._communicator.rank, self._communicator.size
        self._assigns = dataset._split is assign_elements
        super().__init__(dataset._node, epoch, taken)

    def _elements_of(self, node: Node) -> Iterator[Step]:
        dataset, peers = self._dataset, self._workers.peers
        # Without user code, all ranks of a worker walk the same keys and need no exchange. Several
        # workers have separate pipelines, which may end at different steps.
        self._compares = self._size > 1 and (self._node.user_code or self._workers.count > 1)
        epoch = self._epoch
        epoch.checksum = PipelineChecksum(self._compares)
        self._number = 0
        self._empty: Step | None = None  # made when it is needed
        if len(peers) == 1:
            steps = (Step(1, element) for element in node.elements(epoch))
        else:
            steps = dataset._split(node, epoch, peers.index(self._rank), len(peers))
        prefetcher = dataset._prefetcher
        return self._ahead(steps) if prefetcher is None else prefetcher(steps)

    @property
    def element_spec(self) -> Any:
        """As `DistributedDataset.element_spec`.

        Examples:
            >>> strategy = hs.CentralStorageStrategy()
            >>> batches = hs.data.Dataset.range(3).batch(2)
            >>> iter(strategy.experimental_distribute_dataset(batches)).element_spec
            TensorSpec(shape=(None,), dtype=int64, name=None)
        """
        return self._dataset.element_spec

    @span(INPUT, "next batch")
    def __next__(self) -> Any:
        """The next step: a nest of `PerReplica`, or of arrays if there is one replica.

        Collective. It communicates only if user code is part of the pipeline.

        Raises:
            ValueError: called inside a replica function.
            ReplicaMismatchError: the ranks' pipelines have different elements, or different numbers
                of them.
            Exception: what a function of the pipeline raised on any rank; the pass is then over,
                and its position is at this step.
        """
        if type(contexts.current.get()) is InReplica:
            raise ValueError(
                f"{self._call}: next was called inside a replica function, but a step is for all "
                "replicas; call it outside, and pass the result: strategy.run(fn, "
                "args=(next(iterator),))"
            )
        taken = self._taken
        try:
            step = self._compare_step() if self._compares else next(self._elements, _END)
            total, value, _, is_scarce = step
            if total is None:
                self._end()
                raise StopIteration
            if is_scarce and not self._dataset._has_warned:
                self._warn(total)
            # A position counts elements of the pipeline: one per step, or what the replicas got.
            self._taken = (taken or 0) + (total if self._assigns else 1)
            return value if self._size == 1 else self._parts_of(value)
        except StopIteration:
            raise
        except Exception:
            self._fail()
            raise
        except BaseException as interrupt:
            # The other ranks may have taken this step. A single replica takes it again.
            self._communicator.calls.mark_interrupted(interrupt, self._call)
            self._go_back(taken)
            raise

    def _parts_of(self, value: Any) -> Any:
        """This replica's values, as those of a step of several replicas."""
        rank, size = self._rank, self._size
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
        leaves, structure = _elements.flatten(value)
        return structure.unflatten([PerReplica(leaf, rank, size) for leaf in leaves])

    def _position(self) -> Position:
        return self._dataset._gather_position(super()._position)

    def _incompatibility(self, position: Position) -> str | None:
        return self._dataset._incompatibility(position)

    def _seek(self, position: Position) -> None:
        super()._seek(self._dataset._of_worker(position))

    def _stop(self) -> None:
        """Makes the next step the last, on all ranks."""
        super()._stop()
        self._compares = False

    @names_call(lambda self: self._call)
    def _compare_step(self) -> Step:
        """The next step, after all ranks have checked that theirs are the same. Collective."""
        with self._communicator.raise_together():
            step = next(self._elements, _END)
            # One exchange covers everything that can differ. Without it, a rank whose generator
            # ends early would leave the other ranks waiting in a collective of the step.
            own = step.total, step.checksum, step.is_scarce, self._kinds(step.value)
            everyones = self._communicator.all_gather_differing_obj(own)
        number = self._number
        self._number += 1
        totals, checksums, scarce, kinds = zip(*everyones, strict=True)
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
            raise _elements.mismatch_error(kinds)
        if None in totals and any(total is not None for total in totals):
            if self._empty is None:  # on all ranks, so they make it together
                with self._communicator.raise_together():
                    self._empty = self._empty_step()
                    self._communicator.all_gather_obj(None)
            return (self._empty if step.total is None else step)._replace(is_scarce=True)
        return step._replace(is_scarce=True) if any(scarce) else step

    def _kinds(self, value: Any) -> tuple[Any, ...] | None:
        """What all parts of a batch must share; `None` if parts were not loaded separately."""
        if value is None or self._assigns or self._node.rows is None:
            return None
        return _elements.kinds_of_rows(value)

    def _warn(self, total: int | None) -> None:
        """Warns, once per dataset, that some replicas have no elements in a step."""
        self._dataset._has_warned = True
        size = self._communicator.size
        if self._assigns:
            what = "some replicas have no elements in a step"
            remedy = "make the number of batches a multiple of the number of replicas"
        else:
            what = f"some of {size} replicas have no elements of a batch of {total}"
            remedy = "pass batch(..., drop_remainder=True)"
        warn(
            f"{self._call}: {what}, whose means are nan; divide sums by the global batch size, or "
            f"{remedy}",
            UserWarning,
        )

    def _differences(self, values: Sequence[int | None]) -> str:
        """The values as text if they differ within a worker; else ""."""
        if all(len(set(of_worker)) == 1 for of_worker in self._workers.group_by_worker(values)):
            return ""
        return join_by_rank(enumerate("none" if n is None else str(n) for n in values))

    def _empty_step(self) -> Step:
        """The step of a worker whose elements have ended before another worker's.

        It calls functions of the pipeline, which may fail on some ranks.
        """
        spec = self._node.spec()
        if any(not leaf.shape for leaf in _elements.flatten(spec)[0]):
            raise ValueError(
                f"{self._call}: one worker's elements end before another's, and elements without "
                "dimensions have no empty form; batch the dataset"
            )
        value = _elements.map_leaves(
            lambda leaf: np.empty((0, *[n or 0 for n in leaf.shape[1:]]), leaf.dtype), spec
        )
        prefetcher = self._dataset._prefetcher
        step = Step(0, value)
        return step if prefetcher is None else next(prefetcher(iter([step])))
