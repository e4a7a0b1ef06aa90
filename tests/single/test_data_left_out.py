"""Methods that `tf.data.Dataset` has and `Dataset` leaves to NumPy and Python: what to write instead."""

import functools
import glob
import itertools
import operator
import re
import sys

import numpy as np
import pytest
from internals import DATA_INSTEAD
from test_data_dataset import items

import hpcstrat as hs
from hpcstrat.data import Dataset, InputOptions, Optional, Options

ROWS = np.arange(12).reshape(3, 4)
NAMES = {
    "hs": hs,
    "np": np,
    "sys": sys,
    "glob": glob,
    "itertools": itertools,
    "functools": functools,
    "Dataset": Dataset,
    "from_tensor_slices": Dataset.from_tensor_slices,
}
# What the line needs, and the elements that TensorFlow's method gives for the same.
LINES = {
    "flat_map": ({"n": 3, "rows": 4, "parts": ROWS}, [*range(12)]),
    "interleave": ({"n": 3, "rows": 4, "parts": ROWS}, ROWS.T.ravel().tolist()),
    "padded_batch": (
        {"dataset": Dataset.range(1, 4).map(lambda n: np.full(n, n)), "size": 3, "n": 2},
        [[[1, 0, 0], [2, 2, 0]], [[3, 3, 3]]],
    ),
    "window": ({"x": np.arange(7), "size": 3, "shift": 2}, [[0, 1, 2], [2, 3, 4], [4, 5, 6]]),
    "choose_from_datasets": (
        {"which": [0, 2, 0], "place": [0, 0, 1], "parts": ROWS},
        [0, 8, 1],
    ),
    "scan": ({"dataset": Dataset.range(5), "function": operator.add}, [0, 1, 3, 6, 10]),
    "apply": ({"dataset": Dataset.range(3), "function": lambda d: d.skip(1)}, [1, 2]),
    "rebatch": ({"dataset": Dataset.range(5).batch(2), "n": 3}, [[0, 1, 2], [3, 4]]),
}


def of_line(name, **names):
    return eval(DATA_INSTEAD[name], NAMES | names)


@pytest.mark.parametrize("name", LINES)
def test_a_line_makes_the_elements_of_the_method(name):
    names, expected = LINES[name]
    assert items(of_line(name, **names)) == expected


def test_lines_of_other_results(tmp_path):
    drawn = items(of_line("sample_from_datasets", x=np.arange(3), n=300, p=[0.5, 0.5, 0]))
    assert len(drawn) == 300 and {*drawn} == {0, 1}
    assert items(of_line("counter", start=3, step=-2).take(0)) == []
    assert items(of_line("counter", start=3, step=2).take(3)) == [3, 5, 7]
    assert of_line("reduce", dataset=Dataset.range(5), function=operator.add, initial=10) == 20
    one = {"dataset": Dataset.from_tensors(5)}
    exec(DATA_INSTEAD["get_single_element"], NAMES, one)
    assert one["element"] == 5
    path = tmp_path / "array.npy"
    of_line("save", dataset=Dataset.range(4).batch(2), path=path)
    assert items(of_line("load", path=path)) == [[0, 1], [2, 3]]
    assert items(of_line("list_files", pattern=f"{tmp_path}/*.npy")) == [str(path)]


@pytest.mark.parametrize("name", DATA_INSTEAD)
def test_a_method_that_is_left_out_says_what_to_write_instead(name):
    line = re.escape(DATA_INSTEAD[name])
    for owner in Dataset, Dataset.range(3):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=f"^Dataset.{name} does not exist; write {line}$"):
            getattr(owner, name)
        assert name not in dir(owner)


def test_all_that_is_left_out_is_said():
    others = "save load sample_from_datasets counter reduce get_single_element list_files options"
    assert {*LINES, *others.split()} == {*DATA_INSTEAD}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Optional, "from_value"),
        (Optional, "empty"),
        (Optional, "element_spec"),
        (Options, "merge"),
        (InputOptions(), "even_batches"),
    ],
)
def test_other_names_are_unknown(owner, name):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(owner, name)


def test_a_cache_is_in_memory():
    cache: object = Dataset.range(3).cache
    with pytest.raises(TypeError, match="positional argument"):
        cache("file")  # pyright: ignore
    with pytest.raises(TypeError, match="even_batches"):
        InputOptions(even_batches=True)  # pyright: ignore
