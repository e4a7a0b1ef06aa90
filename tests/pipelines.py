"""Chains of transformations drawn at random, and what they make of lists: a model of datasets."""

import collections
import operator
from collections.abc import Collection
from itertools import chain, islice
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint
from hpcstrat.data import Dataset

N = 24

SOURCES = {  # each has the numbers below N
    "range": lambda: Dataset.range(N),
    "slices": lambda: Dataset.from_tensor_slices(np.arange(N)),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(N)), np.int64),
    "generated rows": lambda: Dataset.from_generator(
        lambda: iter(np.arange(N).reshape(6, 4))
    ).unbatch(),
    "joined": lambda: Dataset.range(9).concatenate(Dataset.from_tensor_slices(np.arange(9, N))),
    "zipped": lambda: Dataset.zip(Dataset.range(N), Dataset.from_tensors({"a": 0}).repeat()).map(
        lambda x, _: x
    ),
    "rows": lambda: Dataset.from_tensors(np.arange(N)).unbatch(),
}


def plain(element) -> Any:
    """The element with lists in place of arrays, to compare."""
    if isinstance(element, dict):
        return {key: plain(part) for key, part in element.items()}
    if isinstance(element, tuple):
        return tuple(plain(part) for part in element)
    return element if element is None else np.asarray(element).tolist()


def items(dataset):
    """All elements, with lists in place of arrays."""
    return [plain(element) for element in dataset]


def batched(values, size, drops=False):
    """Lists of `size` values, the last perhaps shorter."""
    values = iter(values)
    while len(batch := [*islice(values, size)]) == size or (batch and not drops):
        yield batch


def order(n, seed, number=0, round_=0):
    """The order in which a shuffle of all `n` elements yields them, in a round of a pass."""
    return np.random.default_rng([seed, number, round_]).permutation(n).tolist()


ANY = {  # of rows or batches
    "take": lambda d, k: d.take(7 * k),
    "take all": lambda d, k: d.take(-1),
    "skip": lambda d, k: d.skip(k),
    "shard": lambda d, k: d.shard(k, k // 2),
    "prefetch": lambda d, k: d.prefetch(k - 2),
    "options": lambda d, k: d.with_options(hs.data.Options()),
    "cache": lambda d, k: d.cache(),
    "repeat": lambda d, k: d.repeat(k - 1),
    "endless": lambda d, k: d.repeat().take(30),
    "shuffle all": lambda d, k: d.shuffle(99, seed=k),
    "one order": lambda d, k: d.shuffle(99, seed=k, reshuffle_each_iteration=False),
    "shuffle some": lambda d, k: d.shuffle(3 * k, seed=k),
    "shuffle without a seed": lambda d, k: d.shuffle(2 * k),
}
ROWS = ANY | {
    "map": lambda d, k: d.map(lambda x: 3 * x + k),
    "in threads": lambda d, k: d.map(lambda x: x ^ k, num_parallel_calls=k),
    "filter": lambda d, k: d.filter(lambda x: x % (k + 1) > 0),
    "batch and unbatch": lambda d, k: d.batch(k).unbatch(),
    "whole batches": lambda d, k: d.batch(k, True).unbatch(),
    "turned batches": lambda d, k: d.batch(k).map(lambda x: x[::-1], 2).unbatch(),
    "columns": lambda d, k: d.batch(k, True).batch(2).map(lambda x: x[:, 0]).unbatch(),
    "join": lambda d, k: d.concatenate(Dataset.range(k)),
    "join first": lambda d, k: Dataset.range(k).map(lambda x: -x).concatenate(d),
    "zip": lambda d, k: Dataset.zip(d, Dataset.range(30).skip(k)).map(lambda x, y: x + y),
    "enumerate": lambda d, k: d.enumerate(k).map(lambda i, x: i + x),
}
BATCHES = ANY | {
    "map": lambda d, k: d.map(lambda x: k - x, 3),
    "filter": lambda d, k: d.filter(lambda x: x[0] % 3),
    "join": lambda d, k: d.concatenate(Dataset.range(k).batch(2)),
}

# What the same makes of an iterator.
OF_ANY = {
    "take": lambda a, k: islice(a, 7 * k),
    "take all": lambda a, k: a,
    "skip": lambda a, k: islice(a, k, None),
    "shard": lambda a, k: islice(a, k // 2, None, k),
    "prefetch": lambda a, k: a,
    "options": lambda a, k: a,
}
OF_ROWS = OF_ANY | {
    "map": lambda a, k: (3 * x + k for x in a),
    "in threads": lambda a, k: (x ^ k for x in a),
    "filter": lambda a, k: (x for x in a if x % (k + 1) > 0),
    "batch and unbatch": lambda a, k: a,
    "whole batches": lambda a, k: chain.from_iterable(batched(a, k, True)),
    "turned batches": lambda a, k: (x for batch in batched(a, k) for x in batch[::-1]),
    "columns": lambda a, k: (batch[0] for batch in batched(a, k, True)),
    "join": lambda a, k: chain(a, range(k)),
    "join first": lambda a, k: chain(range(0, -k, -1), a),
    "zip": lambda a, k: map(operator.add, a, range(k, 30)),
    "enumerate": lambda a, k: (i + x for i, x in enumerate(a, k)),
}
OF_BATCHES = OF_ANY | {
    "map": lambda a, k: ([k - x for x in batch] for batch in a),
    "filter": lambda a, k: (batch for batch in a if batch[0] % 3),
    "join": lambda a, k: chain(a, batched(range(k), 2)),
    "batch": batched,
    "whole batch": lambda a, k: batched(a, k, True),
}
UNKNOWN_ORDERS = {"shuffle some", "shuffle without a seed"}
UNKNOWN_SIZES = {
    *("generator", "generated rows", "filter"),
    *("batch and unbatch", "whole batches", "turned batches", "columns"),
}


def _failing_at(bad):
    def fail(x):
        if x == bad:
            raise ZeroDivisionError
        return x

    return fail


FAILURES = {  # at a value; the model has no errors
    "fail": lambda d, bad: d.map(_failing_at(bad)),
    "fail in threads": lambda d, bad: d.map(_failing_at(bad), 3),
    "fail to choose": lambda d, bad: d.filter(lambda x: _failing_at(bad)(x) == x),
}
ALL_ROWS = ROWS | FAILURES
OF_ALL_ROWS = OF_ROWS | dict.fromkeys(FAILURES, OF_ANY["options"])


class Pass:
    """A pass over a model: its number, and the rounds of each shuffle so far."""

    def __init__(self, number=0):
        self.number, self.rounds = number, collections.Counter()


class Pipeline(NamedTuple):
    """A source, transformations of its rows, batches of them, and transformations of these."""

    source: str = "range"
    rows: list[tuple[str, int]] = []
    size: int = 1
    drops: bool = False
    ends: list[tuple[str, int]] = []

    @property
    def names(self):
        return {self.source, *[name for name, _ in [*self.rows, *self.ends]]}

    def make(self):
        """The dataset."""
        dataset = SOURCES[self.source]()
        for name, k in self.rows:
            dataset = ALL_ROWS[name](dataset, k)
        dataset = dataset.batch(self.size, self.drops)
        for name, k in self.ends:
            dataset = BATCHES[name](dataset, k)
        return dataset

    def expected(self, number=0):
        """The batches of a pass, as lists."""
        stages = [(OF_ALL_ROWS.get(name), name, k) for name, k in self.rows]
        stages += [(OF_BATCHES["whole batch" if self.drops else "batch"], "batch", self.size)]
        stages += [(OF_BATCHES.get(name), name, k) for name, k in self.ends]
        return [*_elements(stages, Pass(number))]


def _elements(stages, epoch):
    if not stages:
        return iter(range(N))
    *before, (model, name, k) = stages
    if model is not None:
        return model(_elements(before, epoch), k)
    if name == "cache":
        return _elements(before, Pass())
    if name == "repeat":
        return chain.from_iterable(_elements(before, epoch) for _ in range(k - 1))
    if name == "endless":
        return islice(_endless(before, epoch), 30)
    return _shuffled(stages, epoch)


def _endless(stages, epoch):
    is_empty = False
    while not is_empty:
        is_empty = True
        for element in _elements(stages, epoch):
            is_empty = False
            yield element


def _shuffled(stages, epoch):
    *before, (_, name, seed) = stages
    round_ = epoch.rounds[len(before)]
    epoch.rounds[len(before)] += 1
    values = [*_elements(before, epoch)]
    numbers = (0, 0) if name == "one order" else (epoch.number, round_)
    yield from (values[i] for i in order(len(values), seed, *numbers))


def pipelines(without: Collection[str] = ()):
    """Pipelines of all transformations but some."""

    def chains(stages, length):
        names = st.sampled_from([name for name in stages if name not in without])
        return st.lists(st.tuples(names, st.integers(1, 4)), max_size=length)

    return st.builds(
        Pipeline,
        source=st.sampled_from([*SOURCES]),
        rows=chains(ROWS, 5),
        size=st.integers(1, 7),
        drops=st.booleans(),
        ends=chains(BATCHES, 2),
    )


@st.composite
def failing_pipelines(draw, without: Collection[str] = ()):
    """Pipelines of which a function fails, if its value comes."""
    pipeline = draw(pipelines(without))
    failure = draw(st.sampled_from([*FAILURES])), draw(st.integers(0, 2 * N))
    place = draw(st.integers(0, len(pipeline.rows)))
    rows = [*pipeline.rows[:place], failure, *pipeline.rows[place:]]
    return pipeline._replace(rows=rows)


def attempted(data, values):
    """What a pass yields, and whether an error ends it; nothing comes after that."""
    found, iterator = [], iter(data)
    try:
        found += map(values, iterator)
    except ZeroDivisionError:
        found.append("an error")
    assert [*iterator] == []
    return found


def check_resuming(data, fresh, values, stop, path):
    """Stops a pass of `data` and saves it; `fresh` datasets go on there, and in the next pass.

    Args:
        data, fresh: a dataset, distributed or not, and two of the same pipeline.
        values: what to compare of an element.
        stop: after how many elements; if `None`, before the pass begins.
        path: where to save.

    Returns:
        What two passes of `data` yield.
    """
    if stop is None:
        Checkpoint(data=data).save(path)
        Checkpoint(data=fresh[0]).restore(path)
        passes = [[*map(values, data)] for _ in range(2)]
        assert [[*map(values, fresh[0])] for _ in range(2)] == passes
        return passes
    iterator = iter(data)
    first = [*map(values, islice(iterator, stop))]
    Checkpoint(data=data, iterator=iterator).save(path)
    resumed = iter(fresh[1])
    Checkpoint(data=fresh[0], iterator=resumed).restore(path)
    rest = [*map(values, iterator)]
    passes = [rest, *([*map(values, data)] for _ in range(2))]
    assert [*map(values, resumed)] == rest
    is_over = len(first) < stop
    assert [[*map(values, fresh[0])] for _ in range(2)] == passes[is_over : is_over + 2]
    return [first + rest, passes[1]]


def shares(batch, size):
    """The even parts of one batch, the longer ones first."""
    ends = np.cumsum([len(batch) // size + (r < len(batch) % size) for r in range(size)])
    return [list(batch[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def check_steps(passes, pipeline, size, deals):
    """Compares `[pass][step][rank]`, the parts that ranks get, with the batches of one process.

    Args:
        deals: whether ranks get whole batches in turn, and not parts of each.
    """
    if "shuffle without a seed" in pipeline.names:
        return
    alone = pipeline.make()
    for found in passes:
        batches, errors = attempted(alone, np.ndarray.tolist), []
        if batches[-1:] == ["an error"]:
            errors = [[batches.pop()] * size]
        steps = [batches[i : i + size] for i in range(0, len(batches), size)]
        if not deals:
            steps = [shares(batch, size) for batch in batches]
        elif missing := -len(batches) % size:
            *steps, last = steps
            steps += [] if errors else [last + [[]] * missing]
        assert found == steps + errors
