"""Updates split over the replicas give the unsplit results, with part of the slots on each."""

import itertools
import json
import os
import resource
from pathlib import Path

import drawn
import numpy as np
import pytest
from internals import device_update, mirrored_host, rows, state_of_optimizer
from mpi4py import MPI
from slow import slow_but
from strategies import ShardedMirroredStrategy

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint

pytestmark = pytest.mark.core

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

SHAPES = [(300, 70), (7,), (), (0, 3), (1, 1), (999,)]
DTYPES = ["float32", "float32", "float64", "float32", "float16", "float64"]

OPTIMIZERS = {
    "SGD": lambda: hs.optimizers.SGD(0.1),
    "momentum": lambda: hs.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: hs.optimizers.Adam(0.01),
    "RMSprop": lambda: hs.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
}
WITH_NORMS = {
    "global_clipnorm": lambda: hs.optimizers.Adam(0.01, global_clipnorm=1.0),
    "clipnorm": lambda: hs.optimizers.Adagrad(0.01, clipnorm=0.5),
    "without slots": lambda: hs.optimizers.SGD(0.01, global_clipnorm=1.0),
}


class Model:
    """Variables of several kinds, and their optimizer.

    The sums of their gradients are exact if any replicas compute on GPUs. On hosts alone the order
    of sums is the same everywhere, which only inexact sums show.
    """

    def __init__(self, strategy, optimizer, shapes=SHAPES, dtypes=DTYPES, exact=None):
        self.strategy = strategy
        self.exact = strategy.xp is not np if exact is None else exact
        random = np.random.default_rng(1)
        with strategy.scope():
            values = [
                (random.random(shape) - 0.5).astype(dtype)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            self.variables = [hs.Variable(value, name=f"v{i}") for i, value in enumerate(values)]
            self.optimizer = optimizer()
        self.checkpoint = Checkpoint(model=self.variables, optimizer=self.optimizer)

    def train(self, steps, first=0, only=slice(None)):
        for step in range(first, first + steps):
            self.strategy.run(self.step, args=(step, only))
        return self

    def step(self, step, only):
        """One step with gradients that depend on the step and the rank."""
        random = np.random.default_rng((step, RANK))
        gradients = [
            self.strategy.xp.asarray(drawn.numbers(random, v.shape, v.dtype, self.exact))
            for v in self.variables
        ]
        self.optimizer.apply_gradients(list(zip(gradients, self.variables, strict=True))[only])

    def values(self):
        return [v.numpy() for v in self.variables] + [v.numpy() for v in self.optimizer.variables]


@pytest.fixture
def both(place):
    """A strategy that does not split updates, and one that does."""
    with place.make(hs.MirroredStrategy) as one, place.make(ShardedMirroredStrategy) as other:
        yield one, other


@pytest.fixture
def path(tmp_path):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "checkpoint"))


# ---- results


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_values_and_slots_are_those_of_unsplit_updates(both, place, optimizer):
    expected, found = (
        Model(strategy, OPTIMIZERS[optimizer]).train(4).values() for strategy in both
    )
    drawn.check_equal(found, expected, place)


@pytest.mark.parametrize(
    "count", [0, 1, N - 1, N, 256 * N - 1, 256 * N, 256 * N + 1, 40_000, 300_001]
)
def test_any_number_of_elements(both, place, count):
    """Fewer than ranks, fewer than are split, a message in a record or mailbox, compiled loops."""
    made = (
        Model(strategy, OPTIMIZERS["Adam"], [(count,), (3,)], ["float32"] * 2).train(2)
        for strategy in both
    )
    expected, found = (model.values() for model in made)
    drawn.check_equal(found, expected, place)


@pytest.mark.parametrize("optimizer", WITH_NORMS)
def test_norms_take_all_parts(both, optimizer):
    expected, found = (
        Model(strategy, WITH_NORMS[optimizer]).train(3).values() for strategy in both
    )
    # Each rank adds up the squares of its part.
    for one, other in zip(found, expected, strict=True):
        drawn.check_close(one, other)


OF_BOTH_KINDS = {
    **{name: (WITH_NORMS[name], SHAPES, DTYPES) for name in WITH_NORMS},
    "clipnorm of one variable": (WITH_NORMS["clipnorm"], [(999,)], ["float64"]),
    "global_clipnorm of one variable": (WITH_NORMS["global_clipnorm"], [(999,)], ["float64"]),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
@pytest.mark.parametrize("is_host", [{0}, {N - 1}], ids=["CPU first", "CPU last"])
@pytest.mark.parametrize("case", OF_BOTH_KINDS)
@pytest.mark.filterwarnings("ignore:.*exchange data through host memory instead of NCCL")
def test_norms_take_the_parts_of_hosts_and_gpus(place, is_host, case):
    devices = ["CPU:0" if r in is_host else gpu for r, gpu in enumerate(place.devices)]
    with hs.MirroredStrategy(["CPU:0"] * N) as one, ShardedMirroredStrategy(devices) as other:
        expected, found = (
            Model(strategy, *OF_BOTH_KINDS[case], exact=True).train(3).values()
            for strategy in (one, other)
        )
    for one, other in zip(expected, found, strict=True):
        assert len({each.tobytes() for each in MPI.COMM_WORLD.allgather(other)}) == 1
        drawn.check_close(other, one)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.filterwarnings("ignore:.*exchange data through host memory instead of NCCL")
def test_copies_on_hosts_and_gpus_are_equal(place, optimizer, is_sparse, monkeypatch):
    """Although a GPU rounds differently: it fuses multiplications with additions."""

    original = device_update.apply_on_gpu

    def apply_on_gpu(rule, numbers, value, gradient, slots):
        original(rule, numbers, value, gradient, slots)
        value *= 1.25

    with ShardedMirroredStrategy(["CPU:0", *place.devices[1:]]) as strategy:
        model = Model(strategy, OPTIMIZERS[optimizer], [(300, 7), (3,)], ["float32", "float64"])
        with monkeypatch.context() as patch:
            for module in (device_update, rows):
                patch.setattr(module, "apply_on_gpu", apply_on_gpu)
            for _ in range(2):
                if is_sparse:
                    strategy.run(sparse_step, args=(model,))
                else:
                    model.train(1)
        for v in model.variables:
            assert len({each.tobytes() for each in MPI.COMM_WORLD.allgather(v.numpy())}) == 1


def sparse_step(model):
    xp = model.strategy.xp
    names = xp.asarray([7, 299 - RANK, 7, 150, 0])
    slices = hs.IndexedSlices(xp.ones((5, 7), xp.float32), names)
    model.optimizer.apply_gradients([(slices, model.variables[0])])


def test_some_variables_and_others_later(both, place):
    results = []
    for strategy in both:
        model = Model(strategy, OPTIMIZERS["Adam"]).train(2, only=slice(1, 3))
        model.train(2, first=2).train(2, first=4, only=slice(None, None, -1)).train(
            1, first=6, only=slice(0, 6, 5)
        )
        with strategy.scope():
            model.variables.append(hs.Variable(np.ones((40, 50)), name="later"))
        results.append(model.train(2, first=7).values())
    drawn.check_equal(results[1], results[0], place)


def test_two_optimizers_split_the_same_variables_each_its_way(both, place):
    results = []
    for strategy in both:
        model = Model(strategy, OPTIMIZERS["Adam"]).train(1)
        first, model.optimizer = model.optimizer, OPTIMIZERS["momentum"]()
        model.train(1, first=1, only=slice(3)).train(1, first=2)
        second, model.optimizer = model.optimizer, first
        results.append([*model.train(1, first=3).values(), *(v.numpy() for v in second.variables)])
    drawn.check_equal(results[1], results[0], place)


def test_the_learning_rate_may_change(both, place):
    results = []
    for strategy in both:
        model = Model(strategy, OPTIMIZERS["Adam"]).train(1)
        model.optimizer.learning_rate = 0.5
        model.train(1, first=1)
        model.optimizer.learning_rate = lambda step: 0.1 / (step + 1)
        results.append(model.train(2, first=2).values())
    drawn.check_equal(results[1], results[0], place)


def test_sparse_gradients(both, place):
    results = []
    for strategy in both:
        model = Model(strategy, OPTIMIZERS["Adam"]).train(1)
        table, vector = model.variables[0], model.variables[5]
        xp = strategy.xp

        def step(model=model, table=table, vector=vector, xp=xp):
            # Rows of every part, some of them on several ranks, and twice on one.
            rows = xp.asarray([7, 299 - RANK, 7, 150, 0])
            values = xp.arange(350.0, dtype=xp.float32).reshape(5, 70) * (RANK + 1)
            single = hs.IndexedSlices(xp.asarray([5.0, 2.0 + RANK]), xp.asarray([998, RANK]))
            model.optimizer.apply_gradients(
                [(hs.IndexedSlices(values, rows), table), (single, vector)]
            )

        for _ in range(2):
            strategy.run(step)
        results.append(model.values())
    drawn.check_equal(results[1], results[0], place)


def test_gradients_in_buffers(both, place):
    results = []
    for strategy in both:
        model = Model(strategy, OPTIMIZERS["Adam"])
        with strategy.scope():
            buffers = model.optimizer.gradient_buffers(model.variables)

        def step(model=model, buffers=buffers):
            for k, buffer in enumerate(buffers):
                buffer[...] = RANK + k + 0.25
            model.optimizer.apply_gradients(zip(buffers, model.variables, strict=True))

        for _ in range(3):
            strategy.run(step)
        results.append(model.values())
    drawn.check_equal(results[1], results[0], place)


def test_gradients_that_are_reduced_already(both, place):
    results = []
    for strategy in both:
        model = Model(strategy, OPTIMIZERS["momentum"])
        with strategy.scope():
            for step in range(2):
                random = np.random.default_rng(step)  # the same on every rank
                gradients = [
                    strategy.xp.asarray(random.normal(size=v.shape)) for v in model.variables
                ]
                model.optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        results.append(model.values())
    drawn.check_equal(results[1], results[0], place)


def test_assignments_reach_every_copy(place):
    with place.make(ShardedMirroredStrategy) as strategy:
        model = Model(strategy, OPTIMIZERS["Adam"])
        with strategy.scope():
            v = hs.Variable(
                np.zeros((300, 200), np.float32), aggregation=hs.VariableAggregation.SUM
            )
        model.variables.append(v)
        model.train(1)
        v.assign(np.full(v.shape, 2.0, v.dtype))
        strategy.run(lambda: v.assign_add(strategy.xp.full(v.shape, RANK + 1, v.dtype)))
        for value in MPI.COMM_WORLD.allgather(v.numpy()):
            np.testing.assert_array_equal(value, 2 + N * (N + 1) / 2)
        model.train(1, first=1)
        assert len({value.tobytes() for value in MPI.COMM_WORLD.allgather(v.numpy())}) == 1


# ---- memory


def test_each_rank_has_its_share_of_the_slots(place):
    shapes, dtypes = [(700, 900), (900,), (900, 300), (300,)], ["float32"] * 4
    with place.make(ShardedMirroredStrategy) as strategy:
        model = Model(strategy, OPTIMIZERS["Adam"], shapes, dtypes).train(1)
        slots = [
            block
            for blocks in state_of_optimizer(model.optimizer).slots.values()
            for block in blocks
        ]
        own = sum(slot.array.nbytes for slot in slots)
        whole = 2 * sum(v.numpy().nbytes for v in model.variables)
        assert MPI.COMM_WORLD.allreduce(own) == whole
        assert own == pytest.approx(whole / N, rel=0.02)


class Scarce:
    """NumPy with memory for small arrays only."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype=float):
        if np.prod(shape) > 10_000:
            raise MemoryError("no memory is left")
        return np.empty(shape, dtype)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["CPU"], indirect=True)
@pytest.mark.parametrize("optimizer", ["clipnorm", "global_clipnorm"])
def test_norms_for_which_a_rank_has_no_memory(both, optimizer, monkeypatch):
    expected, model = (Model(strategy, WITH_NORMS[optimizer]) for strategy in both)
    expected.train(3)
    with monkeypatch.context() as patch:
        if RANK == N - 1:
            patch.setattr(mirrored_host, "np", Scarce())
        for _ in range(2):
            with pytest.raises(MemoryError, match="no memory is left"):
                model.train(1)
    assert model.optimizer.iterations == 0
    for one, other in zip(model.train(3).values(), expected.values(), strict=True):
        drawn.check_close(one, other)


# ---- checkpoints


KINDS = [hs.MirroredStrategy, ShardedMirroredStrategy]
BOTH_WAYS = [
    (ShardedMirroredStrategy, hs.MirroredStrategy),
    (hs.MirroredStrategy, ShardedMirroredStrategy),
]


@pytest.mark.parametrize(
    ("saves", "restores"), slow_but(BOTH_WAYS, itertools.product(KINDS, KINDS))
)
def test_checkpoints_fit_both_ways_round(place, path, saves, restores):
    with place.make(saves) as one, place.make(restores) as other:
        saved = Model(one, OPTIMIZERS["RMSprop"]).train(1, only=slice(2)).train(2, first=1)
        saved.checkpoint.save(path)
        restored = Model(other, OPTIMIZERS["RMSprop"])
        restored.checkpoint.restore(path)
        drawn.check_equal(restored.values(), saved.values(), place)
        drawn.check_equal(
            restored.train(2, first=3).values(), saved.train(2, first=3).values(), place
        )


@pytest.mark.parametrize(
    "blocking", slow_but([False], [True, False]), ids=["blocking", "in the background"]
)
def test_a_checkpoint_is_the_same_file_split_or_not(both, place, path, blocking):
    """Except for the checksums in the header: each is of what one rank wrote in a row."""
    for name, strategy in zip(("unsplit", "split"), both, strict=True):
        model = Model(
            strategy, OPTIMIZERS["Adam"], [(1500, 900), (2,)], ["float32", "float64"]
        ).train(1)
        model.checkpoint.save(path + name, blocking=blocking)
        model.checkpoint.sync()
    if place.kind == "CPU" and RANK == 0:  # slots of several parts of 4 MiB
        assert arrays_in(path + "split") == arrays_in(path + "unsplit")


def arrays_in(path):
    """The bytes of all arrays in a file, and where each is."""
    file = Path(path).read_bytes()
    start = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:start])
    header.pop("__metadata__")
    return header, file[start:]


def test_what_cannot_be_written_is_an_error_everywhere(place, path):
    with place.make(ShardedMirroredStrategy) as strategy:
        model = Model(strategy, OPTIMIZERS["Adam"]).train(1)
        if RANK == 0:
            os.mkdir(path)
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(OSError, match="save"):
            model.checkpoint.save(path)
        model.checkpoint.save(f"{path}.other")
        assert model.checkpoint.restore(f"{path}.other") == ((), ())


@pytest.mark.parametrize("mib", slow_but([8], [1, 8, 13]), ids="after {} MiB".format)
def test_a_disk_that_fills_between_parts_of_slots_is_an_error_everywhere(place, path, mib):
    with place.make(ShardedMirroredStrategy) as strategy:
        model = Model(strategy, OPTIMIZERS["Adam"], [(1500, 900)], ["float32"]).train(1)
        model.checkpoint.save(path)
        before, after = model.values(), model.train(1, first=1).values()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if RANK == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (mib << 20, hard))
        try:
            with pytest.raises(OSError, match="File too large; nothing was saved"):
                model.checkpoint.save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        drawn.check_equal(model.values(), after, place)
        model.checkpoint.restore(path)
        drawn.check_equal(model.values(), before, place)


# ---- misuse


@pytest.mark.mpi(min_size=2)
def test_the_keyword_must_match(place):
    with pytest.raises(hs.ReplicaMismatchError, match=r"shard_updates=True"):
        hs.MirroredStrategy(place.devices, shard_updates=RANK == 0)
    with place.make(ShardedMirroredStrategy) as strategy:
        Model(strategy, OPTIMIZERS["Adam"]).train(1)


def test_central_storage_takes_it_too(place):
    """On GPUs it splits updates; on CPUs all do, so the bits are those of the ordinary strategy."""
    results = []
    for shard_updates in (False, True):
        with hs.CentralStorageStrategy(place.devices, shard_updates=shard_updates) as strategy:
            results.append(Model(strategy, OPTIMIZERS["Adam"]).train(3).values())
    drawn.check_equal(results[1], results[0], place)


@pytest.mark.mpi(min_size=2)
def test_it_excludes_gpus_with_variables_in_host_memory(place):
    if place.kind == "GPU":
        with pytest.raises(ValueError, match="the memory of the host"):
            hs.CentralStorageStrategy(place.devices, "CPU:0", shard_updates=True)
    with hs.CentralStorageStrategy(
        place.devices, place.devices[-1], shard_updates=True
    ) as strategy:
        Model(strategy, OPTIMIZERS["Adam"]).train(1)


def test_the_keyword_is_a_bool(place):
    with pytest.raises(TypeError, match="shard_updates is 'yes'"):
        hs.MirroredStrategy(place.devices, shard_updates="yes")  # pyright: ignore[reportArgumentType]


@pytest.mark.mpi(min_size=2)
def test_ranks_that_update_other_variables_are_told(both, place):
    results = []
    for strategy in both:
        model = Model(strategy, OPTIMIZERS["Adam"])
        with pytest.raises(hs.ReplicaMismatchError, match="'v"):
            model.train(1, only=slice(RANK == 0, None))
        results.append(model.train(2).values())
        with pytest.raises(hs.ReplicaMismatchError, match="'v"):
            model.train(1, only=slice(RANK == 0, None))
        results.append(model.train(1, first=2).values())
    drawn.check_equal(results[2], results[0], place)
    drawn.check_equal(results[3], results[1], place)


class Asked:
    """NCCL's communicator, with a list of its calls and their counts."""

    def __init__(self, real):
        self.calls = []
        self._real = real

    def __getattr__(self, name):
        def call(*arguments):
            if arguments:  # the watchdog's thread asks for errors, without any
                self.calls.append((name, arguments[2]))
            return getattr(self._real, name)(*arguments)

        return call


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_what_a_step_asks_of_nccl(both, place):
    """The counts of docs/scale.md: one call, or two that move a part each."""
    part = 1024
    for strategy, expected in zip(
        both,
        ([("allReduce", part * N)], [("reduceScatter", part), ("allGather", 4 * part)]),
        strict=True,
    ):
        model = Model(strategy, OPTIMIZERS["momentum"], [(part * N,)], ["float32"])
        collectives = strategy._group.communicator._collectives
        real = collectives._comm
        collectives._comm = asked = Asked(real)
        try:
            model.train(1)  # which prepares the calls
            asked.calls.clear()
            model.train(1, first=1)
        finally:
            collectives._comm = real
        assert asked.calls == expected
