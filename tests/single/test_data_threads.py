"""Threads that prepare elements: they overlap, keep the order, and end with their iterator."""

import contextvars
import gc
import threading

import numpy as np
import pytest
from internals import distribute_dataset, distribute_from_function, select
from pipelines import items
from thread_ranks import on_ranks

from hpcstrat.data import AUTOTUNE, Dataset

SECONDS = 30  # until a wait counts as a failure


def input_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hpcstrat-input")]


def check_that_threads_end():
    for thread in input_threads():
        thread.join(0.1)
    if input_threads():
        gc.collect()
    for thread in input_threads():
        thread.join(SECONDS)
    assert not input_threads()


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    check_that_threads_end()


class Together:
    """A function of which exactly `count` calls must run at once, never more."""

    def __init__(self, count):
        self.count = count
        self.most = self.running = 0
        self._barrier = threading.Barrier(count)
        self._lock = threading.Lock()

    def __call__(self, x):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        self._barrier.wait(SECONDS)
        with self._lock:
            self.running -= 1
        return x


def generated(n):
    return Dataset.from_generator(lambda: iter(range(n)), np.int64)


ON_RANKS = {  # 16 calls on each rank
    "rows": lambda f, size: Dataset.range(16 * size).map(f, AUTOTUNE).batch(2 * size),
    "shuffled rows": lambda f, size: (
        generated(16 * size).shuffle(9, seed=1).map(f, 8).batch(2 * size)
    ),
    "batches": lambda f, size: generated(16 * size).batch(size).map(f, 8),
    "dealt batches": lambda f, size: Dataset.range(32 * size).batch(2).map(f, 8),
}


@pytest.mark.parametrize("pipeline", ON_RANKS)
def test_calls_overlap_between_batches_on_each_rank(pipeline):
    def program(rank):
        def steps(function):
            dataset = ON_RANKS[pipeline](function, rank.size)
            if pipeline == "dealt batches":
                data = distribute_from_function(lambda context: dataset, rank, None)
            else:
                data = distribute_dataset(dataset, rank, None)
            return [select(x).tolist() for x in data]

        together = Together(8)
        assert steps(together) == steps(lambda x: x)
        return together.most

    for size in range(1, 4):
        assert on_ranks(size, program) == [8] * size


def test_the_threads_of_an_iteration_are_the_same_for_all_its_batches():
    def program(rank):
        threads = set()  # keeps them, so that none has the number of another
        dataset = Dataset.range(600).map(
            lambda x: threads.add(threading.current_thread()) or x, num_parallel_calls=4
        )
        assert len(list(distribute_dataset(dataset.batch(3), rank, None))) == 200
        return len(threads)

    assert all(1 <= count <= 5 for count in on_ranks(2, program))  # with the caller


AHEAD = {  # the elements of a step, and the pipeline
    "elements": (1, lambda data, f: data.map(f, 4)),
    "rows": (5, lambda data, f: data.map(f, 4).batch(5)),
    "a function after": (1, lambda data, f: data.map(f, 4).map(lambda x: x)),
    "filtered": (1, lambda data, f: data.map(f, 4).filter(lambda x: True)),
    "zipped": (1, lambda data, f: Dataset.zip(data.map(f, 4), data)),
    "skipped": (1, lambda data, f: data.map(f, 4).skip(0).take(99)),
}


@pytest.mark.parametrize("pipeline", AHEAD)
def test_no_more_calls_are_begun_than_asked_for(pipeline):
    count, make = AHEAD[pipeline]
    for data in Dataset.range(100), generated(100):
        called = []
        iterator = iter(make(data, lambda x, called=called: called.append(int(x)) or x))
        assert called == []
        for taken in range(1, 90 // count):
            next(iterator)
            assert taken * count <= len(called) <= taken * count + 4


def test_the_order_is_kept_whatever_the_pace():
    """Each call waits for the next call."""
    done = [threading.Event() for _ in range(9)]

    def backwards(x):
        if x % 3 < 2:
            assert done[x + 1].wait(SECONDS)
        done[x].set()
        return x

    assert items(Dataset.range(9).map(backwards, num_parallel_calls=3)) == list(range(9))


def test_without_a_number_one_call_runs_at_a_time():
    together = Together(1)
    assert items(Dataset.range(6).map(together).batch(2).prefetch(2)) == [[0, 1], [2, 3], [4, 5]]
    assert together.most == 1
    seen = items(Dataset.range(3).map(lambda x: threading.get_ident()))
    assert {*seen} == {threading.get_ident()}


# ---- prefetch


@pytest.mark.parametrize("size", [1, 3, None, AUTOTUNE])
def test_elements_are_prepared_ahead_of_their_use(size):
    ahead = 2 if size in (None, AUTOTUNE) else size
    made = [threading.Event() for _ in range(10)]
    iterator = iter(Dataset.range(10).map(lambda x: made[x].set() or x).prefetch(size))
    assert not made[0].is_set()  # nothing runs before the first element is requested
    for x in range(10 - ahead):
        assert next(iterator) == x
        assert made[x + ahead].wait(SECONDS)
    assert list(iterator) == list(range(10 - ahead, 10))


def test_no_more_are_prepared_than_asked_for():
    made, are_ready = [], threading.Event()
    dataset = Dataset.range(10).map(lambda x: made.append(x) or (x == 2 and are_ready.set()) or x)
    iterator = iter(dataset.prefetch(2))
    assert next(iterator) == 0
    assert are_ready.wait(SECONDS)
    for thread in input_threads():
        thread.join(0.05)  # long enough to prepare many more
    assert len(made) <= 1 + 2 + 1 and made == sorted(made)


def test_an_interrupt_of_a_generator_comes_when_its_turn_comes():
    def fail():
        yield 1
        raise KeyboardInterrupt

    iterator = iter(Dataset.from_generator(fail).prefetch(2))
    assert next(iterator) == 1
    with pytest.raises(KeyboardInterrupt):
        next(iterator)


def test_functions_see_the_context_of_the_program():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(3)
    assert items(Dataset.range(4).map(lambda x: variable.get(), num_parallel_calls=2)) == [3] * 4
    assert items(Dataset.range(4).map(lambda x: variable.get()).prefetch(2)) == [3] * 4


# ---- the end


ENDED = {
    "map": lambda: Dataset.range(100).map(lambda x: x, num_parallel_calls=3),
    "prefetch": lambda: Dataset.range(100).map(lambda x: x).prefetch(3),
    "both": lambda: Dataset.range(100).map(lambda x: x, num_parallel_calls=2).batch(2).prefetch(3),
}


@pytest.mark.parametrize("pipeline", ENDED)
def test_threads_end_with_an_iterator_that_is_dropped(pipeline):
    for taken in 0, 1, 7:
        iterator = iter(ENDED[pipeline]())
        for _ in range(taken):
            next(iterator)
        del iterator
        check_that_threads_end()


def test_threads_end_with_a_call_that_lasts():
    may_end = threading.Event()
    iterator = iter(Dataset.range(9).map(lambda x: x == 0 or may_end.wait(SECONDS)).prefetch(2))
    next(iterator)
    del iterator
    gc.collect()
    may_end.set()
