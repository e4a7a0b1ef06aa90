import ml_dtypes
import numpy as np
import pytest
from internals import Layout, layout_of


def forms(*pairs):
    return tuple(shape for shape, _ in pairs), tuple(np.dtype(dtype) for _, dtype in pairs)


MIXED = forms(
    ((3,), np.int8),
    ((), np.float64),
    ((2, 2), np.int8),
    ((0, 5), np.float32),
    ((5,), np.float64),
    ((1,), np.complex64),
)


def test_arrays_of_one_dtype_lie_back_to_back():
    form = Layout(*MIXED)
    assert [(group.dtype.name, group.elements) for group in form.groups] == [
        ("int8", 7),
        ("float64", 6),
        ("float32", 0),
        ("complex64", 1),
    ]
    assert form.starts == [0, 16, 3, 64, 24, 64]
    assert form.nbytes == 72


@pytest.mark.parametrize("room", [0, 40])
def test_what_is_written_is_seen(room):
    form = Layout(*MIXED)
    arrays = [
        (np.arange(np.prod(shape)).reshape(shape) + i).astype(dtype)
        for i, (shape, dtype) in enumerate(zip(*MIXED, strict=True))
    ]
    message = np.full(form.nbytes + room, 255, np.uint8)
    form.write(message, arrays)
    for view, array in zip(form.views(message), arrays, strict=True):
        assert view.dtype == array.dtype and view.shape == array.shape
        assert np.array_equal(view, array)
        assert view.size == 0 or np.shares_memory(view, message)
    assert (message[form.nbytes :] == 255).all()
    assert form.groups[0].of(message).tolist() == [0, 1, 2, 2, 3, 4, 5]
    assert form.groups[1].of(message).tolist() == [1, 4, 5, 6, 7, 8]
    assert form.groups[2].of(message).tolist() == []


def test_any_memory_order_is_written_row_by_row():
    array = np.arange(12.0).reshape(3, 4)
    form = Layout(*forms(((4, 3), np.float64)))
    message = np.empty(form.nbytes, np.uint8)
    for given in (array.T, np.asfortranarray(array.T), array.T[::-1][::-1]):
        message[:] = 0
        form.write(message, [given])
        assert form.views(message)[0].tolist() == array.T.tolist()
        assert form.views(message)[0].flags.c_contiguous


def test_nothing():
    form = Layout((), ())
    assert (form.nbytes, form.groups, form.views(np.empty(0, np.uint8))) == (0, [], [])


def test_one_layout_for_equal_arrays():
    assert layout_of(*MIXED) is layout_of(*MIXED)
    assert layout_of(*MIXED) is not layout_of(*forms(((3,), np.int8)))
    half = layout_of(*forms(((3,), ml_dtypes.bfloat16)))
    assert half is not layout_of(*forms(((3,), np.float16)))
    assert half.groups[0].dtype == ml_dtypes.bfloat16
