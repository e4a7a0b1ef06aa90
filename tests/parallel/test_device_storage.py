"""Storage with GPUs wherever its parts are: any rank's parameters or the host's."""

import functools
import gc
import types
import weakref
from typing import Any

import numpy as np
import pytest
from internals import GpuPlan, device_update, gpu, slabs
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
SUM = N * (N + 1) // 2  # of the replicas' contributions: rank r has r + 1 parts

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("place", ["GPU"], indirect=True)]

PLACEMENTS = ["parameters of rank 0", "parameters of the last rank", "a copy of each rank"]
ON_GPUS = PLACEMENTS if N > 1 else PLACEMENTS[::2]


@pytest.fixture(params=[*ON_GPUS, "parameters of the host"])
def strategy(request, place):
    gc.collect()
    make, gpus = hs.CentralStorageStrategy, place.devices
    parameters = {PLACEMENTS[1]: gpus[-1], "parameters of the host": "CPU:0"}.get(request.param)
    arguments = (gpus, parameters)
    if request.param == PLACEMENTS[2]:
        make, arguments = hs.MirroredStrategy, (gpus,)
    with make(*arguments) as made, made.scope():
        yield made


@pytest.fixture
def root(strategy):
    """The parameter rank."""
    devices, (parameter,) = strategy.extended.worker_devices, strategy.extended.parameter_devices
    return devices.index(parameter) if parameter in devices else 0


@pytest.fixture
def xp(strategy):
    """CuPy."""
    return strategy.xp


def replica_context() -> Any:
    return hs.get_replica_context()


def check(v, expected, rtol=0.0, atol=0.0):
    """Compares what this rank reads, on its device and on the host, and the bits of all ranks."""
    strategy, read = v.distribute_strategy, []
    strategy.run(lambda: read.append(v.read_value()))
    assert type(read[0]) is strategy.xp.ndarray
    assert hs.asnumpy(read[0]).tobytes() == v.numpy().tobytes()
    assert len(set(COMM.allgather(v.numpy().tobytes()))) == 1
    np.testing.assert_allclose(v.numpy(), np.broadcast_to(expected, v.shape), rtol, atol)


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.uint8, np.complex64])
def test_writes(strategy, xp, root, dtype):
    where, is_mirrored = strategy.extended, isinstance(strategy, hs.MirroredStrategy)
    device = where.worker_devices[RANK] if is_mirrored else where.parameter_devices[0]
    for shape in (), (0, 3), (5, 9), (70_001,):
        one = xp.ones(shape, dtype)
        given = hs.Variable(xp.full(shape, 5 + RANK, dtype))
        assert given.device == device
        check(given, 5 + root)  # the root's value counts
        v = hs.Variable(np.full(shape, 50, dtype), aggregation="SUM")
        v.assign_sub(one)
        v.assign_add(np.ones(shape, dtype))
        v.assign_add(v)
        check(v, 100)
        strategy.run(lambda v=v, one=one: v.assign_sub(one * (RANK + 1)))
        check(v, 100 - SUM)
        strategy.run(lambda v=v: v.assign(v.value()))
        check(v, (100 - SUM) * N % (256 if dtype == np.uint8 else 10**9))
        first = hs.Variable(one, aggregation="ONLY_FIRST_REPLICA")
        strategy.run(lambda v=first, one=one: v.assign(one * (RANK + 7)))
        check(first, 7)
        if dtype == np.float16:
            mean = hs.Variable(one, aggregation="MEAN")
            strategy.run(lambda v=mean, one=one: v.assign_add(one * (RANK * 2)))
            check(mean, N)


def starts_of(variables):
    """Where variables are in their slabs, and the bytes of these."""
    blocks = [v._state.block for v in variables]
    return [(block.memory.start - block.owner.address, block.owner.array.size) for block in blocks]


def train(strategy, variables):
    """Two steps, and an assignment of each variable, with closed results."""
    xp, optimizer = strategy.xp, hs.optimizers.SGD(0.5, momentum=0.5)

    def replica():
        optimizer.apply_gradients(
            [(xp.full(v.shape, i * (RANK + 1.0)), v) for i, v in enumerate(variables)]
        )

    for change in (0.5, 0.75):  # of the first step, and of the second with half of the first
        before = [v.numpy() for v in variables]
        strategy.run(replica)
        for i, v in enumerate(variables):
            check(v, before[i] - change * i * SUM)
    for v in variables:
        strategy.run(lambda v=v: v.assign(xp.full(v.shape, RANK + 1.0)))
        check(v, SUM)


def limit_memory(monkeypatch, ranks, largest, times=1000):
    """On these ranks a slab on the GPU has at most so many bytes, and larger ones fail so often."""
    allocate, left = slabs._memory_on_gpu, [times]

    def limited(xp, ordinal, nbytes):
        if RANK in ranks and nbytes > largest and left[0]:
            left[0] -= 1
            raise MemoryError(f"no {nbytes} bytes")
        return allocate(xp, ordinal, nbytes)

    monkeypatch.setattr(slabs, "_memory_on_gpu", limited)


def made(count, rows=70_000):
    """Variables of ones, each larger than the one before."""
    return [
        hs.Variable(np.ones((rows + 20 * i), np.float32), aggregation="SUM") for i in range(count)
    ]


def test_a_slab_that_one_rank_cannot_have(strategy, monkeypatch):
    """All take one that has room for the variable, so all have it in the same place."""
    for poor, times in (0, 1000), (N - 1, 1):
        with monkeypatch.context() as patch:
            limit_memory(patch, [poor], 1 << 19, times)
            variables = made(5)
            if times > 1:  # a variable has no room in what there is: nothing has changed
                with pytest.raises(MemoryError, match="no 33"):
                    hs.Variable(np.ones(8_400_000, np.float32))
        variables += made(1, 500)
        places = COMM.allgather(starts_of(variables))
        assert places == [places[0]] * N
        train(strategy, variables)


@pytest.mark.parametrize("strategy", ON_GPUS, indirect=True)
def test_slots_without_memory(strategy, monkeypatch):
    (v,), optimizer = made(1), hs.optimizers.SGD(0.5, momentum=0.5)
    gradient = strategy.xp.full(v.shape, RANK + 1.0)
    # Only the parameter rank asks for memory, or all do.
    limit_memory(monkeypatch, range(N), 0)
    with pytest.raises(MemoryError, match="no 3"):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    monkeypatch.undo()
    check(v, 1)
    assert optimizer.iterations == 0
    strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    check(v, 1 - 0.5 * SUM)


def test_all_plans_share_one_message(strategy, monkeypatch):
    """Each assigned variable has a plan, and would have a message on the GPU as long as it lives."""
    messages, attach = [], GpuPlan.attach

    def noted(plan, memory):
        messages.extend([] if memory is None else [weakref.ref(memory)])
        attach(plan, memory)

    monkeypatch.setattr(GpuPlan, "attach", noted)
    variables = [hs.Variable(np.zeros(n), aggregation="SUM") for n in (3, 5, 4, 900)]
    for turn in (1, 2):
        for v in variables:
            value = strategy.xp.full(v.shape, turn * (RANK + 1.0))
            strategy.run(lambda v=v, value=value: v.assign(value))
            check(v, turn * SUM)
    alive = {id(message()) for message in messages if message() is not None}
    assert len(messages) > 4 and len(alive) == 1


def test_memory_that_a_programs_own_allocator_has(place, monkeypatch):
    """With a fixed amount of the GPU's memory."""
    cuda = place.xp.cuda
    stream = gpu.Stream(int(place.devices[RANK].removeprefix("GPU:")))
    allocate = functools.partial(slabs.allocate_on_gpu, stream)
    memory, pool = slabs.Slabs(allocate, alignment=slabs.GPU_ALIGNMENT), cuda.Memory(100 << 20)
    used = [0]

    def malloc(nbytes):
        start = -(-used[0] // 512) * 512
        if start + nbytes > pool.size:
            raise MemoryError("the pool is empty")
        used[0] = start + nbytes
        return cuda.MemoryPointer(pool, start)

    def refuse(nbytes):
        raise cuda.runtime.CUDARuntimeError(2)

    monkeypatch.setattr(cuda, "Memory", refuse)
    with stream.current(), cuda.using_allocator(malloc):
        block = memory.new_block((1 << 20,), np.dtype(np.float32))
        assert block.array.data.mem is pool and not block.array.any()
        with pytest.raises(
            MemoryError, match=r"the pool is empty.* XLA_PYTHON_CLIENT_PREALLOCATE=false .* RMM"
        ):
            memory.new_block((100 << 20,), np.dtype(np.uint8))
        with (
            cuda.using_allocator(refuse),
            pytest.raises(MemoryError, match=r"out of memory.* torch.cuda.empty_cache"),
        ):
            memory.new_block((100 << 20,), np.dtype(np.uint8))
        assert memory.new_block((10,), np.dtype(np.float32)).memory.start > block.memory.start


def test_updates_of_many_variables_and_a_table(strategy, xp, root):
    """All kinds of shapes and two dtypes, too many of one for a single kernel."""
    shapes = [(), (0,), (3, 5), (70_001,), *[(1 + i % 4,) for i in range(130)]]
    dtypes = [np.float64 if 0 < i < 3 else np.float32 for i in range(len(shapes))]
    variables = [
        hs.Variable(np.full(*form)) for form in zip(shapes, [2] * 134, dtypes, strict=True)
    ]
    table, optimizer = hs.Variable(np.full((6, 2), 2.0)), hs.optimizers.SGD(0.5, momentum=0.5)
    slope = [(-1) ** i * (1 + i % 3) for i in range(len(shapes))]

    def replica():
        dense = [
            (xp.full(v.shape, a * (RANK + 1), v.dtype), v)
            for v, a in zip(variables, slope, strict=True)
        ]
        rows = hs.IndexedSlices(xp.full((2, 2), RANK + 1.0), xp.array([4, 1]))
        optimizer.apply_gradients([*dense[:7], (rows, table), *dense[7:]])

    for _ in range(3):
        strategy.run(replica)
    moved = 0.5 * SUM * (1 + 1.5 + 1.75)
    for i, (v, a) in enumerate(zip(variables, slope, strict=True)):
        np.testing.assert_allclose(v.numpy(), np.full(v.shape, 2 - moved * a), rtol=2e-6)
        if i < 6:
            check(v, 2 - moved * a, rtol=2e-6)
    check(table, [[2 - moved if row in (1, 4) else 2] for row in range(6)], rtol=1e-9)
    # Slots live once.
    slots = [slot for slots in optimizer._state.slots.values() for slot in slots]
    has_numbers = [slot.owner is not None for slot in slots]
    is_everywhere = (
        isinstance(strategy, hs.MirroredStrategy) or "CPU" in strategy.extended.parameter_devices[0]
    )
    expected = [[rank == root or is_everywhere] * len(slots) for rank in range(N)]
    assert COMM.allgather(has_numbers) == expected


@pytest.mark.parametrize("dtypes, odd", [(("f8", "c16", "f4"), N - 1), (("f4", "i4"), 0)])
def test_a_layout_that_only_one_rank_has(strategy, odd, dtypes):
    """All launch the same calls of NCCL, whatever a rank's arrays are."""
    xp, grid = strategy.xp, np.arange(24).reshape(4, 6)
    variables = [hs.Variable(np.zeros((4, 6), dtype), aggregation="SUM") for dtype in dtypes]
    floats = [v for v in variables if v.dtype != np.int32]
    optimizer = hs.optimizers.SGD(1.0)

    def gradient(v):
        array = xp.asarray(grid.astype(v.dtype)) * (RANK + 1)
        return array.T.copy().T if odd == RANK else array

    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(gradient(v), v) for v in floats]))
    for v in floats:
        check(v, -2 * SUM * grid)
    strategy.run(lambda: optimizer.apply_gradients([(gradient(v)[:, ::-1], v) for v in floats]))
    for v in variables:
        if v.dtype != np.int32:
            check(v, -2 * SUM * grid - SUM * grid[:, ::-1])
        strategy.run(lambda v=v: v.assign(gradient(v)))
        check(v, SUM * grid)


@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_gradients_that_are_aligned_as_their_parts(strategy, dtype):
    """As another library's may be."""
    xp, dtype = strategy.xp, np.dtype(dtype)
    v, optimizer = hs.Variable(np.zeros(5, dtype)), hs.optimizers.SGD(1.0)
    memory, half = xp.zeros(8 * dtype.itemsize, np.uint8), dtype.itemsize // 2
    gradient = memory[half : half + v.nbytes].view(dtype)
    assert gradient.data.ptr % dtype.itemsize == half
    gradient.set(np.full(5, (RANK + 1) * (1 - 2j), dtype))
    strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    check(v, -SUM * (1 - 2j))


@pytest.fixture
def neighbour(place):
    """Another GPU than this rank's."""
    count = place.xp.cuda.runtime.getDeviceCount()
    if count == 1:
        pytest.skip("there is one GPU")
    return place.xp.cuda.Device((int(place.devices[RANK].removeprefix("GPU:")) + 1) % count)


def test_arrays_of_another_gpu(strategy, xp, neighbour):
    """They move to the strategy's GPU, whatever is done with them."""
    v, w, optimizer = hs.Variable(np.zeros(3)), hs.Variable(np.zeros(3)), hs.optimizers.SGD(1.0)
    table = hs.Variable(np.zeros((4, 2), np.float32))

    def made(shape, value, dtype="f8"):
        with neighbour:
            return xp.full((*shape[:-1], shape[-1] * 2), value, dtype)[..., ::2]

    def replica():
        there, one = made((3,), RANK + 1.0), made((3,), RANK + 1.0)
        with neighbour:
            one = one.copy()  # contiguous
        rows = hs.IndexedSlices(made((1, 2), RANK + 1.0), made((1,), 2, "i8"))
        optimizer.apply_gradients([(there, v), (rows, table), (one, w)])
        return replica_context().all_reduce("SUM", there), replica_context().all_gather(there, 0)

    total, everyones = map(strategy.experimental_local_results, strategy.run(replica))
    assert [one.tolist() for one in total] == [[SUM] * 3] * N
    rows = [rank + 1 for rank in range(N) for _ in range(3)]
    assert [one.tolist() for one in everyones] == [rows] * N
    check(v, -SUM)
    check(w, -SUM)
    check(hs.Variable(made((3,), 7.0)), 7)
    table.scatter_update(hs.IndexedSlices(made((1, 2), 5.0), made((1,), 1, "i8")))
    check(table, [[0], [5], [-SUM], [0]])


def test_memory_of_another_gpu_is_written_to_at_once(strategy, xp, monkeypatch, neighbour):
    """By the program, and by CuPy's pool, which reuses a dead array's memory on its own stream."""
    v, w, optimizer = hs.Variable(np.zeros(900)), hs.Variable(np.zeros(900)), hs.optimizers.SGD(1.0)
    with neighbour:
        side = xp.cuda.Stream(non_blocking=True)

    def replica():
        with neighbour:
            kept = xp.full(900, RANK + 1.0)
            with side:
                gone = xp.full(900, RANK + 1.0)
        optimizer.apply_gradients([(kept, v), (gone, w)])
        del gone
        with neighbour:
            kept.fill(-1.0)
            with side:
                xp.full(900, -1.0)

    stream = strategy.replica_group.stream
    with monkeypatch.context() as patch:
        patch.setattr(type(stream), "let_go", lambda _: None)  # as long as the GPU is behind
        strategy.run(replica)
    check(v, -SUM)
    check(w, -SUM)
    strategy.run(lambda: None)
    assert not stream.reads


@pytest.mark.mpi(min_size=2)  # one replica is of one kind
def test_replicas_on_cpus_and_gpus_are_refused(place, monkeypatch):
    make, last = hs.CentralStorageStrategy, N - 1
    devices = [*place.devices[:-1], "CPU:0"]
    with pytest.raises(ValueError, match=rf"^{make.__name__}: .* on GPUs and on CPUs: ") as caught:
        make(devices)
    gpus = f"{devices[0]} on rank 0", f"CPU:0 on rank {last}"
    for fact in (*gpus, "all on CPUs", "parameter_device='CPU:0'"):
        assert fact in str(caught.value)
    with monkeypatch.context() as patch:
        if RANK == last:  # as on hosts of which some have GPUs
            patch.setattr(gpu, "visible_gpus", lambda: ())
        for make in (hs.MirroredStrategy, hs.MultiWorkerMirroredStrategy):
            with pytest.raises(
                RuntimeError,
                match=rf"^{make.__name__}: .* on GPUs and on CPUs: GPU:0 on rank.*; CPU:0 on "
                rf"rank {last}; all must .* set CUDA_VISIBLE_DEVICES to nothing",
            ):
                make()
    with place.make(hs.MirroredStrategy) as strategy:
        assert strategy.reduce("SUM", strategy.run(lambda: 1), None).item() == N


@pytest.mark.mpi(min_size=2)
def test_a_step_is_one_all_reduce_of_all_gradients(place, monkeypatch):
    with place.make(hs.MirroredStrategy) as strategy, strategy.scope():
        v, optimizer = hs.Variable(np.zeros(5000, np.float32)), hs.optimizers.Adam(0.1)
        gradient, calls = strategy.xp.ones(5000, np.float32), []
        communicator: Any = strategy.replica_group.communicator
        real = communicator._comm

        def all_reduce(*arguments):
            calls.append(arguments[2])
            real.allReduce(*arguments)

        fake = types.SimpleNamespace(allReduce=all_reduce, check_async_error=real.check_async_error)
        monkeypatch.setattr(communicator, "_comm", fake)  # it has no other verb
        for _ in range(2):
            strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
        monkeypatch.undo()
        assert calls == [5000, 5000]


def test_an_update_that_is_broken_off_is_not_read(place, monkeypatch):
    with place.make(hs.MirroredStrategy) as strategy:
        with strategy.scope():
            v, optimizer = hs.Variable(np.zeros(3, np.float32)), hs.optimizers.SGD(1.0)

        def stop(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(device_update.DeviceUpdate, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            strategy.run(lambda: optimizer.apply_gradients([(place.xp.ones(3, np.float32), v)]))
        monkeypatch.undo()
        for read in v.numpy, v.value, lambda: v + 1:
            with pytest.raises(
                RuntimeError, match=r"an exception interrupted SGD\.apply_gradients"
            ):
                read()
        assert optimizer.iterations == 0
        calls: Any = strategy.replica_group.communicator.calls
        if strategy.num_replicas_in_sync > 1:
            assert calls.barred.call == "SGD.apply_gradients"
            # So that the test can continue, which a program cannot.
            calls.barred = None
