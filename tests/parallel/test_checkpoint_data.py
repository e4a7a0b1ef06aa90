"""Positions in data that a checkpoint holds: after a restore the same elements come as without."""

import os

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank

# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")


SIZE = 23


@pytest.fixture
def path(tmp_path):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "folder" / "checkpoint"))


@pytest.fixture
def volatile(monkeypatch):
    """Files that a power cut may lose, in tests that write hundreds."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def replicas(place):
    with place.make(hs.CentralStorageStrategy) as made:
        yield made


def fibonacci():
    a, b = 0, 1
    for _ in range(9):
        yield np.full(4, a)
        a, b = b, a + b


PIPELINES = {
    "shuffled": lambda: hs.data.Dataset.range(SIZE).shuffle(SIZE).batch(4),
    "a small buffer": lambda: (
        hs.data.Dataset.range(SIZE).shuffle(5).batch(4, drop_remainder=True).prefetch(2)
    ),
    "two shuffles": lambda: hs.data.Dataset.range(SIZE).shuffle(4).batch(4).shuffle(3),
    "cached": lambda: (
        hs.data.Dataset.range(SIZE).shuffle(SIZE).map(lambda x: -x).cache().shuffle(7).batch(4)
    ),
    "filtered": lambda: (
        hs.data.Dataset.range(2 * SIZE).shuffle(9).filter(lambda x: x % 2 == 0).batch(4)
    ),
    "rows": lambda: (
        hs.data.Dataset.from_tensor_slices({"x": np.arange(3 * SIZE).reshape(SIZE, 3)})
        .shuffle(5)
        .enumerate()
        .batch(4)
    ),
    "joined": lambda: (
        hs.data.Dataset.range(SIZE)
        .shuffle(9)
        .concatenate(hs.data.Dataset.range(100, 110).map(lambda x: -x).shuffle(3))
        .batch(4)
    ),
    "generated in threads": lambda: (
        hs.data.Dataset.from_generator(fibonacci)
        .shuffle(3)
        .map(lambda x: -x, 3)
        .unbatch()
        .batch(4)
        .prefetch(1)
    ),
    "with options": lambda: (
        hs.data.Dataset.range(SIZE).shuffle(5).batch(4).prefetch(3).with_options(hs.data.Options())
    ),
    "batched anew": lambda: hs.data.Dataset.range(SIZE).shuffle(9).batch(5).unbatch().batch(4),
    "zipped": lambda: hs.data.Dataset.zip(
        hs.data.Dataset.range(SIZE).shuffle(SIZE), hs.data.Dataset.range(SIZE).shuffle(3)
    ).batch(4),
}


# In each pass another order; they are saved at each position.
ROUNDS = {
    "rounds of a small buffer": lambda: hs.data.Dataset.range(7).shuffle(3).repeat(3).batch(2),
    "rounds of a seed": lambda: hs.data.Dataset.range(7).shuffle(7, seed=2).repeat(3).batch(2),
    "rounds of one order": lambda: (
        hs.data.Dataset.range(7).shuffle(7, reshuffle_each_iteration=False).repeat(3).batch(2)
    ),
    "rounds of batches": lambda: hs.data.Dataset.range(7).shuffle(7).batch(2).repeat(3),
    "rounds below another shuffle": lambda: (
        hs.data.Dataset.range(5).shuffle(5).repeat(2).shuffle(4).repeat(2).batch(2)
    ),
    "rounds of functions": lambda: (
        hs.data.Dataset.range(9)
        .shuffle(9)
        .filter(lambda x: x % 3 != 0)
        .repeat(3)
        .map(lambda x: -x, 2)
        .batch(2)
    ),
}
PIPELINES |= ROUNDS


def distributed(replicas, make):
    return replicas.experimental_distribute_dataset(make())


def dealt(replicas, make):
    return replicas.distribute_datasets_from_function(lambda context: make())


def plain(replicas, make):
    return make()


def shown(replicas, *passes):
    """What all replicas got in each step of each pass, bit by bit."""
    return [
        repr(hs.asnumpy(list(replicas.experimental_local_results(list(steps))))) for steps in passes
    ]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_data_goes_on_where_it_was(replicas, path, volatile, pipeline):
    check_that_it_goes_on(replicas, path, pipeline, distributed)


@pytest.mark.parametrize("distribute", [dealt, plain])
def test_data_that_is_dealt_out_or_whole_goes_on_where_it_was(replicas, path, volatile, distribute):
    for pipeline in ("a small buffer", "cached", "rounds of functions"):
        check_that_it_goes_on(replicas, path, pipeline, distribute)


def check_that_it_goes_on(replicas, path, pipeline, distribute):
    make = PIPELINES[pipeline]
    dataset = distribute(replicas, make)
    steps = len(list(dataset))
    for stop in range(steps + 1) if pipeline in ROUNDS else (0, 1, steps // 2, steps):
        iterator = iter(dataset)
        for _ in range(stop):
            next(iterator)
        Checkpoint(data=dataset, iterator=iterator).save(path)
        expected = shown(replicas, iterator, dataset, dataset)
        fresh, other = distribute(replicas, make), distribute(replicas, make)
        iterator = iter(other)
        Checkpoint(data=fresh, iterator=iterator).restore(path)
        Checkpoint(data=fresh).save(path)  # before anything is taken: the same again
        Checkpoint(data=fresh).restore(path)
        assert shown(replicas, fresh, fresh, fresh) == expected
        assert shown(replicas, iterator, other) == expected[:2]


class Failing:
    """Functions and a generator that fail at a number, as long as one is set."""

    def __init__(self):
        self.number: int | None = None

    def load(self, x):
        """Each number is loaded by one rank, which fails."""
        if x == self.number:
            raise KeyError("no such element")
        return x

    def see(self, x):
        """Each number is seen by all ranks, of which the last fails."""
        return self.load(x) if RANK == N - 1 else x

    def rows(self):
        yield from map(self.see, np.arange(24))


FAILING = {
    "map": lambda on: hs.data.Dataset.range(24).shuffle(24, seed=5).map(on.load).batch(N),
    "map in threads": lambda on: (
        hs.data.Dataset.range(24).shuffle(24, seed=5).map(on.load, num_parallel_calls=3).batch(N)
    ),
    "map of batches": lambda on: (
        hs.data.Dataset.range(24).batch(N).map(lambda xs: np.array([on.see(x) for x in xs]), 2)
    ),
    "filter": lambda on: (
        hs.data.Dataset.range(24).shuffle(24, seed=5).filter(lambda x: on.see(x) >= 0).batch(N)
    ),
    "generator": lambda on: hs.data.Dataset.from_generator(on.rows).batch(N),
    "generator ahead": lambda on: (
        hs.data.Dataset.from_generator(on.rows).map(lambda x: -x, 3).batch(N).prefetch(2)
    ),
}


@pytest.mark.parametrize(
    ("pipeline", "distribute"),
    [*((name, distributed) for name in FAILING), ("map", dealt), ("generator ahead", dealt)],
)
def test_what_failed_on_one_rank_is_tried_again(replicas, path, volatile, distribute, pipeline):
    """All ranks raise, the iteration ends, and its position is that of the step that failed."""
    on = Failing()

    def make():
        return distribute(replicas, lambda: FAILING[pipeline](on))

    whole = shown(replicas, make())
    for number in (0, 2, 9, 23):
        on.number, found, iterator = number, [], iter(make())
        with pytest.raises(KeyError, match="no such element"):
            for step in iterator:
                found.append(step)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
        Checkpoint(data=iterator).save(path)
        on.number, again = None, iter(make())
        Checkpoint(data=again).restore(path)
        assert shown(replicas, [*found, *again]) == whole


@pytest.mark.parametrize("distribute", [distributed, dealt, plain])
def test_between_iterations_pipelines_are_compared(replicas, path, distribute):
    def make(size, seed):
        return distribute(
            replicas, lambda: hs.data.Dataset.range(size).shuffle(size, seed=seed).batch(2)
        )

    dataset = make(6, 1)
    for _ in range(2):
        Checkpoint(data=dataset).save(path)
        for wrong in ((9, 1), (6, 2)):
            other = make(*wrong)
            with pytest.raises(ValueError, match=r"(?s)Checkpoint\.restore: .*pipeline"):
                Checkpoint(data=other).restore(path)
            assert shown(replicas, other) == shown(replicas, make(*wrong))  # nothing was changed
        fresh = make(6, 1)
        Checkpoint(data=fresh).restore(path)
        assert shown(replicas, fresh) == shown(replicas, dataset)


KINDS = {"bytes": b"\0\xff", 3: (np.arange(2.0), None, [True, "text"], np.float32(0.1))}


class StatefulLoader:
    """Batches in a random order that goes on from pass to pass.

    Its state is, as that of torchdata's loader, the start of the pass in progress, and how many
    batches it has yielded; after the pass the start of the next one.
    """

    def __init__(self, seed):
        self._random, self._first = np.random.default_rng(seed), 0
        self._note(0)

    def _note(self, yielded):
        self._state = {"random": self._random.bit_generator.state, "yielded": yielded}

    def __iter__(self):
        first, self._first = self._first, 0
        self._note(first)
        return self._batches(self._random.permutation(4 * N + 1), first)

    def _batches(self, order, first):
        for i in range(first, 4):
            self._state["yielded"] = i + 1
            yield {"x": order[i * N : (i + 1) * N], "y": -order[i * N : (i + 1) * N]}
        self._note(0)

    def state_dict(self):
        return {**self._state, "kinds": KINDS}

    def load_state_dict(self, state):
        assert repr(state["kinds"]) == repr(KINDS)
        self._random.bit_generator.state, self._first = state["random"], state["yielded"]
        self._note(self._first)


@pytest.mark.parametrize("is_iterator", [False, True])
def test_a_loader_with_a_state_goes_on_where_it_was(replicas, path, volatile, is_iterator):
    loader = StatefulLoader(seed=5)
    dataset = replicas.experimental_distribute_dataset(loader)
    for _ in range(2):
        for stop in range(5):
            iterator = iter(dataset)
            for _ in range(stop):
                next(iterator)
            Checkpoint(data=iterator if is_iterator else dataset).save(path)
            expected = shown(replicas, iterator, dataset)
            for other_loader in (StatefulLoader(seed=6), loader):
                other = replicas.experimental_distribute_dataset(other_loader)
                iterator = iter(other) if is_iterator else other
                Checkpoint(data=iterator).restore(path)
                assert shown(replicas, iterator, other) == expected
                assert repr(other_loader.state_dict()) == repr(loader.state_dict())


def test_between_iterations_the_next_one_is_saved(replicas, path):
    dataset = distributed(replicas, PIPELINES["shuffled"])
    for _ in dataset:
        break  # the iteration is abandoned
    Checkpoint(data=dataset).save(path)
    expected = shown(replicas, dataset)
    fresh = distributed(replicas, PIPELINES["shuffled"])
    Checkpoint(data=fresh).restore(path)
    assert shown(replicas, fresh) == expected
    iterator = iter(fresh)
    list(iterator)
    Checkpoint(data=iterator).save(path)
    ended = iter(distributed(replicas, PIPELINES["shuffled"]))
    Checkpoint(data=ended).restore(path)
    assert list(ended) == []


def test_nothing_is_loaded_that_is_left_out(replicas, path):
    loaded = []

    def noted(x):
        loaded.append(int(x))
        return x

    dataset = distributed(replicas, lambda: hs.data.Dataset.range(1000).map(noted).batch(10))
    iterator = iter(dataset)
    for _ in range(90):
        next(iterator)
    Checkpoint(data=dataset).save(path)
    loaded.clear()
    Checkpoint(data=dataset).restore(path)
    list(dataset)
    assert min(loaded) >= 900


def test_another_size_of_batches(replicas, path):
    def make(size, count=24):
        return lambda: hs.data.Dataset.range(count).shuffle(count, seed=1).batch(size)

    dataset = distributed(replicas, make(4))
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    Checkpoint(data=dataset).save(path)
    everything = [int(x) for x in hs.data.Dataset.range(24).shuffle(24, seed=1)]
    other = distributed(replicas, make(6))
    Checkpoint(data=other).restore(path)
    parts = [replicas.experimental_local_results(step) for step in other]
    assert [int(x) for step in parts for part in step for x in hs.asnumpy(part)] == everything[12:]
    for wrong, match in [
        (make(5), "it was saved after 12 elements, not a multiple of its batch size 5"),
        (
            make(4, 25),
            r"its pipeline is Dataset\.range\(0, 25\).* and the saved one Dataset\.range\(0, 24\)",
        ),
        (
            lambda: hs.data.Dataset.range(24).batch(4),
            r"its pipeline is Dataset\.range\(0, 24\) with .* the saved one .*\.shuffle\(24, 1, True\)",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            Checkpoint(data=distributed(replicas, wrong)).restore(path)
