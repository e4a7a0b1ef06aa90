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


@pytest.mark.parametrize("wrong", [{1}, np.array([None]), np.zeros(1, "i4,f4")], ids=repr)
def test_a_state_that_no_file_can_hold_is_refused_when_it_is_saved(tmp_path, wrong):
    class Loader(list):
        def state_dict(self):
            return {"wrong": wrong}

        def load_state_dict(self, state):
            raise AssertionError

    data = hs.CentralStorageStrategy().experimental_distribute_dataset(Loader([np.arange(2)]))
    with pytest.raises(TypeError, match=r"^Checkpoint\.save: .*Loader.* state has an? "):
        Checkpoint(data=data).save(tmp_path / "saved")
