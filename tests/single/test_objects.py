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


@pytest.mark.parametrize(
    "dtype",
    [
        *[np.int8, np.float64, np.complex64, bool, ">i4", "U5", "M8[s]"],
        pytest.param([("id", "i4"), ("weight", "f8", (2,))], id="fields"),
        "bfloat16",
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 3), (2, 3, 4), (40, 50)], ids=str)
def test_arrays(dtype, shape):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed").bfloat16
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
        assert found.flags.f_contiguous or not given.flags.f_contiguous


def test_subclasses_of_arrays():
    masked = np.ma.masked_less(np.arange(300.0), 2)
    table = np.ones(300, [("id", "i4"), ("weight", "f8")]).view(np.recarray)
    for given in (masked, table):
        found = travelled(given)
        assert type(found) is type(given) and (found == given).all()
    assert travelled(masked).mask.sum() == 2
    assert travelled(table).weight.sum() == 300


def test_read_only_arrays_come_as_writable_ones():
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    for given in (frozen, frozen.T, np.broadcast_to(np.float32(2), (30, 30)), frozen[:, 1]):
        found = travelled(given)
        assert np.array_equal(found, given)
        found[...] = 0
    assert frozen.sum() == 15


def test_one_array_twice_is_one_array():
    array = np.arange(3)
    first, second = travelled([array, array])
    assert first is second
