"""Arrays of other libraries, and by their protocols alone; what consumers of protocols get out."""

import dataclasses
import gc
import importlib
import importlib.util
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from foreign import Torch
from mpi4py import MPI
from transports import has

import hpcstrat as hs

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
only_on_gpus = pytest.mark.parametrize("place", ["GPU"], indirect=True)
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)


class ByDlpack:
    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


class ByInterface:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


@dataclasses.dataclass
class ByMethod:
    """A dataclass, like zarr's arrays, and yet not a nest."""

    array: Any

    def __array__(self, dtype=None, copy=None):
        return self.array if dtype is None else self.array.astype(dtype)


def tensor(place):
    torch = importlib.import_module("torch")
    return lambda array: torch.tensor(array.tolist(), dtype=getattr(torch, array.dtype.name))


def jax_array(place):
    """On the device of the replica, if JAX can; of 32 bits for 64."""
    jax = importlib.import_module("jax")
    device = jax.devices("cpu" if place.kind == "CPU" else None)[0]
    return lambda array: jax.device_put(array, device)


MAKERS: dict[str, Any] = {
    "DLPack": lambda place: ByDlpack,
    "the interface": lambda place: ByInterface,
    "the method": lambda place: ByMethod,
}
# Where they are missing, test_interoperation_torch.py and _jax.py are skipped, and say so.
if importlib.util.find_spec("torch"):
    MAKERS["PyTorch"] = tensor
if importlib.util.find_spec("jax"):
    MAKERS["JAX"] = jax_array


@pytest.fixture(params=MAKERS)
def foreign(request, place):
    """Makes another library's array of an array."""
    return MAKERS[request.param](place)


@pytest.fixture
def strategy(place):
    with place.make(hs.CentralStorageStrategy) as made:
        yield made


def local(value):
    return [one.tolist() for one in hs.asnumpy(value)]


# ---- in


def test_variables_begin_with_them_and_are_written_with_them(strategy, foreign):
    dtypes = [*map(np.dtype, ("f4", "f2", "i4", "u1", "c8", "?"))]
    if not isinstance(foreign, type):  # protocols of NumPy have no bfloat16
        dtypes += [np.dtype(ml_dtypes.bfloat16)] * has(strategy.xp, np.dtype(ml_dtypes.bfloat16))
    with strategy.scope():
        for dtype in dtypes:
            expected = np.array([[1, 0], [3, 4]], dtype)
            v = hs.Variable(foreign(expected))
            assert v.dtype == expected.dtype and v.numpy().tolist() == expected.tolist()
        v = hs.Variable(np.zeros((2, 3)), aggregation="SUM")
        v.assign(foreign(np.arange(6.0, dtype=np.float32).reshape(3, 2).T))
        assert v.numpy().tolist() == [[0, 2, 4], [1, 3, 5]]
        v.assign_sub(foreign(np.ones((2, 3), np.int32)))
        assert v.numpy().tolist() == [[-1, 1, 3], [0, 2, 4]]
        with pytest.raises(ValueError, match=r"the value has shape \(3,\)"):
            v.assign(foreign(np.zeros(3)))
    strategy.run(lambda: v.assign_add(foreign(np.full((2, 3), 10.0 * (RANK + 1)))))
    total = 5.0 * N * (N + 1)
    assert v.numpy().tolist() == [[total - 1, total + 1, total + 3], [total, total + 2, total + 4]]


def test_gradients(strategy, foreign):
    with strategy.scope():
        v, w = hs.Variable(np.zeros((2, 3), np.float32)), hs.Variable(np.ones(2))
        table = hs.Variable(np.zeros((N + 1, 2)))
        optimizer = hs.optimizers.SGD(1.0)
    gradient = np.asarray(np.arange(6).reshape(2, 3) + 10 * RANK, np.float32, order="F")
    values, rows = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([RANK, N])

    def step():
        slices = hs.IndexedSlices(foreign(values), foreign(rows))
        pairs = [(foreign(gradient), v), (foreign(np.full(2, RANK)), w), (slices, table)]
        optimizer.apply_gradients(pairs)

    for _ in range(3):
        strategy.run(step)
    tens = 10 * N * (N - 1) // 2
    assert (-v.numpy() / 3).tolist() == [[N * k + tens for k in range(a, a + 3)] for a in (0, 3)]
    assert w.numpy().tolist() == [1 - 3 * (N * (N - 1) // 2)] * 2
    assert (-table.numpy() / 3).tolist() == [[1, 2]] * N + [[3 * N, 4 * N]]
    said = r"apply_gradients: the gradient of 'Variable' has shape \(3, 2\)"
    with pytest.raises(ValueError, match=said):
        strategy.run(lambda: optimizer.apply_gradients([(foreign(np.zeros((3, 2))), v)]))
    assert gradient.flags.writeable


@pytest.mark.gpu
@only_on_gpus
def test_gradients_on_a_gpu(strategy, place):
    """Its library may reuse the memory as soon as nothing refers to it."""
    with strategy.scope():
        v = hs.Variable(np.zeros(1000))
        optimizer = hs.optimizers.SGD(1.0)

    def replica():
        for k in range(5):
            optimizer.apply_gradients([(ByDlpack(place.xp.full(1000, k + RANK, np.float64)), v)])
            place.xp.full(1000, -100.0)
        return ByDlpack(place.xp.arange(3) + RANK)

    values = strategy.run(replica)
    assert (-v.numpy() == 10 * N + 5 * N * (N - 1) // 2).all()
    assert strategy.reduce("MAX", values, axis=None).tolist() == [N - 1, N, N + 1]
    for part in strategy.experimental_local_results(values):
        assert type(part) is place.xp.ndarray


@pytest.mark.gpu
@only_on_gpus
def test_memory_on_another_gpu_is_let_go(strategy, place):
    cuda, own = place.xp.cuda, strategy.replica_group.stream
    count = cuda.runtime.getDeviceCount()
    if count == 1:
        pytest.skip("there is one GPU")
    with cuda.Device((own.ordinal + 1) % count):
        arrays = [place.xp.full(3, RANK + 1.0)]
    alive = weakref.ref(arrays[0])

    def replica():
        context = hs.get_replica_context()
        assert context is not None
        return context.all_reduce("SUM", ByDlpack(arrays.pop()))

    total = strategy.run(replica)
    assert strategy.experimental_local_results(total)[0].tolist() == [N * (N + 1) / 2] * 3
    strategy.run(lambda: None)
    assert alive() is None


def test_values_of_the_replicas(strategy, place, foreign):
    inside = []

    def replica():
        context = hs.get_replica_context()
        assert context is not None
        mine = foreign(np.arange(3) + RANK)
        inside.extend([context.all_reduce("SUM", {"a": mine})["a"], context.all_gather(mine, 0)])
        return {"x": foreign(np.arange(2.0) + RANK), "n": RANK}

    values = strategy.run(replica)
    assert local(inside[:1]) == [[k * N + N * (N - 1) // 2 for k in range(3)]]
    assert local(inside[1:]) == [[k + r for r in range(N) for k in range(3)]]
    assert local([strategy.reduce("MAX", values, axis=None)["x"]]) == [[N - 1, N]]
    assert float(strategy.reduce("SUM", values["x"], axis=0)) == N + N * (N - 1)
    assert local([strategy.gather(values["x"], 0)]) == [[k + r for r in range(N) for k in range(2)]]
    assert [int(n) for n in strategy.experimental_local_results(values["n"])] == [*range(N)]
    if foreign not in (ByInterface, ByMethod):  # a table or an image, too, may become an array
        parts = strategy.experimental_local_results(values["x"])
        assert {type(part) for part in parts} <= {np.ndarray, place.xp.ndarray}
        assert local(parts) == [[r, r + 1] for r in range(N)]

    value = foreign(np.arange(4.0))  # of no replica
    assert float(strategy.reduce("MEAN", value, axis=0)) == 1.5
    everything = [strategy.reduce("MEAN", value, axis=None), strategy.gather(value, 0)]
    assert local(everything) == [[0, 1, 2, 3]] * 2

    made = strategy.experimental_distribute_values_from_function(
        lambda context: foreign(np.arange(2) + context.replica_id_in_sync_group)
    )
    seen = []
    strategy.run(seen.append, args=(made,))
    assert type(seen[0]) is place.xp.ndarray and seen[0].tolist() == [RANK, RANK + 1]


def test_datasets(strategy, foreign):
    x = np.arange(6.0, dtype=np.float32).reshape(6, 1)
    sliced = hs.data.Dataset.from_tensor_slices({"x": foreign(x)})
    mapped = hs.data.Dataset.range(6).map(lambda k: {"x": foreign(np.array([k], np.float32))})
    generated = hs.data.Dataset.from_generator(lambda: ({"x": foreign(row)} for row in x))
    for dataset in (sliced, mapped, generated):
        assert dataset.element_spec == {"x": hs.TensorSpec((1,), np.float32)}
        batches = strategy.experimental_distribute_dataset(dataset.batch(6))
        assert [local([strategy.gather(batch["x"], 0)]) for batch in batches] == [[x.tolist()]]
    assert [e.tolist() for e in hs.data.Dataset.from_tensors(foreign(x))] == [x.tolist()]
    if foreign in (ByDlpack, ByInterface, ByMethod):
        x[:] = 7  # the slices are of the array itself
        assert [element["x"].tolist() for element in sliced] == [[7.0]] * 6


def test_host_copies_and_metrics(strategy, foreign):
    source = np.arange(3)
    copy = hs.asnumpy([foreign(source), 1.5, "text", None])
    source[:] = 9
    assert type(copy[0]) is np.ndarray and copy[0].tolist() == [0, 1, 2]
    assert copy[1:] == [1.5, "text", None]
    with strategy.scope():
        mean, accuracy = hs.metrics.Mean(), hs.metrics.Accuracy()

    def replica():
        mean.update_state(foreign(np.arange(3.0) + 3 * RANK))
        accuracy.update_state(foreign(np.array([1, 2])), foreign(np.array([1, RANK])))

    strategy.run(replica)
    assert mean.result() == (3 * N - 1) / 2
    assert accuracy.result() == (N + (N > 2)) / (2 * N)


class WithoutValues:
    def __dlpack__(self, **arguments):
        raise BufferError("no strided memory")

    def __dlpack_device__(self):
        return (1, 0)


def test_what_has_no_values_is_a_type_error(strategy):
    """A gradient on one rank, too, for all ranks."""
    with strategy.scope():
        v = hs.Variable(np.zeros(3))
        optimizer = hs.optimizers.SGD(1.0)
        for call, text in (
            (lambda: hs.Variable(WithoutValues()), "Variable: this"),
            (lambda: v.assign(WithoutValues()), "Variable.assign of 'Variable': this"),
            (lambda: hs.data.Dataset.from_tensors(WithoutValues()), "Dataset: this"),
            (lambda: hs.asnumpy(WithoutValues()), "asnumpy: this"),
        ):
            said = rf"{text} .*WithoutValues does not become an array: no strided memory"
            with pytest.raises(TypeError, match=said):
                call()
    for gradient in (WithoutValues(), WithoutValues() if RANK == N - 1 else np.ones(3)):
        pairs = [(gradient, v)]
        with pytest.raises(TypeError, match="SGD.apply_gradients: this .* Pass a dense array"):
            strategy.run(optimizer.apply_gradients, args=(pairs,))
    values = strategy.run(WithoutValues)
    for call in (
        lambda: strategy.reduce("SUM", values, axis=None),
        lambda: strategy.gather(values, 0),
        lambda: strategy.experimental_local_results(values),
    ):
        said = r"Strategy\.\w+: this .*WithoutValues does not become an array"
        with pytest.raises(TypeError, match=said):
            call()
    assert v.numpy().tolist() == [0, 0, 0]


# ---- out


@on_the_cpu
@pytest.mark.parametrize(
    ("shape", "dtype"), [((), "f4"), ((0,), "?"), ((2, 3), "c8"), ((3,), "bfloat16")], ids=str
)
def test_the_interface_of_a_variable_in_a_replica_is_its_memory(strategy, shape, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))  # NumPy has no name for bfloat16
    expected = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1).astype(dtype)
    with strategy.scope():
        v = hs.Variable(expected)

    def replica():
        arrays = [np.asarray(v), np.array(v, copy=False)]
        if dtype != ml_dtypes.bfloat16:
            assert v.__array_interface__["data"] == (v.value().ctypes.data, True)
            arrays.append(np.asarray(ByInterface(v)))
        for array in arrays:
            assert array.ctypes.data == v.value().ctypes.data and not array.flags.writeable
            assert array.dtype == expected.dtype and array.tolist() == expected.tolist()
        assert np.array(v).flags.writeable and not np.shares_memory(np.array(v), v.value())
        assert np.asarray(v, np.complex128).dtype == np.complex128

    strategy.run(replica)


@on_the_cpu
def test_memory_outlives_the_variable_that_it_was_taken_of(strategy):
    with strategy.scope():
        v, arrays = [hs.Variable(np.arange(1000.0))], []
        strategy.run(lambda: arrays.append(np.asarray(v[0])))
        arrays += [np.asarray(v[0]), np.from_dlpack(v[0])]
        v.clear()
        gc.collect()
        others = [hs.Variable(np.full(1000, -1.0)) for _ in range(4)]  # in its memory
    assert [array.tolist() for array in arrays] == [list(range(1000))] * 3
    assert len(others) == 4


@on_the_cpu
def test_across_replicas_a_variable_names_no_memory(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))
        said = "on the CPU in a replica context only; call numpy"
        with pytest.raises(AttributeError, match=said):
            v.__array_interface__  # noqa: B018
        array = np.asarray(v)
        array[:] = 9
        assert np.asarray(v, np.float32).tolist() == np.array(v).tolist() == [0, 1, 2]


def test_nobody_gets_write_access_through_dlpack(strategy, place):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0, dtype=np.float32))

    class Consumer:
        """What asks with these arguments, whatever NumPy's would be."""

        def __init__(self, arguments):
            self.__dlpack_device__ = v.__dlpack_device__
            self.__dlpack__ = lambda **_: v.__dlpack__(**arguments)

    def body():
        asked = {"stream": None}, {"copy": True}, {"max_version": (1, 0)}, {"max_version": (0, 8)}
        for arguments in ({}, *asked):
            taken = place.xp.from_dlpack(Consumer(arguments))
            taken = taken if place.kind == "GPU" or taken.flags.writeable else place.xp.array(taken)
            taken[:] = 9
        assert v.numpy().tolist() == [0, 1, 2]
        said = r"exported as a copy.* pass value\(\) in a replica context"
        with pytest.raises(BufferError, match=said):
            v.__dlpack__(copy=False)
        with pytest.raises(BufferError, match=r"is on .*; call numpy\(\)"):
            v.__dlpack__(dl_device=(7, 0))

    strategy.run(body)
    with strategy.scope():
        body()


# ---- PyTorch on GPUs


@pytest.fixture
def torch(strategy, place, monkeypatch):
    """Its substitute, which knows the strategy's stream."""
    made = Torch(place.xp, strategy.replica_group.stream.raw)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


class Module:
    """PyTorch's, with a single parameter."""

    def __init__(self, weight):
        self.named_parameters = lambda: [("weight", weight)]


@pytest.mark.gpu
@only_on_gpus
def test_memory_that_pytorch_still_reads(strategy, place, torch):
    """The strategy's stream gets it back when the tensor dies, and waits for PyTorch's work."""
    box = []

    def replica():
        tensor = hs.torch.as_tensors(place.xp.full(1000, RANK + 1.0))
        box.append(tensor * 2)
        del tensor
        place.xp.full(1000, -1.0)

    strategy.run(replica)
    assert box[0].tolist() == [2 * (RANK + 1)] * 1000


@pytest.mark.gpu
@only_on_gpus
def test_another_gpu_is_current_for_pytorch(strategy, place, torch):
    cuda = place.xp.cuda
    count, gpu = cuda.runtime.getDeviceCount(), strategy.replica_group.stream.ordinal
    if count == 1:
        pytest.skip("there is one GPU")
    weight = torch.full((2, 3), 1.0, gpu)
    weight.grad = torch.full((2, 3), RANK + 1.0, gpu)
    elsewhere = torch.full(3, 1.0, (gpu + 1) % count)
    module, box = Module(weight), []

    def replica():
        x = place.xp.full(3, 5.0)
        cuda.Device((gpu + 1) % count).use()  # as torch.cuda.set_device does
        box.append((hs.torch.as_tensors(x) * 2).tolist())
        for _ in range(2):
            hs.torch.all_reduce_gradients("SUM", module)
            box.append((weight.grad * 1).tolist())
        said = "the parameter weight is on .* move the module there or to the CPU"
        with pytest.raises(TypeError, match=said):
            hs.torch.all_reduce_gradients("SUM", Module(elsewhere))
        assert cuda.Device().id == (gpu + 1) % count

    strategy.run(replica)
    assert box == [[10] * 3, [N * (N + 1) / 2] * 6, [N * N * (N + 1) / 2] * 6]
