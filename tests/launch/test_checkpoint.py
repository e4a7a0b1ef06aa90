"""Checkpoints of whole jobs: on other numbers of ranks, after kills and signals, on a full disk."""

import re
import shutil

import numpy as np
import pytest
from internals import CheckpointFile
from trained import STEPS, weight

slow = pytest.mark.slow


def read(path):
    with CheckpointFile(str(path)) as file:
        return {
            name: b"".join(part.tobytes() for part in file.parts(name)) for name in file.entries
        }, file.metadata


def learned(line):
    """What programs/training.py shows: the arrays, the mean loss, the steps."""
    word, *arrays, loss, steps = line.split()
    assert word == "learned"
    values = np.concatenate([np.frombuffer(bytes.fromhex(array)) for array in arrays])
    return values, float.fromhex(loss), int(steps)


def well(result):
    assert (result.status, result.err, result.leftovers) == (0, "", [])
    return result.out


def test_any_number_of_ranks_restores(launch, tmp_path):
    """In the middle of a pass; what it then saves, and the end, are the same."""
    keep = "if step == 10: checkpoint.save('saved'); show()"
    first = well(launch("training.py", 2, "--attack", keep)).splitlines()
    arrays, facts = read(tmp_path / "saved")
    assert facts["batches"]["taken"] == 24 and facts["optimizers/0"]["iterations"] == 10
    for name, ranks in [("MirroredStrategy", 3), ("OneDeviceStrategy", None)]:
        shutil.copy(tmp_path / "saved", tmp_path / "again")
        resave = ["--path", "again", "--first", "checkpoint.save('resaved'); show()"]
        result = launch("training.py", ranks, "--strategy", name, "--every", 1000, *resave)
        at, end, exact = well(result).splitlines()
        assert at.split()[:3] == first[0].split()[:3]
        assert learned(at)[1:] == learned(first[0])[1:]
        again_arrays, again_facts = read(tmp_path / "resaved")
        assert again_facts == facts
        assert again_arrays | {"loss": arrays["loss"]} == arrays  # summed in another order
        assert exact == weight(ranks or 1, before=[2] * 10)
        for found, expected in zip(learned(end), learned(first[1]), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9)


STORM = """
def storm(pids=(hs.broadcast_object(os.getpid()), os.getpid())):
    while True:
        os.kill(pids[0], signal.SIGTERM)
        os.kill(pids[1], signal.SIGUSR1)
"""


@pytest.mark.parametrize(
    "ranks, how",
    [(2, "SIGTERM"), *(pytest.param(*case, marks=slow) for case in [(1, "SIGUSR1"), (3, "many")])],
)
def test_after_a_signal_the_job_goes_on_bit_by_bit(launch, tmp_path, how, ranks):
    many = "threading.Thread(target=storm, daemon=True).start(); time.sleep(0.1)"
    attack = many if how == "many" else f"os.kill(os.getpid(), signal.{how})"
    words = ["training.py", ranks, "--every", 5, "--background", "--first", STORM]
    undisturbed = well(launch(*words, "--path", "undisturbed"))
    result = launch(*words, "--attack", f"if start == 1 and step == 10 and rank == last: {attack}")
    assert result.status == 75 and "Traceback" not in result.err and result.leftovers == []
    saved = r"hpcstrat: received SIG\w+; the checkpoint \S*checkpoint is saved, and the job exits with status 75\n"
    assert re.search(saved, result.err)
    steps = read(tmp_path / "checkpoint")[1]["optimizers/0"]["iterations"]
    # Of many signals the first may come after a further step.
    assert 10 <= steps < STEPS if how == "many" else steps == 10
    assert well(launch(*words)) == undisturbed


LATE = """
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


@pytest.mark.parametrize("disk", ["full", pytest.param("slow", marks=slow)])
def test_the_end_of_a_program_waits_for_a_save_in_the_background(launch, tmp_path, disk):
    """Its ranks then wait in the end of MPI, for longer than elsewhere."""
    result = launch(LATE, 2, tmp_path / "saved", disk)
    arrays, _ = read(tmp_path / "saved")
    if disk == "slow":
        assert well(result) == ""
        assert arrays["v"] == (-np.arange(8.0)).tobytes()
    else:
        assert result.status != 0
        assert "Checkpoint.save of" in result.err and "No space left on device" in result.err
        assert arrays["v"] == np.arange(8.0).tobytes()
    assert [path.name for path in tmp_path.iterdir() if "saved" in path.name] == ["saved"]


def test_a_child_that_is_forked_in_a_background_save_may_exit(launch, tmp_path):
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
    assert well(launch(program, None, folder / "saved")) == ""
    assert [path.name for path in folder.iterdir()] == ["saved"]


DIES = """
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
# In `all_values` the values of ON_READ variables are gathered.
MOMENTS = [(3, 2, "all_values", True), (3, 0, "pwrite", False), (3, 0, "replace", True)]
MOMENTS += [(2, 1, "all_values", False)]


@slow
@pytest.mark.parametrize("ranks, victim, moment, blocking", MOMENTS)
def test_a_rank_that_is_killed_at_a_moment_of_saving(
    launch, tmp_path, ranks, victim, moment, blocking
):
    folder = tmp_path / "checkpoints"
    arguments = (DIES, ranks, folder / "saved", victim, moment, blocking)
    result = launch(*arguments)
    assert result.status != 0 and result.leftovers == []
    assert (np.frombuffer(read(folder / "saved")[0]["v"]) == -1).all()
    assert well(launch(*arguments)) == "['saved']\n"  # what was left behind is removed


MEMORY = """
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


@slow
@pytest.mark.parametrize("name", ["MirroredStrategy", "CentralStorageStrategy"])
def test_there_is_no_second_copy_in_memory(launch, tmp_path, name):
    assert well(launch(MEMORY, 2, name, tmp_path / "saved")) == ""


DISK = """
    import os, sys
    import numpy as np
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        w = hs.Variable(np.full(40_000, 3.0))
    checkpoint = hs.checkpoint.Checkpoint(w=w)
    checkpoint.save("disk/saved", keep=2)
    for blocking in (True, False):
        w.assign(np.full(40_000, 4.0))
        try:
            checkpoint.save("disk/saved", keep=2, blocking=blocking)
            checkpoint.sync()
        except OSError as error:
            end = "No space left on device", "nothing was saved"
            print("disk/saved" in str(error), *(text in str(error) for text in end))
        hs.barrier()
        assert os.listdir("disk") == ["saved"]
        checkpoint.restore("disk/saved")
        print(*np.unique(w.numpy()))
"""


def test_a_full_disk_leaves_the_previous_checkpoint_whole(launch):
    before, env = "mkdir disk; mount -t tmpfs -o size=500k tmpfs disk", {"HPCSTRAT_OUTPUT": "all"}
    result = launch(DISK, 2, namespaces=True, before=before, env=env)
    assert (result.status, result.leftovers) == (0, [])
    assert sorted(result.out.splitlines()) == 4 * ["3.0"] + 4 * ["True True True"]
