"""Checkpoints of whole jobs: on other numbers of ranks, after kills and signals, on a full disk."""

import itertools
import re

import numpy as np
import pytest
from internals import CheckpointFile
from slow import slow_but
from strategies import STRATEGIES

# Trains in a way that any lost or repeated element, order, slot or step changes the result.
TRAIN = """
    import os, signal, sys, threading, warnings
    import numpy as np
    import hpcstrat as hs

    warnings.filterwarnings("ignore", "iterating over .* have no elements")  # of short batches, meant
    name, path, *more = sys.argv[1:]
    strategy = getattr(hs, name)(**{"device": "CPU:0"} if name == "OneDeviceStrategy" else {})
    random = np.random.default_rng(0)
    x, y = random.standard_normal((50, 6)), random.standard_normal((50, 2))
    with strategy.scope():
        w, b = hs.Variable(np.zeros((6, 2))), hs.Variable(np.zeros(2))
        epoch = hs.Variable(0, dtype=np.int64)
        loss = hs.metrics.Mean()
        optimizer = hs.optimizers.Adam(hs.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5), global_clipnorm=0.5)
    dataset = hs.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=5).batch(8)
    batches = strategy.experimental_distribute_dataset(dataset)
    checkpoint = hs.checkpoint.Checkpoint(
        model={"w": w, "b": b}, optimizer=optimizer, epoch=epoch, loss=loss, batches=batches
    )

    def step(batch):
        x, y = batch
        error = x @ w + b - y
        loss.update_state(error**2)
        optimizer.apply_gradients([(x.T @ error, w), (error.sum(axis=0), b)])

    def show():
        print(w.numpy().tobytes().hex(), b.numpy().tobytes().hex(), float(loss.result()).hex(), optimizer.iterations)

    def train(boundary=lambda: None):
        while int(epoch) < 3:
            for batch in batches:
                strategy.run(step, args=(batch,))
                boundary()
            epoch.assign_add(1)
        show()
"""


def read(path):
    with CheckpointFile(str(path)) as file:
        return {
            name: b"".join(part.tobytes() for part in file.parts(name)) for name in file.entries
        }, file.metadata


def numbers(output):
    """The last line's value."""
    *arrays, loss, steps = output.splitlines()[-1].split()
    return (
        np.concatenate([np.frombuffer(bytes.fromhex(a)) for a in arrays]),
        float.fromhex(loss),
        int(steps),
    )


def well(result):
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    return result.stdout


OTHERS = [
    *(("CentralStorageStrategy", ranks) for ranks in (1, 2, 3, 4)),
    ("MirroredStrategy", 3),
    ("OneDeviceStrategy", None),
]


@pytest.mark.parametrize(
    ("saved_on", "others"),
    [
        pytest.param(
            2,
            [("MirroredStrategy", 3), ("OneDeviceStrategy", None)],
            id="of 2 ranks on 3 and 1",
        ),
        pytest.param(4, OTHERS, id="of 4 ranks on all", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_restores(launch, tmp_path, saved_on, others):
    save = (
        TRAIN
        + """
    def boundary():
        if optimizer.iterations == 10:
            checkpoint.save(path)
            show()
    train(boundary)
    """
    )
    again = (
        TRAIN
        + """
    checkpoint.restore(path)
    checkpoint.save(more[0])
    show()
    train()
    """
    )
    first = well(launch(save, saved_on, "CentralStorageStrategy", tmp_path / "saved")).splitlines()
    arrays, facts = read(tmp_path / "saved")
    assert facts["batches"]["taken"] == 24 and facts["optimizer"]["iterations"] == 10
    for name, ranks in others:
        at, end = well(
            launch(again, ranks, name, tmp_path / "saved", tmp_path / "again")
        ).splitlines()
        assert at.split()[:2] == first[0].split()[:2]
        assert numbers(at)[1] == numbers(first[0])[1]
        again_arrays, again_facts = read(tmp_path / "again")
        loss, again_loss = arrays["loss"], again_arrays.pop("loss")
        assert again_facts == facts
        assert again_arrays | {"loss": loss} == arrays
        if ranks == saved_on:
            assert again_loss == loss
            assert end == first[1]
        for found, expected in zip(numbers(end), numbers(first[1]), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    "ranks, how",
    slow_but(
        [(2, "SIGTERM")],
        [(2, "SIGTERM"), *itertools.product([1, 3], ["SIGTERM", "SIGUSR1", "many"])],
    ),
)
def test_after_a_signal_the_job_goes_on_bit_by_bit(launch, tmp_path, how, ranks):
    program = (
        TRAIN
        + """
    how, at = more
    with hs.checkpoint.CheckpointManager(checkpoint, path, every=5, blocking=False) as manager:
        if manager.restore_or_initialize():
            print("goes on after", optimizer.iterations)
        pids = hs.broadcast_object(os.getpid()), os.getpid()
        rages = threading.Event()

        def storm():
            while True:
                os.kill(pids[0], signal.SIGTERM)
                os.kill(pids[1], signal.SIGUSR1)
                rages.set()

        def boundary():
            if hs.rank() == hs.size() - 1 and optimizer.iterations == int(at):
                if how == "many":
                    threading.Thread(target=storm, daemon=True).start()
                    rages.wait()
                elif how:
                    os.kill(os.getpid(), getattr(signal, how))
            manager.step()

        train(boundary)
    """
    )
    name = "MirroredStrategy" if ranks == 1 else "CentralStorageStrategy"
    undisturbed = well(launch(program, ranks, name, tmp_path / "undisturbed", "", "0"))
    begun = r"hpcstrat: received SIG\w+; the checkpoint \S*/saved is saved, and the job exits with status 75\n"
    for steps in (10,) if ranks == 2 else (4,) if how == "many" else (4, 10):
        result = launch(program, ranks, name, tmp_path / "saved", how, str(steps))
        assert result.status == 75
        assert re.search(begun, result.stderr)
        assert "Traceback" not in result.stderr
        assert result.leftovers == []
        if how != "many":
            assert read(tmp_path / "saved")[1]["optimizer"]["iterations"] == steps
    if how == "many":  # the first of them may come after a further step
        assert 4 <= read(tmp_path / "saved")[1]["optimizer"]["iterations"] < 21
    resumed = well(launch(program, ranks, name, tmp_path / "saved", "", "0")).splitlines()
    assert resumed[0].startswith("goes on after")
    assert resumed[-1] == undisturbed.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False])
def test_fifty_kills_of_a_saving_program(launch, tmp_path, blocking):
    """Each time a fresh process restores and saves in a loop; SIGKILL comes at a random moment."""
    program = """
    import os, random, signal, sys, time
    import numpy as np
    import hpcstrat as hs
    from hpcstrat.checkpoint._format import CheckpointFile

    path, blocking = sys.argv[1], sys.argv[2] == "True"

    def save_for_ever(ready):
        values, i = hs.Variable(np.zeros(1 << 17)), hs.Variable(0, dtype=np.int64)
        checkpoint = hs.checkpoint.Checkpoint(values=values, i=i)
        if os.path.exists(path):
            checkpoint.restore(path)
        else:
            checkpoint.save(path)
        while True:
            i.assign_add(1)
            values.assign(np.full(1 << 17, float(i)))
            checkpoint.save(path, keep=3, blocking=blocking)
            os.write(ready, b".")

    def value(path):
        with CheckpointFile(path) as file:
            found = {int(np.frombuffer(part, np.float64)[k]) for part in file.parts("values") for k in (0, -1)}
            (part,) = file.parts("i")
            found.add(int(np.frombuffer(part, np.int64)[0]))
        assert len(found) == 1, found
        return found.pop()

    random.seed(3)
    last = partials = kills = 0
    for _ in range(50):
        done, ready = os.pipe()
        child = os.fork()  # MPI has not started here
        if child == 0:
            save_for_ever(ready)
        os.close(ready)
        assert os.read(done, 1) == b"."
        time.sleep(random.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        kills += os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        reported = len(os.read(done, 1 << 16))
        os.close(done)
        names = sorted(os.listdir(os.path.dirname(path)))
        left = sum(name.startswith("saved.partial") for name in names)
        assert left <= 1  # what one kill leaves, the next program removes
        partials += left
        now = value(path)
        # In the background, only the one before the last that was reported has surely been written.
        assert now >= last + blocking + reported, (now, last, reported)
        last = now
        older = [value(f"{path}.{k}") for k in (1, 2) if f"saved.{k}" in names]
        assert older == sorted(older, reverse=True)
    print(kills, partials > 0, names[:1])
    """
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    result = launch(program, None, folder / "saved", str(blocking), timeout=100)
    assert well(result) == "50 True ['saved']\n"


@pytest.mark.slow
def test_two_programs_that_save_to_one_path_leave_a_whole_file_at_any_moment(launch, tmp_path):
    """One gets an OSError, or the last one wins.

    A third process watches, and now and then kills one of them, which another then replaces.
    """
    program = """
    import os, random, signal, sys, time
    import numpy as np
    import hpcstrat as hs
    from hpcstrat.checkpoint._format import CheckpointFile

    path = sys.argv[1]

    def save_for_ever(ready):
        values = hs.Variable(np.zeros(1 << 17))
        checkpoint = hs.checkpoint.Checkpoint(values=values)
        random.seed(os.getpid())
        i = 0
        while True:
            i += 1
            values.assign(np.full(1 << 17, os.getpid() + i / 1000))
            try:
                checkpoint.save(path, keep=2)
            except OSError as error:
                removed = "another program, which saves to it too, has removed the new file"
                assert removed in str(error) or isinstance(error, FileNotFoundError), error
                time.sleep(random.random() * 0.02)  # or they would stop each other again and again
                os.write(ready, b"x")
            else:
                os.write(ready, b".")

    def started():
        done, ready = os.pipe()
        child = os.fork()  # MPI has not started here
        if child == 0:
            try:
                save_for_ever(ready)
            finally:
                os._exit(1)  # an error in saving
        os.close(ready)
        while (outcome := os.read(done, 1)) != b".":
            assert outcome, "a save failed"
        return child, done

    def killed(child, done):
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "a save failed"
        outcomes.update(os.read(done, 1 << 16))
        os.close(done)

    def look(path):
        with CheckpointFile(path) as file:  # which it has checked
            (values,) = [np.frombuffer(part, np.float64) for part in file.parts("values")]
            assert values.size == 1 << 17 and (values == values[0]).all()

    random.seed(3)
    outcomes = set()
    savers = [started(), started()]
    for k in range(400):
        look(path)
        if k % 20 == 19:
            killed(*savers.pop(random.randrange(2)))
            savers.append(started())
    for saver in savers:
        killed(*saver)
    killed(*started())  # which has removed what the others left
    for name in sorted(os.listdir(os.path.dirname(path))):
        if "partial" not in name:
            look(os.path.join(os.path.dirname(path), name))
            print(name)
    print(bytes(sorted(outcomes)))
    """
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    result = launch(program, None, folder / "saved", timeout=100)
    assert well(result) == "saved\nsaved.1\nb'.x'\n"
    assert sum("partial" in path.name for path in folder.iterdir()) <= 1  # of the last kill


@pytest.mark.parametrize("disk", slow_but(["full"], ["slow", "full"]))
def test_the_end_of_a_program_waits_for_a_save_in_the_background(launch, tmp_path, disk):
    """Its ranks then wait in the end of MPI, for longer than elsewhere."""
    program = """
    import atexit, errno, os, sys, threading, time
    import numpy as np
    import hpcstrat as hs
    from hpcstrat._transports.connection import connect
    from hpcstrat._watchdog.stall_detector import StallDetector

    path, disk = sys.argv[1:]
    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        v = hs.Variable(np.arange(8.0))
    checkpoint = hs.checkpoint.Checkpoint(v=v)
    checkpoint.save(path)
    pwrite, ends = os.pwrite, threading.Event()

    def late(*args):
        os.pwrite = pwrite
        ends.wait()
        if disk == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        time.sleep(2.2)
        return pwrite(*args)

    def end():
        # Not before: ranks may be this far apart on a machine that does other work too.
        connect().watchdog._detector = StallDetector(1, 600)
        ends.set()

    if hs.rank() == 0:
        os.pwrite = late
    v.assign(-np.arange(8.0))
    checkpoint.save(path, blocking=False)
    atexit.register(end)
    """
    result = launch(program, 2, tmp_path / "saved", disk)
    arrays, _ = read(tmp_path / "saved")
    if disk == "slow":
        assert well(result) == ""
        assert arrays["v"] == (-np.arange(8.0)).tobytes()
    else:
        assert result.status != 0
        assert "Checkpoint.save of" in result.stderr and "No space left on device" in result.stderr
        assert arrays["v"] == np.arange(8.0).tobytes()
    assert [path.name for path in tmp_path.iterdir() if "saved" in path.name] == ["saved"]


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_child_that_is_forked_in_a_background_save_may_exit(launch, tmp_path, ranks):
    program = """
    import atexit, os, sys, threading, warnings
    import numpy as np
    import hpcstrat as hs

    warnings.filterwarnings("ignore", ".*use of fork.*")  # of Python 3.12 and later
    strategy = hs.MirroredStrategy(["CPU:0"] * hs.size())
    with strategy.scope():
        v = hs.Variable(np.arange(1000.0))
    checkpoint, pwrite, may_write = hs.checkpoint.Checkpoint(v=v), os.pwrite, threading.Event()

    def write_later(*args):
        may_write.wait()
        return pwrite(*args)

    os.pwrite = write_later
    checkpoint.save(sys.argv[1], blocking=False)
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()  # not all of sys.exit(0): mpi4py's last act, MPI_Finalize, is the parent's
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    may_write.set()
    v.assign(np.zeros(1000))
    checkpoint.restore(sys.argv[1])
    assert (v.numpy() == np.arange(1000.0)).all()
    """
    folder = tmp_path / "checkpoints"
    assert well(launch(program, ranks, folder / "saved")) == ""
    assert [path.name for path in folder.iterdir()] == ["saved"]


# The peer dies while the values of ON_READ variables are gathered.
MOMENTS = [(2, 1, "all_values"), (3, 2, "all_values")]
MOMENTS += [(3, 0, "pwrite"), (2, 0, "fsync"), (3, 0, "replace")]


@pytest.mark.parametrize(
    "blocking", slow_but([False], [True, False]), ids={True: "blocking", False: "background"}.get
)
@pytest.mark.parametrize("ranks, victim, moment", slow_but(MOMENTS[:1], MOMENTS))
def test_a_rank_that_is_killed_at_a_moment_of_saving(
    launch, tmp_path, ranks, victim, moment, blocking
):
    program = """
    import os, signal, sys
    import numpy as np
    import hpcstrat as hs
    from hpcstrat.checkpoint import _saving

    path, victim, moment, blocking = sys.argv[1:]
    strategy = hs.MirroredStrategy()
    with strategy.scope():
        v = hs.Variable(np.zeros(1 << 20))
        optimizer, seen = hs.optimizers.SGD(1.0, momentum=0.5), hs.metrics.Mean()
    checkpoint = hs.checkpoint.Checkpoint(v=v, optimizer=optimizer, seen=seen)
    if os.path.exists(path):
        checkpoint.restore(path)
        assert (v.numpy() == -1).all() and optimizer.iterations == seen.result() == 1
        checkpoint.save(path)
        print(os.listdir(os.path.dirname(path)))
        sys.exit()

    def step():
        seen.update_state(optimizer.iterations + 1)
        optimizer.apply_gradients([(np.ones(1 << 20) / hs.size(), v)])

    for _ in range(2):
        strategy.run(step)
        if optimizer.iterations == 2 and hs.rank() == int(victim):
            module = os if hasattr(os, moment) else _saving
            setattr(module, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        checkpoint.save(path, blocking=optimizer.iterations == 1 or blocking == "True")
    checkpoint.sync()
    """
    folder = tmp_path / "checkpoints"
    arguments = (program, ranks, folder / "saved", str(victim), moment, str(blocking))
    result = launch(*arguments)
    assert result.status != 0
    assert result.leftovers == []
    assert (np.frombuffer(read(folder / "saved")[0]["v"]) == -1).all()
    assert well(launch(*arguments)) == "['saved']\n"  # what was left behind is removed


@pytest.mark.parametrize(
    "name", slow_but(["MirroredStrategy"], [kind.__name__ for kind in STRATEGIES])
)
def test_there_is_no_second_copy_in_memory(launch, tmp_path, name):
    program = """
    import re, sys
    import numpy as np
    import hpcstrat as hs
    from hpcstrat.optimizers._state import state_of_optimizer

    def resident(which):
        return int(re.search(which + r":\\s*(\\d+) kB", open("/proc/self/status").read())[1]) >> 10  # MiB

    strategy = getattr(hs, sys.argv[1])()
    with strategy.scope():
        v = hs.Variable(np.broadcast_to(np.float32(5), 1 << 22))  # 16 MiB
        optimizer = hs.optimizers.SGD(0.0, momentum=0.5)
    buffers = optimizer.gradient_buffers([v])
    strategy.run(lambda: optimizer.apply_gradients([(buffers[0], v)]))
    for blocks in state_of_optimizer(optimizer).slots.values():
        # A page that ranks share counts for those that have touched it.
        assert np.isfinite(v.value().sum() + blocks[0].array.sum())
    checkpoint = hs.checkpoint.Checkpoint(v=v, optimizer=optimizer)
    for call in checkpoint.save, checkpoint.restore:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        before = resident("VmRSS")
        call(sys.argv[2])
        assert resident("VmHWM") - before < 12, (before, resident("VmHWM"))
    assert v[-1] == 5
    """
    assert well(launch(program, 2, name, tmp_path / "saved")) == ""


@pytest.mark.slow
def test_a_rank_that_does_not_save_ends_the_job(launch, tmp_path):
    program = TRAIN + "    if hs.rank() == 0: checkpoint.save(path)\n"
    result = launch(program, 2, "CentralStorageStrategy", tmp_path / "saved")
    assert result.status != 0
    assert "rank 0 waits in Checkpoint.save" in result.stderr
    assert not (tmp_path / "saved").exists()
    assert result.leftovers == []
