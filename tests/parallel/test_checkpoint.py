"""Checkpoints on any number of ranks: saved values come back, and a mismatch changes nothing."""

import errno
import fcntl
import math
import os
import pathlib
import threading

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import write_checkpoint
from internals import CheckpointFile, Entry, own_value
from mpi4py import MPI
from strategies import STRATEGIES
from transports import has, kind

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint, CheckpointManager, Restored

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
DTYPES = "float32 float64 float16 bfloat16 int64 int16 uint8 bool complex64 complex128".split()


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


on_one_strategy = pytest.mark.parametrize("strategy", [hs.MirroredStrategy], indirect=True)


@pytest.fixture
def path(tmp_path):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "folder" / "checkpoint"))


class Program:
    """A small model with a bit of everything."""

    def __init__(self, strategy, value=0.0, momentum=0.5):
        self.strategy = strategy
        with strategy.scope():
            self.w = hs.Variable(np.full((4, 3), value))
            self.b = hs.Variable(np.full(3, value, np.float32))
            self.steps = hs.Variable(0, dtype=np.int64)
            self.seen = hs.metrics.Mean()
            self.optimizer = hs.optimizers.SGD(0.25, momentum=momentum)
        self.objects = {
            "model": {"layers": [self.w, {"b": self.b}]},
            "optimizer": self.optimizer,
            "steps": self.steps,
            "seen": self.seen,
        }
        self.checkpoint = Checkpoint(**self.objects)

    def train(self, steps=3):
        for _ in range(steps):
            self.strategy.run(self.step)
            self.steps.assign_add(1)

    def step(self):
        xp = self.strategy.xp
        k = int(self.steps) + RANK + 1
        self.seen.update_state(xp.full(k, 0.1 * k))
        gradients = [xp.arange(12.0).reshape(4, 3) * k, xp.full(3, 0.1 * k, xp.float32)]
        self.optimizer.apply_gradients(list(zip(gradients, [self.w, self.b], strict=True)))

    def state(self):
        """Everything, bit by bit."""
        values = [v.numpy().tobytes() for v in (self.w, self.b, self.steps)]
        return values, float(self.seen.result()), self.optimizer.iterations


# ---- what is saved comes back


def test_training_goes_on_as_if_nothing_had_been(strategy, path):
    undisturbed = Program(strategy)
    undisturbed.train()
    assert undisturbed.checkpoint.save(pathlib.Path(path)) == path
    saved = undisturbed.state()
    undisturbed.train()

    other = Program(strategy, value=7.0)
    assert other.checkpoint.restore(path) == Restored((), ())
    assert other.state() == saved
    other.train()
    assert other.state() == undisturbed.state()

    undisturbed.checkpoint.restore(path)  # back to the start, slots and all
    assert undisturbed.state() == saved
    undisturbed.train()
    assert undisturbed.state() == other.state()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_variables_in_host_memory_of_replicas_on_gpus(place, path):
    """The parameter rank alone has their slots, too."""
    with hs.CentralStorageStrategy(place.devices, "CPU:0") as strategy:
        test_training_goes_on_as_if_nothing_had_been(strategy, path)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [(hs.optimizers.Adagrad, 0), (hs.optimizers.Adagrad, 2), (hs.optimizers.RMSprop, 1)],
)
def test_an_optimizer_goes_back_to_the_step_of_the_file(strategy, path, kind, steps):
    """At that step some variables have slots, or none; those of the others begin anew.

    Another program clips the same bits, though a variable got its slot after the others.
    """

    def made():
        with strategy.scope():
            variables = [hs.Variable(np.arange(n) / 7) for n in (40, 8, 5)]
            return variables, kind(0.1, global_clipnorm=0.7)

    def steps_of(program, *names):
        for which in names:
            with strategy.scope():
                values = [strategy.xp.asarray(v.numpy()) for v in program[0][which:]]
            gradients = [strategy.xp.cos(value) * (RANK + 2) for value in values]
            pairs = list(zip(gradients, program[0][which:], strict=True))
            strategy.run(program[1].apply_gradients, args=(pairs,))
            yield [v.numpy().tobytes() for v in program[0]]

    program, other = made(), made()
    list(steps_of(program, *(1, 0)[:steps]))
    checkpoint = Checkpoint(v=program[0], optimizer=program[1])
    checkpoint.save(path)
    after = list(steps_of(program, 0, 1, 0))
    checkpoint.restore(path)
    assert list(steps_of(program, 0, 1, 0)) == after
    Checkpoint(v=other[0], optimizer=other[1]).restore(path)
    assert list(steps_of(other, 0, 1, 0)) == after


def test_dtypes_and_shapes_and_two_names_for_one_variable(strategy, path):
    kinds = [kind(dtype) for dtype in DTYPES if has(strategy.xp, kind(dtype))]
    values = [
        (1 + np.arange(int(np.prod(shape))).reshape(shape) % 3).astype(dtype)
        for dtype in kinds
        for shape in [(), (0,), (5, 2)]
    ]
    with strategy.scope():
        variables = [hs.Variable(one) for one in values]
    checkpoint = Checkpoint(all=variables, tied=variables[2])
    checkpoint.save(path)
    for v in variables:
        v.assign(np.zeros(v.shape, v.dtype))
    assert checkpoint.restore(path) == Restored((), ())
    assert [v.numpy().tobytes() for v in variables] == [one.tobytes() for one in values]


@on_one_strategy
def test_large_variables_go_in_parts(strategy, path, monkeypatch):
    """Three parts, the last of them short."""
    monkeypatch.setenv("HPCSTRAT_COMPILE", "0")  # which takes longer
    with strategy.scope():
        v = hs.Variable(np.arange(2_200_001, dtype=np.float32))
        optimizer = hs.optimizers.SGD(0.5, momentum=0.5)

    def step():
        ones = strategy.xp.ones(v.shape, v.dtype)
        strategy.run(lambda: optimizer.apply_gradients([(ones, v)]))
        return v.numpy()

    checkpoint = Checkpoint(v=v, optimizer=optimizer)
    values = [v.numpy()]
    for i in range(2):
        checkpoint.save(f"{path}{i}")
        values.append(step())
    for i in (1, 0):  # with slots, and without
        checkpoint.restore(f"{path}{i}")
        assert np.array_equal(v.numpy(), values[i]) and np.array_equal(step(), values[i + 1])


def test_each_replica_gets_its_own_value_back(strategy, path):
    with strategy.scope():
        v = hs.Variable(np.zeros(2, np.float32), synchronization="ON_READ", aggregation="NONE")
    strategy.run(lambda: v.assign(strategy.xp.asarray([RANK + 0.5, 3.0])))
    Checkpoint(v=v).save(path)
    strategy.run(lambda: v.assign(strategy.xp.zeros(2, np.float32)))
    Checkpoint(v=v).restore(path)
    found = strategy.experimental_local_results(strategy.run(lambda: v.value()))
    assert [hs.asnumpy(one).tolist() for one in found] == [[rank + 0.5, 3] for rank in range(N)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_means_of_more_replicas_are_summed_in_32_bits(place, dtype):
    """As a read of the variable sums them."""
    with place.make(hs.MirroredStrategy) as strategy, strategy.scope():
        v = hs.Variable(np.zeros(2, dtype), synchronization="ON_READ", aggregation="MEAN")
    parts = np.full((N + 3, 2), 30_000, dtype)
    value = own_value(v, parts)
    assert value.dtype == dtype and value.tolist() == parts[0].tolist()


def test_variables_outside_of_scopes(path, place):
    v = hs.Variable(np.full(3, RANK + 1.0))  # each process has its own
    optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
    optimizer.apply_gradients([(np.ones(3), v)])
    checkpoint = Checkpoint(v=v, optimizer=optimizer)
    checkpoint.save(path)
    v.assign(np.zeros(3))
    checkpoint.restore(path)
    assert v.numpy().tolist() == [0.0] * 3  # rank 0's 1 after a step
    optimizer.apply_gradients([(np.ones(3), v)])
    assert v.numpy().tolist() == [-1.5] * 3
    with place.make(hs.MirroredStrategy) as strategy:
        for call in (checkpoint.save, checkpoint.restore):
            with pytest.raises(RuntimeError, match=r"was called inside a replica function"):
                strategy.run(call, args=(path,))


def test_objects_of_two_strategies_change_places(place, path):
    with place.make(hs.CentralStorageStrategy) as one, place.make(hs.MirroredStrategy) as two:
        programs = [Program(one, 1.0), Program(two, 2.0)]
        for program in programs:
            program.train()
        Checkpoint(programs=[program.objects for program in programs]).save(path)
        states = [program.state() for program in programs]
        Checkpoint(programs=[program.objects for program in programs[::-1]]).restore(path)
        assert [program.state() for program in programs] == states[::-1]


# ---- a mismatch changes nothing


@pytest.fixture
def saved(strategy, path):
    program = Program(strategy)
    program.train()
    program.checkpoint.save(path)
    program.train(1)
    return program


def refused(program, checkpoint, path, match, error: type[Exception] = ValueError):
    before = program.state()
    with pytest.raises(error, match=match):
        checkpoint.restore(path)
    assert program.state() == before


@on_one_strategy
def test_what_is_missing_and_left_over_is_said(strategy, saved, path):
    with strategy.scope():
        new = hs.Variable(np.zeros(2))
    some = Checkpoint(model=saved.objects["model"], new={"n": new})
    refused(
        saved,
        some,
        path,
        r"(?s)Checkpoint\.restore: \S*checkpoint does not fit the objects\. Nothing was changed; pass objects [^\n]*\n"
        r"  missing in the file: new/n\n"
        r"  left over in the file: optimizer, optimizer/momentum/model/layers/0, .*, seen, steps\n.*partial=True",
    )
    restored = some.restore(path, partial=True)
    assert restored.missing == ("new/n",)
    assert restored.left_over[0] == "optimizer" and "steps" in restored.left_over
    assert int(saved.steps) == 4
    again = Program(strategy)
    again.train(3)
    assert np.array_equal(saved.w.numpy(), again.w.numpy())
    many = Checkpoint(many=[hs.Variable(0.0) for _ in range(30)])
    refused(saved, many, path, "many/0, many/1, many/10, .* and 22 more")


@on_one_strategy
def test_other_kinds_and_shapes_are_refused(strategy, saved, path):
    with strategy.scope():
        shape, dtype = hs.Variable(np.zeros((3, 4))), hs.Variable(np.zeros((4, 3), np.float32))
        metric, adam = hs.metrics.Sum(), hs.optimizers.Adam()
        plain, fresh = hs.optimizers.SGD(), hs.optimizers.SGD(momentum=0.5)

    def with_w(w):
        return {"model": {"layers": [w, {"b": saved.b}]}, "optimizer": fresh}

    for changes, match in [
        (with_w(shape), r"float64 of shape \(3, 4\) here and float64 of"),
        (with_w(dtype), r"float32 of shape \(4, 3\) here and float64 of"),
        ({"seen": metric}, "seen is Sum here and Mean in the file"),
        ({"optimizer": adam}, "optimizer is Adam here and SGD in the file"),
        ({"optimizer": plain}, r"has the slots \[\] here and \['momentum'\] in the file"),
        ({"steps": saved.seen, "seen": saved.steps}, "seen is a variable here and Mean in the"),
    ]:
        refused(saved, Checkpoint(**{**saved.objects, **changes}), path, match)


@on_one_strategy
@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("number", [math.nan, 1e300, 3.0, True, -1, 2**64, "3", [3]], ids=repr)
def test_files_with_odd_numbers_are_refused(saved, path, number):
    data = hs.data.Dataset.range(10).shuffle(10, seed=1).batch(2)
    next(iter(data))
    checkpoint = Checkpoint(**saved.objects, data=data)
    checkpoint.save(path)
    with CheckpointFile(path) as file:
        facts, entries = file.metadata, file.entries
        arrays = {name: [part.copy() for part in file.parts(name)] for name in entries}
    shuffles = [{"shuffles": [[number, 0]]}, {"shuffles": [[1, number]]}]
    of_data = [{"taken": number}, {"size": number}, *shuffles]
    for name, changed in [("optimizer", {"iterations": number}), *(("data", x) for x in of_data)]:
        metadata = facts | {name: facts[name] | changed}
        write_checkpoint(path, entries, metadata, arrays.__getitem__)
        refused(saved, checkpoint, path, r"Checkpoint\.restore: .* pass another file")


def test_odd_shapes_are_refused(path):
    total = hs.Variable(np.complex64(RANK + 1j), synchronization="ON_READ", aggregation="SUM")
    checkpoint, before = Checkpoint(total=total), total.numpy()
    checkpoint.save(path)
    with CheckpointFile(path) as file:
        facts = file.metadata
    for element, match in [
        # Each replica's value has 8 bytes; smaller elements would leave memory that nobody wrote.
        (Entry("complex64", 1, (8 * N,)), "does not fit the objects"),
        (Entry("complex64", 8, (1,) * 65 + (N,)), "has shape"),  # their product may take minutes
        (Entry("complex64", 8, (0, 2**63)), "has shape"),
    ]:
        MPI.COMM_WORLD.Barrier()
        if RANK == 0:
            data = [np.zeros(element.nbytes, np.uint8)]
            write_checkpoint(path, {"total": element}, facts, lambda name, data=data: data)
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(ValueError, match=match):
            checkpoint.restore(path)
        assert total.numpy() == before


@on_one_strategy
def test_a_file_that_is_not_there(saved, path):
    saved.checkpoint.save(path, keep=2)
    said = r"Checkpoint\.restore of \S*checkpointx: there is no such file; nothing was changed"
    refused(saved, saved.checkpoint, path + "x", said, FileNotFoundError)
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        os.unlink(path)
    MPI.COMM_WORLD.Barrier()
    refused(saved, saved.checkpoint, path, r"there is \S*checkpoint\.1", FileNotFoundError)


@on_one_strategy
def test_what_is_no_file_is_told_at_once_everywhere(saved, path):
    """It is left alone, and not waited for."""
    saved.checkpoint.save(name := path + os.fsdecode(b"caf\xe9"))  # a name need not be text
    saved.checkpoint.restore(name)
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        os.unlink(name)
        os.mkfifo(f"{path}.fifo")
    MPI.COMM_WORLD.Barrier()
    said = r"Checkpoint\.restore: .*: it is not a regular file\. Nothing was changed; pass"
    refused(saved, saved.checkpoint, f"{path}.fifo", said)
    for wrong, error, match in [
        (f"{path}.fifo", OSError, "it is not a regular file"),
        (os.path.dirname(path), IsADirectoryError, "it is a directory"),
        (f"{path}/below", NotADirectoryError, ".* is a file and not a folder"),
    ]:
        for blocking in (True, False):
            said = rf"Checkpoint\.save of .*: {match}; nothing was saved"
            with pytest.raises(error, match=said):
                saved.checkpoint.save(wrong, blocking=blocking)
    saved.checkpoint.sync()
    assert sorted(os.listdir(os.path.dirname(path))) == ["checkpoint", "checkpoint.fifo"]
    saved.checkpoint.restore(path)


def test_a_save_in_the_background_goes_where_the_program_was(path, monkeypatch):
    folder = os.path.dirname(path)
    os.makedirs(f"{folder}/elsewhere", exist_ok=True)
    monkeypatch.chdir(folder)
    is_elsewhere = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda file: is_elsewhere.wait(60))
    checkpoint = Checkpoint(w=hs.Variable(1.0))
    checkpoint.save("relative", blocking=False)
    monkeypatch.chdir("elsewhere")
    is_elsewhere.set()
    checkpoint.sync()
    assert sorted(os.listdir(folder)) == ["elsewhere", "relative"]
    assert os.listdir(".") == []


def test_a_save_in_the_background_is_of_its_moment(strategy, path, monkeypatch):
    """It needs no locks, which some clusters' file systems lack, or have for each host alone."""
    monkeypatch.setattr(fcntl, "flock", refuse)
    program = Program(strategy)
    program.train()
    program.checkpoint.save(path, blocking=False)
    saved = program.state()
    program.train()
    program.checkpoint.restore(path)  # waits for the file
    assert program.state() == saved

    program.train(1)
    program.checkpoint.save(path, keep=2, blocking=False)
    program.checkpoint.save(path, keep=2, blocking=False)  # waits for the previous save
    program.checkpoint.sync()
    program.checkpoint.sync()
    assert sorted(os.listdir(os.path.dirname(path))) == ["checkpoint", "checkpoint.1"]


def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WAITING = {
    "Checkpoint.sync": lambda one, path: one.sync(),
    "Checkpoint.save": lambda one, path: one.save(path),
    "Checkpoint.restore": lambda one, path: one.restore(path),
    "CheckpointManager.save": lambda one, path: CheckpointManager(one, path).save(),
}


@on_one_strategy
@pytest.mark.parametrize("waiting", WAITING)
def test_the_next_call_raises_what_a_save_in_the_background_met(saved, path, monkeypatch, waiting):
    if RANK == 0:
        monkeypatch.setattr(os, "pwrite", refuse)
    saved.checkpoint.save(f"{path}2", blocking=False)
    # The other ranks have no part in it; nor need it be the same checkpoint.
    other = Checkpoint(**saved.objects)
    said = rf"{waiting} of .*2: No space .*background; nothing was saved"
    with pytest.raises(OSError, match=said):
        WAITING[waiting](other, path)
    monkeypatch.undo()
    WAITING[waiting](other, path)  # the error comes once
    saved.checkpoint.restore(path)
    assert int(saved.steps) == (4 if "save" in waiting else 3)
    assert os.listdir(os.path.dirname(path)) == ["checkpoint"]


@on_one_strategy
def test_a_thread_that_cannot_start_is_an_error_everywhere(saved, path, monkeypatch):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    if RANK == 0:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    said = r"\.save of .*: can't start new thread; nothing was saved, .* blocking=True"
    for name in (path, f"{path}2"):
        with pytest.raises(RuntimeError, match=said):
            saved.checkpoint.save(name, blocking=False)
    monkeypatch.undo()
    assert os.listdir(os.path.dirname(path)) == ["checkpoint"]
    saved.checkpoint.save(path, blocking=False)
    saved.train(1)
    saved.checkpoint.restore(path)
    assert int(saved.steps) == 4


# ---- the parameter rank writes


@on_one_strategy
@pytest.mark.parametrize("function", ["pwrite", "fsync", "replace"])
def test_a_disk_that_fails_on_the_parameter_rank_is_an_error_everywhere(
    saved, path, monkeypatch, function
):
    if RANK == 0:
        monkeypatch.setattr(os, function, refuse)
    said = r"\] Checkpoint\.save of (?!.*Checkpoint\.save).*: No space .*; nothing was saved"
    with pytest.raises(OSError, match=said):
        saved.checkpoint.save(path)
    monkeypatch.undo()
    assert os.listdir(os.path.dirname(path)) == ["checkpoint"]
    saved.checkpoint.restore(path)
    assert int(saved.steps) == 3
    saved.checkpoint.save(path)


@on_one_strategy
def test_only_the_parameter_rank_writes(saved, path, monkeypatch):
    """And, in the background, the same bytes."""
    calls, contents = [], []
    for name in ("pwrite", "fsync", "replace"):
        whole = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *args, name=name, whole=whole: (calls.append(name), whole(*args))[1]
        )
    for blocking in (True, False):
        saved.checkpoint.save(path, blocking=blocking)
        saved.checkpoint.sync()
        contents.append(pathlib.Path(path).read_bytes())
    assert contents[0] == contents[1]
    assert {*calls} == ({"pwrite", "fsync", "replace"} if RANK == 0 else set())


@on_one_strategy
@pytest.mark.parametrize("good", [0, 2, 4])
def test_a_disk_that_fails_in_restoring_is_an_error_everywhere(saved, path, monkeypatch, good):
    """After this many parts: two variables, a slot of each and the metric."""
    whole, count = CheckpointFile.parts, 0

    def parts(file, name):
        nonlocal count
        count += 1
        if count > good:
            raise OSError(errno.EIO, "the disk is broken")
        yield from whole(file, name)

    monkeypatch.setattr(CheckpointFile, "parts", parts)
    said = r"Checkpoint\.restore of \S*checkpoint: the disk is broken; some objects are .* again"
    with pytest.raises(OSError, match=said):
        saved.checkpoint.restore(path)
    monkeypatch.undo()
    saved.checkpoint.restore(path)
    assert int(saved.steps) == 3


@on_one_strategy
@pytest.mark.mpi(min_size=2)  # there is one rank only
def test_ranks_that_save_different_things_are_told(saved, path):
    for checkpoint, where, keep in [
        (saved.checkpoint, f"{path}{RANK}", None),
        (saved.checkpoint, path, 1 + RANK),
        (Checkpoint(**{f"steps{RANK}": saved.steps}), path, None),
        (Checkpoint(steps=saved.steps, **{f"data{RANK}": hs.data.Dataset.range(3)}), path, None),
    ]:
        with pytest.raises(hs.ReplicaMismatchError, match=r"rank 1: Checkpoint\.save"):
            checkpoint.save(where, keep)
        with pytest.raises(ValueError, match=r"Checkpoint\.save: keep is 0"):  # found by one rank
            checkpoint.save(path, 0 if RANK == N - 1 else None)
    with pytest.raises(hs.ReplicaMismatchError, match=r"ranks? 1\b.*: Checkpoint\.restore"):
        saved.checkpoint.restore(path, partial=RANK == 0)


@on_one_strategy
def test_misuse(strategy, saved, path):
    checkpoint, w, b = saved.checkpoint, saved.w, saved.b
    for call in (checkpoint.save, checkpoint.restore):
        with pytest.raises(RuntimeError, match=r"was called inside a replica function"):
            strategy.run(call, args=(path,))
        for wrong in (None, 3, f"{path}/"):
            with pytest.raises(TypeError, match="must be the name of a file"):
                call(wrong)
    for keep in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"Checkpoint\.save: keep is"):
            checkpoint.save(path, keep)
    for thing in (3, None, "text", np.zeros(3), lambda: 0, strategy):
        with pytest.raises(TypeError, match=r"Checkpoint: a/0 is .* which cannot be saved"):
            Checkpoint(a=[thing])
    said = r'pass its attributes: Checkpoint\(model={"w": model\.w, "b": model\.b}\)'
    with pytest.raises(TypeError, match=said):
        Checkpoint(model=saved)  # has variables, and an object that cannot be saved
    with pytest.raises(ValueError, match=r"Checkpoint: two objects have the name 'a/b'"):
        Checkpoint(a={"b": w}, **{"a/b": b})
    said = r"optimizer has slots of the variable 'Variable', shape \(3,\), which is not"
    with pytest.raises(ValueError, match=said):
        Checkpoint(optimizer=saved.optimizer, w=w).save(path)
    named = {"optimizer": saved.optimizer, "w": w, "b": b, "optimizer/momentum/w": saved.steps}
    with pytest.raises(ValueError, match="an object and a slot have the name 'optimizer/moment"):
        Checkpoint(**named).save(path)


@on_one_strategy
def test_a_directory_named_as_a_previous_file(saved, path):
    """It stays where none is kept, and else is an error before anything is written."""
    if RANK == 0:
        os.mkdir(f"{path}.7")
    saved.checkpoint.save(path, keep=2)
    saved.train(1)
    said = r"\.save of .*checkpoint\.7 is a directory, and keep=9 .* nothing was saved"
    for blocking in (True, False):
        with pytest.raises(IsADirectoryError, match=said):
            saved.checkpoint.save(path, keep=9, blocking=blocking)
    saved.checkpoint.sync()
    names = ["checkpoint", "checkpoint.1", "checkpoint.7"]
    assert sorted(os.listdir(os.path.dirname(path))) == names
    saved.checkpoint.restore(path)
    assert int(saved.steps) == 4
