"""Threads that prepare elements: they overlap, keep the order, and end with their iterator."""

import contextvars
import gc
import itertools
import threading

import numpy as np
import pytest
from test_data_dataset import BAD, attempts, items, odd_one_out

from hpcstrat.data import AUTOTUNE, Dataset

SECONDS = 30  # until a wait counts as a failure


def input_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hpcstrat-input")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    for thread in input_threads():
        thread.join(0.1)
    if input_threads():
        gc.collect()
    for thread in input_threads():
        thread.join(SECONDS)
    assert not input_threads()


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


MAPPED = {
    "indexed": lambda f: Dataset.range(12).map(f, num_parallel_calls=3),
    "generated": lambda f: Dataset.from_generator(lambda: iter(range(12)), np.int64).map(
        f, num_parallel_calls=3
    ),
    "batches": lambda f: Dataset.range(24).batch(2).map(f, num_parallel_calls=3),
    "rows": lambda f: Dataset.range(12).map(f, num_parallel_calls=3).batch(6),
    "generated rows": lambda f: (
        Dataset.from_generator(lambda: iter(range(12)), np.int64).map(f, 3).batch(6)
    ),
    "taken": lambda f: Dataset.range(20).map(f, num_parallel_calls=3).take(12),
    "repeated and prefetched": lambda f: (
        Dataset.range(6).map(f, num_parallel_calls=3).repeat(2).prefetch(2)
    ),
    "after a function": lambda f: (
        Dataset.range(12).map(lambda x: x).map(f, num_parallel_calls=3).prefetch(1)
    ),
    "before a function": lambda f: (
        Dataset.range(12).map(f, num_parallel_calls=3).filter(lambda x: True)
    ),
}


@pytest.mark.parametrize("pipeline", MAPPED)
def test_as_many_calls_as_asked_for_run_at_once(pipeline):
    expected = items(MAPPED[pipeline](lambda x: x))
    together = Together(3)
    assert items(MAPPED[pipeline](together)) == expected
    assert together.most == 3


def test_autotune_is_several():
    together = Together(8)
    assert items(Dataset.range(16).map(together, num_parallel_calls=AUTOTUNE)) == list(range(16))


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
    names = set()
    list(Dataset.range(3).map(lambda x: names.add(threading.current_thread()) or x))
    assert names == {threading.current_thread()}


def test_a_function_that_is_not_to_run_in_threads_does_not():
    """Next to a function that runs in threads."""
    alone, together = Together(1), Together(3)
    dataset = Dataset.range(12).map(together, num_parallel_calls=3).map(alone)
    assert items(dataset.prefetch(2)) == list(range(12))
    assert items(
        Dataset.range(12).map(alone).map(Together(3), num_parallel_calls=3).prefetch(2)
    ) == list(range(12))
    assert alone.most == 1


@pytest.mark.parametrize("number", [0, -2])
def test_numbers_of_threads(number):
    for call in (
        lambda: Dataset.range(3).map(lambda x: x, num_parallel_calls=number),
        lambda: Dataset.range(3).interleave(Dataset.range, num_parallel_calls=number),
    ):
        with pytest.raises(
            ValueError, match=f"num_parallel_calls is {number}; it must be at least 1"
        ):
            call()


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
    iterator = iter(
        Dataset.range(10)
        .map(lambda x: made.append(x) or (x == 2 and are_ready.set()) or x)
        .prefetch(2)
    )
    assert next(iterator) == 0
    assert are_ready.wait(SECONDS)
    for thread in input_threads():
        thread.join(0.05)  # long enough to prepare many more
    assert len(made) <= 1 + 2 + 1
    assert not items(Dataset.range(3).prefetch(0).skip(3)) and made == sorted(made)


def test_an_error_is_raised_when_its_turn_comes():
    dataset = Dataset.range(7).map(lambda x: odd_one_out(2, 5)(x) and x).prefetch(4)
    assert attempts(dataset) == attempts(dataset) == [0, 1, BAD, 3, 4, BAD, 6]

    def fail():
        yield 1
        raise KeyboardInterrupt

    iterator = iter(Dataset.from_generator(fail).prefetch(2))
    assert next(iterator) == 1
    with pytest.raises(KeyboardInterrupt):
        next(iterator)


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 11])
def test_rounds_that_only_the_thread_has_reached_do_not_count(taken):
    def orders(size):
        made, is_ahead = [], threading.Event()

        def note(x):
            made.append(x)
            if len(made) == min(15, taken + size):
                is_ahead.set()
            return x

        dataset = Dataset.range(5).shuffle(5, seed=3).repeat(3).map(note).prefetch(size)
        iterator = iter(dataset)
        first = items(itertools.islice(iterator, taken))
        assert not size or not taken or is_ahead.wait(SECONDS)
        del iterator
        return first, items(dataset), items(dataset)

    assert orders(8) == orders(0)


def test_functions_see_the_context_of_the_program():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(3)
    assert items(Dataset.range(4).map(lambda x: variable.get(), num_parallel_calls=2)) == [3] * 4
    assert items(Dataset.range(4).map(lambda x: variable.get()).prefetch(2)) == [3] * 4


# ---- interleave


def test_datasets_are_read_at_once():
    barrier = threading.Barrier(3)

    def numbers(x):
        barrier.wait(SECONDS)
        yield from range(10 * x, 10 * x + 2)

    def dataset(x):
        return Dataset.from_generator(numbers, np.int64, args=(x,))

    found = Dataset.range(6).interleave(dataset, cycle_length=3, num_parallel_calls=3)
    assert items(found) == [0, 10, 20, 1, 11, 21, 30, 40, 50, 31, 41, 51]


@pytest.mark.parametrize("threads", [1, 2, AUTOTUNE])
def test_the_turns_are_those_without_threads(threads):
    def numbers(x):
        for i in range(x % 4):
            yield 10 * x + i
        if x == 5:
            raise ZeroDivisionError

    def dataset(x):
        if x == 2:
            raise ZeroDivisionError
        return Dataset.from_generator(numbers, np.int64, args=(int(x),))

    for cycle, block in itertools.product((1, 2, 3, 20), (1, 3)):
        plain, threaded = (
            Dataset.range(9).interleave(dataset, cycle, block, num_parallel_calls=number)
            for number in (None, threads)
        )
        assert attempts(threaded) == attempts(plain)


# ---- the end


ENDED = {
    "map": lambda f: Dataset.range(100).map(f, num_parallel_calls=3),
    "prefetch": lambda f: Dataset.range(100).map(f).prefetch(3),
    "both": lambda f: Dataset.range(100).map(f, num_parallel_calls=2).batch(2).prefetch(3),
    "interleave": lambda f: Dataset.range(100).interleave(
        lambda x: Dataset.from_generator(lambda: map(f, range(5)), np.int64),
        4,
        num_parallel_calls=3,
    ),
}


@pytest.mark.parametrize("pipeline", ENDED)
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_threads_end_with_an_iterator_that_is_dropped(pipeline, taken):
    iterator = iter(ENDED[pipeline](lambda x: x))
    for _ in range(taken):
        next(iterator)
    del iterator  # the fixture checks for threads


def test_threads_end_with_a_call_that_lasts():
    may_end = threading.Event()
    iterator = iter(Dataset.range(9).map(lambda x: x == 0 or may_end.wait(SECONDS)).prefetch(2))
    next(iterator)
    del iterator
    gc.collect()
    may_end.set()
