"""What is PyTorch's alone, beside test_interoperation.py: gradients, layouts, DataLoader."""

import os
import warnings

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


def over(array):
    """A tensor over an array that may be read-only; older releases do not take those by DLPack."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it must not be written to
        return torch.from_numpy(array)


on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)


@pytest.fixture
def strategy(place):
    with place.make(hs.CentralStorageStrategy) as made:
        yield made


LAYOUTS = {
    "of a graph": lambda: torch.full((4, 3), 2.0, requires_grad=True) * 3,
    "a leaf": lambda: torch.ones(4, 3).requires_grad_(),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "strided": lambda: torch.arange(24.0).reshape(4, 6)[:, ::2],
    "expanded": lambda: torch.ones(1).expand(4, 3),
    "negated later": lambda: torch.complex(torch.zeros(4, 3), torch.ones(4, 3)).conj().imag,
}


def test_gradients_of_any_layout(strategy):
    for name, make in LAYOUTS.items():
        with strategy.scope():
            w = hs.Variable(np.zeros((4, 3), np.float32))
        optimizer, mine = hs.optimizers.SGD(1.0), make() * 1 if RANK else make()
        strategy.run(optimizer.apply_gradients, args=([(mine, w)],))
        assert (-w.numpy()).tolist() == (N * make()).tolist(), name


@on_the_cpu
def test_a_tensor_over_storage_is_safe_to_write_back(strategy):
    """Although the tensor does not say that its memory is a variable's, which others write to."""
    n = 400
    with strategy.scope():
        v = hs.Variable(np.arange(n * n, dtype=np.float64).reshape(n, n), aggregation="SUM")
    strategy.run(lambda: v.assign(over(v.value()).T))
    assert (v.numpy() == N * np.arange(n * n).reshape(n, n).T).all()


WITHOUT_VALUES = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, 3, device="meta"),
    "float8": lambda: torch.ones(3, 3).to(torch.float8_e4m3fn),
}


def test_tensors_without_values_are_type_errors(strategy):
    with strategy.scope():
        w, optimizer = hs.Variable(np.zeros((3, 3), np.float32)), hs.optimizers.SGD(1.0)
    for kind, make in WITHOUT_VALUES.items():
        mine = make() if RANK == 0 else torch.ones(3, 3)
        said = r"SGD.apply_gradients: this torch.Tensor .* Pass a dense array with values"
        with pytest.raises(TypeError, match=said):
            strategy.run(optimizer.apply_gradients, args=([(mine, w)],))
        said = r"Variable.assign of 'Variable': this torch.Tensor does not become an array"
        with strategy.scope(), pytest.raises(TypeError, match=said):
            w.assign(make())
        assert not w.numpy().any(), kind


def test_traced_tensors_are_type_errors():
    for trace, x in (torch.func.grad, torch.ones(3)), (torch.func.vmap, torch.ones(3, 2)):
        with pytest.raises(TypeError, match="asnumpy: this .* outside functions that are traced"):
            trace(lambda x: hs.asnumpy(x) and x.sum())(x)


@on_the_cpu
def test_gradients_flow_through_losses(strategy):
    x = torch.arange(1.0, 4.0) + RANK

    def fn():
        w = torch.tensor(2.0, requires_grad=True)
        average = hs.losses.compute_average_loss(
            (w * x)[:, None] ** 2, sample_weight=torch.tensor([1, 0, 2]), global_batch_size=10
        )
        (average + hs.losses.scale_regularization_loss(3 * w)).backward()
        assert average.dtype == torch.float32
        return average, w.grad

    average, gradient = (strategy.reduce("SUM", value, axis=None) for value in strategy.run(fn))
    squares = sum((1 + rank) ** 2 + 2 * (3 + rank) ** 2 for rank in range(N))
    assert average == pytest.approx(4 * squares / 10)
    assert gradient == pytest.approx(2 * 2 * squares / 10 + 3)


# ---- DataLoader


def test_a_tensor_over_a_variable_is_copied_on_its_way_out(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(6.0), aggregation="SUM")

    def fn():
        view, fresh = over(v.value())[2:4], torch.ones(2)
        return view, fresh, view.data_ptr(), fresh.data_ptr()

    box = []
    strategy.run(lambda *parts: box.extend(parts), args=strategy.run(fn))
    view, fresh, *places = box
    assert isinstance(view, torch.Tensor)
    assert [view.data_ptr() != places[0], fresh.data_ptr() == places[1]] == [True, True]
    strategy.run(lambda: v.assign_add(np.ones(6)))
    assert view.tolist() == [2, 3]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_is_shared_out(strategy, shuffle):
    squares = [(torch.full((2,), float(i)), {"y": [i * i]}) for i in range(23)]

    def make():
        generator = torch.Generator().manual_seed(5)
        return torch.utils.data.DataLoader(squares, 7, shuffle=shuffle, generator=generator)

    distributed, loader = strategy.experimental_distribute_dataset(make()), make()
    for _ in range(2):
        found = [hs.asnumpy(strategy.gather(batch, 0)) for batch in distributed]
        for (x, y), (wanted_x, wanted_y) in zip(found, loader, strict=True):
            assert (
                x.tolist() == wanted_x.tolist() and y["y"][0].tolist() == wanted_y["y"][0].tolist()
            )


@pytest.fixture
def path(tmp_path):
    return hs.broadcast_object(str(tmp_path / "checkpoint"))


def rest_of(strategy, steps):
    """The numbers in the batches that are left."""
    return [hs.asnumpy(strategy.gather(batch, 0)).tolist() for batch in steps]


@on_the_cpu
def test_a_loader_in_order_goes_on_where_it_was(strategy, path):
    numbers = torch.arange(4 * N + 1)
    order = torch.utils.data.SequentialSampler(numbers)
    sampler = torch.utils.data.BatchSampler(order, N, drop_last=False)

    def make(**kind):
        loader = torch.utils.data.DataLoader(numbers, **kind)
        return strategy.experimental_distribute_dataset(loader)

    kinds = {"batch_size": N}, {"sampler": sampler, "batch_size": None}
    for stop, kind in zip((0, 2, 5, 0, 2, 5), 3 * kinds, strict=True):
        iterator = iter(make(**kind))
        for _ in range(stop):
            next(iterator)
        hs.checkpoint.Checkpoint(data=iterator).save(path)
        again = iter(make(**kind))
        hs.checkpoint.Checkpoint(data=again).restore(path)
        assert rest_of(strategy, again) == [part.tolist() for part in numbers.split(N)[stop:]]


@on_the_cpu
def test_a_loader_whose_order_is_lost_is_not_saved(strategy, path):
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.arange(4 * N), N, shuffle=True)
    iterator = iter(dataset := strategy.experimental_distribute_dataset(loader))
    next(iterator)
    for data in (iterator, dataset):
        with pytest.raises(ValueError, match=r"Checkpoint\.save: .*StatefulDataLoader"):
            hs.checkpoint.Checkpoint(data=data).save(path)
    assert not os.path.exists(path)
    assert len(list(iterator)) == 3  # it goes on without being saved


@on_the_cpu
@pytest.mark.filterwarnings("ignore:.* is deprecated:UserWarning")  # torchdata's calls of PyTorch
def test_a_stateful_loader_goes_on_where_it_was(strategy, path):
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed"
    )

    def make(seed):
        torch.manual_seed(seed)
        loader = loaders.StatefulDataLoader(torch.arange(4 * N), N, shuffle=True)
        return strategy.experimental_distribute_dataset(loader)

    dataset = make(5)
    for stop in (0, 3, 4):
        iterator = iter(dataset)
        for _ in range(stop):
            next(iterator)
        hs.checkpoint.Checkpoint(data=iterator).save(path)
        rest = rest_of(strategy, iterator)
        again = iter(make(6))
        hs.checkpoint.Checkpoint(data=again).restore(path)
        assert rest_of(strategy, again) == rest
