"""Random orders, rounds of repeats, and positions that a checkpoint saves for another program."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from pipelines import items, order

import hpcstrat as hs
from hpcstrat import TensorSpec
from hpcstrat.checkpoint import Checkpoint
from hpcstrat.data import AUTOTUNE, Dataset

MAKERS = {  # with and without random access
    "indexed": lambda n: Dataset.range(n),
    "generated": lambda n: Dataset.from_generator(lambda: iter(range(n)), np.int64),
    "mapped": lambda n: Dataset.range(1, n + 1).map(lambda x: x - 1, AUTOTUNE),
    "joined": lambda n: Dataset.range(n // 2).concatenate(Dataset.range(n // 2, n)),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@hypothesis.given(n=st.integers(0, 60), size=st.integers(1, 70), seed=st.integers(-(2**63), 2**63))
def test_a_shuffle_is_a_permutation_that_moves_nothing_further_forward_than_the_buffer(
    n, size, seed
):
    for maker in MAKERS.values():
        found = items(maker(n).shuffle(size, seed))
        assert sorted(found) == list(range(n))
        assert all(x <= place + size - 1 for place, x in enumerate(found))


@pytest.mark.parametrize("name", ["indexed", "generated"])
def test_each_slot_of_the_buffer_is_drawn_equally_often(name):
    first = np.zeros(20)
    for seed in range(200):
        first[next(iter(MAKERS[name](20).shuffle(7, seed)))] += 1
    assert first[7:].sum() == 0
    assert (abs(first[:7] - 200 / 7) < 25).all()  # five standard deviations


@pytest.mark.parametrize("size", [3, 100])
def test_seeds_passes_and_rounds_have_orders_of_their_own(make, size):
    def passes(**kwargs):
        dataset = make(50).shuffle(size, **kwargs)
        return [items(dataset) for _ in range(3)]

    first = passes(seed=4)
    assert passes(seed=4) == first and passes(seed=5)[0] != first[0]
    still = passes(seed=4, reshuffle_each_iteration=False)
    assert still[0] == still[1] == still[2] == first[0]
    repeated = make(50).shuffle(size, seed=4).repeat(3)
    rounds = [items(repeated) for _ in range(2)]
    assert [found[:50] for found in rounds] == first[:2]
    every = [tuple(found[start : start + 50]) for found in rounds for start in (0, 50, 100)]
    assert len({*every, tuple(first[2])}) == 7


def test_unseeded_shuffles_have_orders_of_their_own():
    one, other = (Dataset.range(20).shuffle(20) for _ in range(2))
    orders = [items(dataset) for dataset in (one, one, one, other)]
    assert len(set(map(tuple, orders))) == 4
    pairs = items(Dataset.zip(one, other))
    assert [a for a, _ in pairs] != [b for _, b in pairs]
    cached = one.cache()
    assert items(cached) == items(cached) == items(cached.repeat(2))[20:]


def test_a_pass_is_counted_when_it_begins():
    """So two at once have orders of their own, whichever is read first, and so has the next."""
    dataset = Dataset.range(20).shuffle(20, seed=1)
    first, second = iter(dataset), iter(dataset)
    next(second)
    assert items(first) == order(20, 1, 0) and items(second) == order(20, 1, 1)[1:]
    assert items(dataset) == order(20, 1, 2)


def test_a_look_at_the_elements_counts_no_pass():
    dataset = Dataset.range(10).shuffle(10, seed=3)
    mapped = dataset.map(lambda x: x)
    for _ in range(2):
        _ = mapped.element_spec, mapped.cardinality(), repr(mapped)
    assert items(mapped) == order(10, 3, 0) and items(dataset) == order(10, 3, 1)


# ---- repeats


def rounds(*sizes):
    """A generator whose rounds have these numbers of elements."""
    left = iter(sizes)
    return Dataset.from_generator(
        lambda: iter(range(next(left))), output_signature=TensorSpec((), np.int64)
    )


def test_rounds_without_elements_end_no_repeat():
    assert items(rounds(1, 0, 2, 3).repeat(3)) == [0, 0, 1]
    assert items(rounds(0, 0, 2).repeat(3).batch(2)) == [[0, 1]]
    assert items(rounds(0, 1).shuffle(3).repeat(2)) == [0]
    assert items(rounds(*[2] * 9).take(0).repeat(3)) == []


def test_an_endless_repeat_ends_with_a_round_without_elements():
    """As in TensorFlow, where after a shuffle only the first round counts."""
    assert items(rounds(1, 2, 0, 2).repeat()) == [0, 0, 1]
    assert items(rounds(0, 2).repeat()) == items(rounds(0, 2).shuffle(9).repeat()) == []
    assert items(rounds(1, 0, 0, 1, 0, 1).shuffle(9).repeat().take(3)) == [0, 0, 0]
    assert items(Dataset.range(9).take(0).shuffle(9).repeat()) == []
    assert items(Dataset.range(9).skip(-1).repeat()) == []


def test_an_endless_repeat_of_an_iterator_that_is_used_up_is_an_error():
    numbers = iter(range(3))
    dataset = Dataset.from_generator(lambda: numbers, np.int64).shuffle(9, seed=0).repeat()
    iterator = iter(dataset)
    assert sorted(next(iterator) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"Dataset\.repeat: after 3 elements .* new iterator"):
        next(iterator)


# ---- positions


@pytest.mark.parametrize("taken", [0, 2, 7])
def test_another_pipeline_is_refused_between_epochs_too(tmp_path, taken):
    dataset = Dataset.range(6).shuffle(6, seed=1)
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator, None)
    Checkpoint(data=dataset).save(tmp_path / "saved")
    for other in (
        Dataset.range(9).shuffle(6, seed=1),
        Dataset.range(6).shuffle(6, seed=2),
        Dataset.range(6).shuffle(5, seed=1),
        Dataset.range(6),
        Dataset.range(6).shuffle(6, seed=1).map(abs),
    ):
        with pytest.raises(ValueError, match="its pipeline (is|has) .* and the saved one"):
            Checkpoint(data=other).restore(tmp_path / "saved")


@pytest.mark.parametrize("threads", [None, 3])
def test_a_position_after_an_error_is_that_of_the_element_that_failed(tmp_path, threads):
    broken = [3]

    def make():
        def check(x):
            if x in broken:
                raise KeyError(f"no {x}")
            return x

        return Dataset.range(8).map(check, threads).batch(2)

    dataset = make()
    iterator = iter(dataset)
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyError, match="no 3"):
        next(iterator)
    Checkpoint(data=dataset, iterator=iterator).save(tmp_path / "saved")
    assert [*iterator] == []
    for _ in range(2):
        fresh = make()
        resumed = iter(make())
        Checkpoint(data=fresh, iterator=resumed).restore(tmp_path / "saved")
        for again in iter(fresh), resumed:
            if broken:
                with pytest.raises(KeyError, match="no 3"):
                    next(again)
            else:
                assert items(again) == [[2, 3], [4, 5], [6, 7]]
        broken.clear()
    assert items(dataset) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("size", "drops"), [(1, False), (2, True), (4, False), (4, True)])
def test_a_pass_of_unknown_length_is_resumed_behind_its_short_last_batch(tmp_path, size, drops):
    """After 4 batches of 4, nobody knows that there were only 13 elements."""

    def make(size, drops=False):
        return Dataset.range(13).filter(lambda x: x >= 0).batch(size, drops)

    data = make(4)
    iterator = iter(data)
    assert [len(next(iterator)) for _ in range(4)] == [4, 4, 4, 1]
    Checkpoint(data=data).save(tmp_path / "saved")
    data = make(size, drops)
    Checkpoint(data=data).restore(tmp_path / "saved")
    assert list(data) == []


def test_a_generator_that_ends_before_a_position_is_an_error(tmp_path):
    sizes = iter([6, 2])
    data = Dataset.from_generator(lambda: range(next(sizes)), np.int64)
    iterator = iter(data)
    for _ in range(4):
        next(iterator)
    Checkpoint(data=data).save(tmp_path / "saved")
    Checkpoint(data=data).restore(tmp_path / "saved")
    with pytest.raises(ValueError, match="is resumed after 4 elements, but .* has only 2 now"):
        list(data)


# ---- loaders of other libraries, which draw their own orders


class Loader:
    """Like torchdata's StatefulDataLoader, which draws an order when a pass begins.

    After `load_state_dict`, the next pass goes on where the state was taken.
    """

    def __init__(self, seed=0):
        self._random, self._left = np.random.default_rng(seed), []
        self._is_restored = False

    def state_dict(self):
        order = {"left": [*self._left], 0: (None, 2.5, b"x")}
        return {"random": self._random.bit_generator.state, "order": order, "rows": np.arange(2)}

    def load_state_dict(self, state):
        self._random.bit_generator.state, self._left = state["random"], state["order"]["left"]
        assert state["order"][0] == (None, 2.5, b"x") and state["rows"].tolist() == [0, 1]
        self._is_restored = True

    def __iter__(self):
        if not (self._is_restored and self._left):
            self._left = self._random.permutation(8).reshape(4, 2).tolist()
        self._is_restored = False
        return self._batches()

    def _batches(self):
        while self._left:
            yield np.array(self._left.pop(0))


@pytest.mark.parametrize(("epochs", "taken"), [(0, 0), (0, 3), (2, 0), (2, 1), (2, 4)])
def test_the_orders_of_a_loader_with_a_state_are_resumed(tmp_path, epochs, taken):
    strategy = hs.CentralStorageStrategy()

    def take(iterator, steps):
        return [next(iterator).tolist() for _ in range(steps)]

    data = strategy.experimental_distribute_dataset(Loader())
    for _ in range(epochs):
        take(iter(data), 4)
    iterator = iter(data) if taken else None
    first = take(iterator, taken) if iterator else []
    Checkpoint(data=data).save(tmp_path / "saved")
    fresh = strategy.experimental_distribute_dataset(Loader())
    Checkpoint(data=fresh).restore(tmp_path / "saved")
    alone = Loader()
    passes = [[batch.tolist() for batch in alone] for _ in range(epochs + 2)]
    assert first == passes[epochs][:taken]
    assert items(fresh) == passes[epochs][taken:] and items(fresh) == passes[epochs + 1]


@pytest.mark.parametrize("wrong", [{1}, np.array([None]), np.zeros(1, "i4,f4")], ids=repr)
def test_a_state_that_no_file_can_hold_is_refused_when_it_is_saved(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(Loader, "state_dict", lambda self: {"wrong": wrong})
    data = hs.CentralStorageStrategy().experimental_distribute_dataset(Loader())
    with pytest.raises(TypeError, match=r"^Checkpoint\.save: .*Loader.* state has an? "):
        Checkpoint(data=data).save(tmp_path / "saved")
