"""Ranks begin a pass together: they compare their pipelines and arrays, and share the orders of shuffles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hpcstrat._errors import ReplicaMismatchError
from hpcstrat._group import Workers
from hpcstrat.data._node import Node
from hpcstrat.data._walk import Shuffler, Walk


class Communicator(Protocol):
    """What of a communicator the distribution of data needs."""

    @property
    def rank(self) -> int:
        """The index of this replica."""
        ...

    @property
    def size(self) -> int:
        """The number of replicas."""
        ...

    def joint(self, call: str) -> AbstractContextManager[Any]:
        """A block in which an exception on one rank, before its next collective, is raised on every rank."""
        ...

    def all_gather_obj(self, call: str, obj: Any) -> list[Any]:
        """Every rank's object, in rank order. Collective."""
        ...


def begin_together(
    node: Node,
    communicator: Communicator,
    call: str,
    begun: Mapping[Shuffler, int],
    taken: int,
    workers: Workers,
    arrays: Callable[[], list[tuple[str, int]]] | None,
) -> Walk:
    """A pass in which all ranks of a worker meet the same elements, in the orders of its first. Collective.

    Args:
        node: the last stage of the pipeline.
        communicator: the replicas.
        call: the user's name of the method.
        begun: the rounds with which shuffles begin, where they are not the next ones.
        taken: how many elements are left out.
        workers: those that have a pipeline each.
        arrays: gives descriptions and checksums of the arrays of the pipeline; `None` where they are not compared.

    Raises:
        ReplicaMismatchError: The pipelines of a worker's ranks, or their arrays, differ.
    """
    if communicator.size == 1:
        return Walk(begun)
    with communicator.joint(call):
        shufflers = node.shufflers()
        pipeline = f"{node!r} with {node.cardinality()} elements" + (f" after the first {taken}" if taken else "")
        states = [(seed, begun.get(one, number)) for one in shufflers for seed, number in [one.state()]]
        own = pipeline, states, [] if arrays is None else arrays()
        everyones = communicator.all_gather_obj(call, own)
    pipelines, orders, contents = zip(*everyones, strict=True)
    if any(len(set(of_worker)) > 1 for of_worker in workers.grouped(pipelines)):
        seen = "; ".join(f"rank {rank} has {other}" for rank, other in enumerate(pipelines))
        raise ReplicaMismatchError(
            f"{call}: every rank must make the same dataset; each replica is then given its part. {seen}"
        )
    _require_equal_arrays(call, contents, workers)
    rounds = {}
    for shuffler, (seed, number) in zip(shufflers, orders[workers.peers[0]], strict=True):
        shuffler.seed = seed
        rounds[shuffler] = number
    return Walk(rounds)


def _require_equal_arrays(call: str, contents: Sequence[list[tuple[str, int]]], workers: Workers) -> None:
    for of_worker in workers.grouped(list(enumerate(contents))):
        for found in zip(*(content for _, content in of_worker), strict=True):
            if len(set(found)) > 1:
                ranks = [rank for rank, _ in of_worker]
                seen = ", ".join(
                    f"rank {rank} {checksum:08x}" for rank, (_, checksum) in zip(ranks, found, strict=True)
                )
                raise ReplicaMismatchError(
                    f"{call}: the ranks have different arrays in {found[0][0]}, of checksums {seen}. Every rank must "
                    "have the same data in the same order; each replica is then given its part. Give what draws, "
                    "shuffles or splits them a seed that all ranks share, such as np.random.default_rng(0) or "
                    "train_test_split(..., random_state=0), or pass rank 0's to all: hs.broadcast_object(arrays)"
                )
