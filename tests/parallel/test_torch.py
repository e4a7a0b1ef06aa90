"""hpcstrat.torch: modules on several replicas, next to DistributedDataParallel over gloo."""

import copy
import os
import tempfile
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank


@pytest.fixture
def strategy(place):
    with place.make(hs.CentralStorageStrategy) as made:
        yield made


@pytest.fixture(scope="module")
def ddp():
    """Makes `DistributedDataParallel`s."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{COMM.bcast(folder)}/ranks"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=RANK, world_size=N)
        yield torch.nn.parallel.DistributedDataParallel
        torch.distributed.destroy_process_group()
        COMM.Barrier()


def same_everywhere(tensors):
    """Whether all ranks have the same bits."""
    mine = [tensor.detach().numpy().tobytes() for tensor in tensors]
    return all(theirs == mine for theirs in COMM.allgather(mine))


class Layers(torch.nn.Module):
    """Two layers with common weights, a frozen one, running statistics, and dropout."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        between = torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Dropout(0.5)
        self.last = torch.nn.Sequential(*between, torch.nn.Linear(6, 3))

    def forward(self, x):
        return self.last(self.second(torch.tanh(self.first(self.frozen(x)))))


def train(module, model, reduce):
    """The losses of this rank, whose parts of the batches have 5 examples plus its rank."""
    torch.manual_seed(1 + RANK)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(5):
        x = torch.randn(5 + RANK, 6, dtype=torch.float64)
        y = x[:, :3].square()
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        reduce()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_device_of_a_replica(strategy):
    # PyTorch does not know simulated GPUs, but their names.
    on_gpu = None if strategy.xp is np else strategy.xp.zeros(1).device.id
    expected = torch.device("cpu") if on_gpu is None else torch.device("cuda", on_gpu)
    assert hs.torch.device(strategy) == expected
    found = strategy.run(lambda: hs.torch.device(strategy) == expected)
    assert all(strategy.experimental_local_results(found))


def test_the_losses_are_those_of_ddp(strategy, ddp):
    torch.manual_seed(RANK)  # as in programs that set no seed: replicas start differently
    ours = Layers().double()
    theirs = copy.deepcopy(ours)
    model = ddp(theirs)
    hs.torch.broadcast(ours)
    assert same_everywhere(ours.parameters())

    expected, box = train(theirs, model, lambda: None), []
    strategy.run(
        lambda: box.extend(train(ours, ours, lambda: hs.torch.all_reduce_gradients("MEAN", ours)))
    )
    assert box == pytest.approx(expected, rel=1e-9)
    assert same_everywhere(ours.parameters())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


class Branches(torch.nn.Module):
    """Of four branches the input takes the given ones."""

    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(4))

    def forward(self, x, taken):
        return sum(self.branches[i](x).sum() for i in taken)


def test_parameters_that_some_or_all_replicas_leave_unused(strategy, ddp):
    # No replica takes the last two, and only rank 0 takes the second.
    taken, x = ([0, 1] if RANK == 0 else [0]), torch.full((3, 2), RANK + 1.0)
    ours, theirs = Branches(), Branches()
    model = ddp(theirs, find_unused_parameters=True)
    model(x, taken).backward()
    hs.torch.broadcast(ours)

    def step():
        ours(x, taken).backward()
        hs.torch.all_reduce_gradients("MEAN", ours)

    strategy.run(step)
    weights = [branch.weight.grad for branch in ours.branches]
    assert weights[0].tolist() == pytest.approx(np.full((1, 2), 3 * (N + 1) / 2))
    assert weights[1].tolist() == pytest.approx(np.full((1, 2), 3 / N))
    assert weights[2:] == [None, None]
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None)
        assert one.grad is None or torch.allclose(one.grad, other.grad)


def module_of(**tensors):
    """A module with these parameters (or buffers, without gradients) as `of_` and their names."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() or tensor.is_complex():
            module.register_parameter(f"of_{name}", torch.nn.Parameter(tensor))
        else:
            module.register_buffer(f"of_{name}", tensor)
    return module


FLOATS = ["float64", "float32", "float16", "bfloat16", "complex64"]


@pytest.mark.parametrize("op", ["MEAN", "SUM"])
def test_gradients_of_different_dtypes_and_layouts(strategy, op):
    module = module_of(**{name: torch.ones(3, 2, dtype=getattr(torch, name)) for name in FLOATS})
    module.register_parameter("nothing", torch.nn.Parameter(torch.ones(0, 4)))
    module.register_parameter("number", torch.nn.Parameter(torch.tensor(1.0)))
    values = torch.arange(6).reshape(3, 2) + RANK
    for name in FLOATS:
        dense = values.to(getattr(torch, name))
        getattr(module, f"of_{name}").grad = dense if RANK else dense.T.contiguous().T
    module.nothing.grad = torch.ones(0, 4)
    module.number.grad = torch.tensor(float(RANK))
    strategy.run(lambda: hs.torch.all_reduce_gradients(op, module))
    scale, shift = (N if op == "MEAN" else 1), N * (N - 1) / 2
    expected = (N * torch.arange(6).reshape(3, 2).double() + shift) / scale
    for name in FLOATS:
        dtype = getattr(torch, name)
        assert getattr(module, f"of_{name}").grad.dtype == dtype
        assert torch.equal(getattr(module, f"of_{name}").grad, expected.to(dtype))
    assert module.number.grad.item() == pytest.approx(shift / scale)


def test_values_of_rank_0_for_every_dtype_and_layout():
    kinds, values = [*FLOATS, "int64", "uint8", "bool"], torch.arange(4).reshape(2, 2).T
    module = module_of(**{name: (values + RANK).to(getattr(torch, name)) for name in kinds})
    module.register_buffer("number", torch.tensor(RANK))
    module.register_buffer("nothing", torch.ones(0, 2))
    module.register_buffer("every_second", torch.arange(8.0)[RANK::2][:3])
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    hs.torch.broadcast(module)
    for name in kinds:
        assert torch.equal(getattr(module, f"of_{name}"), values.to(getattr(torch, name)))
    assert [module.number.item(), module.every_second.tolist()] == [0, [0, 2, 4]]
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == places


def test_rank_0_alone_makes_copies_of_its_tensors_one_at_a_time(monkeypatch):
    copied = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda one: copied.append(one.numel()) or cpu(one))
    many, size = 32, 1 << 17  # 16 MiB in all
    module = module_of(**{str(i): torch.full((size,), RANK + i + 0.5) for i in range(many)})
    tracemalloc.start()
    try:
        hs.torch.broadcast(module)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert copied == ([size] * many if RANK == 0 else [])
    assert peak < 8 << 20
    assert [one.unique().tolist() for one in module.parameters()] == [
        [i + 0.5] for i in range(many)
    ]


# ---- variables


def test_tensors_over_the_memory_of_arrays():
    dtypes = ("float32", "float16", "int64", "bool", ml_dtypes.bfloat16)
    arrays = {np.dtype(one).name: np.arange(3).astype(one) for one in dtypes}
    read_only = np.arange(4.0)
    read_only.flags.writeable = False
    tensors = hs.torch.as_tensors((arrays, read_only, "text", None, 3))
    for name, array in arrays.items():
        assert tensors[0][name].data_ptr() == array.ctypes.data
        assert tensors[0][name].dtype == getattr(torch, name)
        assert tensors[0][name].tolist() == array.tolist()
    assert tensors[1].data_ptr() == read_only.ctypes.data and tensors[1].tolist() == [0, 1, 2, 3]
    assert tensors[2:] == ("text", None, 3)
    with pytest.raises(TypeError):
        hs.torch.as_tensors(np.array(["text"]))


# ---- misuse


def reduced(strategy, module, op="SUM"):
    strategy.run(lambda: hs.torch.all_reduce_gradients(op, module))


def check_that_it_works(strategy):
    module = torch.nn.Linear(1, 1, bias=False)
    hs.torch.broadcast(module)
    module.weight.grad = torch.full((1, 1), RANK + 1.0)
    reduced(strategy, module)
    assert module.weight.grad.item() == N * (N + 1) / 2


@pytest.mark.mpi(min_size=2)
def test_modules_that_differ_between_ranks(strategy):
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, RANK)
    said = r"rank 1.*equal after hs.torch.broadcast"
    with pytest.raises(hs.ReplicaMismatchError, match=said):
        reduced(strategy, module)
    hs.torch.broadcast(module)
    reduced(strategy, module)
    module.bias.requires_grad_(RANK > 0)
    with pytest.raises(hs.ReplicaMismatchError, match="all_reduce_gradients"):
        reduced(strategy, module)
    check_that_it_works(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("differs", ["name", "shape", "dtype", "count"])
def test_a_broadcast_of_modules_that_differ_changes_none(strategy, differs):
    module = module_of(first=torch.full((2,), RANK + 1.0))
    is_odd = RANK == N - 1
    name = "other" if differs == "name" and is_odd else "last"
    last = torch.ones(
        (1, 2) if differs == "shape" and is_odd else (2,),
        dtype=torch.float16 if differs == "dtype" and is_odd else torch.float32,
    )
    if not (differs == "count" and is_odd):
        module.register_buffer(name, last)
    said = r"of_first \(torch.float32 of shape \(2,\)\)"
    with pytest.raises(hs.ReplicaMismatchError, match=said):
        hs.torch.broadcast(module)
    assert module.of_first.tolist() == [RANK + 1.0] * 2
    check_that_it_works(strategy)


def test_an_error_of_one_rank_is_that_of_all(strategy):
    module = torch.nn.Embedding(4, 2, sparse=RANK == N - 1)
    hs.torch.broadcast(module)
    module(torch.tensor([1])).sum().backward()
    said = r"the gradient of weight is sparse; make its layer with sparse=False"
    with pytest.raises(TypeError, match=said):
        reduced(strategy, module)
    elsewhere = torch.nn.Linear(2, 1, device="meta" if RANK == 0 else "cpu")
    said = "the parameter weight is on meta, but the replica computes on"
    with pytest.raises(TypeError, match=said):
        reduced(strategy, elsewhere)
    with pytest.raises(ValueError, match="reduce_op is MAX; gradients take SUM or MEAN"):
        reduced(strategy, torch.nn.Linear(1, 1), "MAX")
    module = torch.nn.Linear(1, 1)
    wrong = module if RANK else module.parameters()
    for call in (hs.torch.broadcast, lambda given: reduced(strategy, given)):
        with pytest.raises(TypeError, match=r": module is generator; pass the torch\.nn\.Module"):
            call(wrong)
    said = "all_reduce_gradients was called outside of Strategy.run; call it inside"
    with strategy.scope(), pytest.raises(RuntimeError, match=said):
        hs.torch.all_reduce_gradients("SUM", module)
    check_that_it_works(strategy)


@pytest.mark.parametrize("odd", [0, N - 1])
def test_a_broadcast_of_tensors_without_values(strategy, odd):
    for last, where in (
        (torch.ones(2).to_sparse(), "torch.sparse_coo tensor on cpu"),
        (torch.ones(2, device="meta"), "torch.strided tensor on meta"),
    ):
        module = module_of(first=torch.full((2,), RANK + 1.0), last=torch.ones(2))
        if RANK == odd:
            module.of_last = torch.nn.Parameter(last)
        with pytest.raises(TypeError, match=f"broadcast: of_last is a {where}; make it a dense"):
            hs.torch.broadcast(module)
        assert module.of_first.tolist() == [RANK + 1.0] * 2
    check_that_it_works(strategy)


def test_rank_0_lacks_memory_for_a_copy(strategy, monkeypatch):
    """In the midst of a broadcast: all ranks raise, and the first tensor is rank 0's already."""
    module = module_of(first=torch.full((2,), RANK + 1.0), last=torch.full((2,), RANK + 1.0))
    cpu = torch.Tensor.cpu

    def fail_at_the_last(tensor):
        if tensor.data_ptr() == module.of_last.data_ptr():
            raise MemoryError("none left")
        return cpu(tensor)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "cpu", fail_at_the_last)
        with pytest.raises(MemoryError, match="none left"):
            hs.torch.broadcast(module)
    assert module.of_first.tolist() == [1, 1]
    assert module.of_last.tolist() == [RANK + 1.0] * 2
    check_that_it_works(strategy)
