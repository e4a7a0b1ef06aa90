import numpy as np
import pytest

import hpcstrat as hs


@pytest.mark.parametrize("op", list(hs.ReduceOp))
def test_operations_by_name(op):
    for form in (op, op.name, op.name.lower(), op.name.capitalize()):
        assert hs.ReduceOp.parse(form, "call") is op
    assert op.value == op.name


@pytest.mark.parametrize(
    "wrong",
    ["", "ADD", None, 0, b"SUM", hs.VariableAggregation.SUM],
    ids=["empty", "ADD", "None", "0", "bytes", "another enumeration"],
)
def test_what_is_no_operation(wrong):
    with pytest.raises(
        ValueError,
        match=r"^some_call: reduce_op is .*; it must be one of ReduceOp.SUM, ReduceOp.MEAN",
    ):
        hs.ReduceOp.parse(wrong, "some_call")


def test_choices_name_their_argument():
    assert hs.Variable(1.0, aggregation="mean").aggregation is hs.VariableAggregation.MEAN
    with pytest.raises(
        ValueError, match=r"aggregation is 'MIN'; .*VariableAggregation\.ONLY_FIRST_REPLICA"
    ):
        hs.Variable(1.0, aggregation="MIN")


def test_array_specifications():
    spec = hs.TensorSpec([None, 3], np.int32, name="x")
    assert (spec.shape, spec.dtype, spec.name) == ((None, 3), np.int32, "x")
    assert repr(spec) == "TensorSpec(shape=(None, 3), dtype=int32, name='x')"
    assert hs.TensorSpec(()).dtype == np.float32
    assert spec == hs.TensorSpec((None, 3), "int32", "x")
    assert hash(spec) == hash(hs.TensorSpec((None, 3), "int32", "x"))
    others = [
        hs.TensorSpec((None, 4), np.int32, "x"),
        hs.TensorSpec((None, 3), np.int64, "x"),
        hs.TensorSpec((None, 3)),
    ]
    assert all(
        spec != other
        for other in [*others, hs.PerReplicaSpec((None, 3), np.int32, "x"), "spec", None]
    )


def test_slices():
    slices = hs.IndexedSlices(np.ones((2, 3), np.float16), np.array([4, 4]))
    assert (slices.shape, slices.dtype, slices.dense_shape) == (None, np.float16, None)
    assert hs.IndexedSlices(slices.values, slices.indices, np.array([9, 3])).shape == (9, 3)
    assert repr(slices).startswith("IndexedSlices(values=array(")
