import numpy as np
import pytest
from internals import records


def travelled(obj, room=0):
    nbytes, write = records.pack_object(obj)
    target = np.full(nbytes + room, 255, np.uint8)
    write(target)
    assert (target[nbytes:] == 255).all()
    found = records.load_object(target)
    target[:] = 0  # the result must not share its memory
    return found


@pytest.mark.parametrize(
    "obj", [None, 0, "text", {"a": [1, (2.5, b"c")]}, {1, 2}, ValueError("v").args, []], ids=str
)
def test_plain_objects(obj):
    assert travelled(obj) == obj
    assert travelled(obj, room=100) == obj


@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.complex64, bool, ">i4", "U5", "M8[s]"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (2, 3, 4)], ids=str)
def test_arrays(dtype, shape):
    array = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype("i8").astype(dtype)
    for given in (
        array,
        np.asfortranarray(array),
        array[..., ::-1] if array.ndim else array,
        array.T,
    ):
        found = travelled({"x": given})["x"]
        assert (
            found.dtype.newbyteorder("=") == given.dtype.newbyteorder("=")
            and found.shape == given.shape
        )
        assert np.array_equal(found, given)
        assert found.flags.writeable


def test_arrays_are_not_copied_into_the_pickle():
    sizes = [
        part.nbytes for part in records.pickled([np.zeros(1_000_000), np.zeros((1000, 1000)).T])
    ]
    assert sum(sizes) < 16_000_000 + 2000
    assert sum(nbytes > 1_000_000 for nbytes in sizes) == 2


def test_read_only_arrays_come_as_writable_ones():
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    for given in (frozen, frozen.T, np.broadcast_to(np.float32(2), (3, 3)), frozen[:, 1]):
        found = travelled(given)
        assert np.array_equal(found, given)
        found[...] = 0
    assert frozen.sum() == 15


def test_one_array_twice_is_one_array():
    array = np.arange(3)
    first, second = travelled([array, array])
    assert first is second
