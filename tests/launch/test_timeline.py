"""`HPCSTRAT_TIMELINE` and `python -m hpcstrat timeline` from the user's side."""

import json
import subprocess
import sys

import pytest
from internals import GPU_TRACKS, read, share_out
from slow import slow_but

# The bytes that each of 6 steps moves are known in closed form; the function takes longer on the
# last rank than on the others.
PROGRAM = """
import time
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
with strategy.scope():
    w = hs.Variable(np.zeros(1000, np.float32))
    optimizer = hs.optimizers.SGD(0.5)

def step(x):
    if hs.rank() == hs.size() - 1:
        time.sleep(0.05)
    optimizer.apply_gradients([(strategy.xp.full(1000, x.sum(), np.float32), w)])
    return x

dataset = hs.data.Dataset.range(24).batch(4)
for x in strategy.experimental_distribute_dataset(dataset):
    total = strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=0)
print(w.numpy()[0], total)
"""


def spans_of(path, rank, category, name=None):
    return [
        span
        for span in read(path).tracks[rank][0]
        if span.category == category and (name is None or span.name == name)
    ]


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([None], id="alone"),  # and the next test on 3 ranks
        pytest.param([1, 2, 3, 4], id="on 1 to 4 ranks", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_write_one_trace(launch, gpus, counts):
    are_seen, numbers = gpus
    for ranks in [ranks for ranks in counts if ranks in numbers]:
        path = traced(launch, PROGRAM, ranks, are_seen)
        if are_seen:
            for rank in range(ranks or 1):
                check_gpu(read(path).tracks[rank])


def traced(launch, program, ranks, are_seen=False):
    """The path of the program's trace, which has the spans of all ranks."""
    job = launch(program, ranks, env={"HPCSTRAT_TIMELINE": "trace.json"}, gpus=are_seen)
    assert (job.status, job.leftovers) == (0, []), job.stderr
    assert job.stdout.split() == [f"{-0.5 * sum(range(24)):.1f}", str(20 + 21 + 22 + 23)]
    path = str(launch.folder / "trace.json")
    events = json.loads((launch.folder / "trace.json").read_text())
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(ranks or 1))
    for rank in range(ranks or 1):
        assert len(spans_of(path, rank, "run", "run step")) == 6
        updates = spans_of(path, rank, "update", "SGD.apply_gradients")
        assert [span.nbytes for span in updates] == [4000] * 6
        sums = spans_of(path, rank, "communication", "Strategy.reduce")
        assert [span.nbytes for span in sums].count(16) == 6  # a number, padded as messages are
        assert len(spans_of(path, rank, "input", "next batch")) == 7
    return path


def check_gpu(tracks):
    """The strategy's stream has every run, each with the sum of 4000 bytes of gradients."""
    (stream,) = [
        spans
        for track, spans in tracks.items()
        if track >= GPU_TRACKS and spans[0].category != "input"
    ]
    runs = [span for span in stream if span.category == "run"]
    sums = [span for span in stream if span.name in ("all-reduce", "the sum of gradients")]
    assert [span.nbytes for span in sums] == [4000] * 6
    for run, one in zip(runs, sums, strict=True):
        assert run.start <= one.start <= one.end <= run.end


@pytest.mark.slow
def test_who_is_waited_for_is_seen_and_said(launch):
    path = traced(launch, PROGRAM.replace("sleep(0.05)", "sleep(0.2)"), 3)
    waits = [rank.shares["waiting"] for rank in share_out(read(path))]
    assert waits[2] < min(waits[:2])
    shown = subprocess.run(
        [sys.executable, "-m", "hpcstrat", "timeline", path, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(shown.stdout)
    assert [rank["steps"] for rank in found["ranks"]] == [4, 4, 4]
    assert any("the others wait for rank 2" in sentence for sentence in found["advice"])


@pytest.mark.slow
def test_the_command_prints_shares_and_draws(launch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert launch(PROGRAM, None, env={"HPCSTRAT_TIMELINE": "trace.json"}).status == 0
    path, picture = launch.folder / "trace.json", launch.folder / "out.png"
    shown = subprocess.run(
        [sys.executable, "-m", "hpcstrat", "timeline", path, "--plot", picture],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "computing" in shown.stdout
    assert "of a step" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["os.kill(os.getpid(), 9)", "os._exit(3)", "raise RuntimeError('on purpose')"]
)
def test_a_trace_can_be_read_after_a_kill(launch, how):
    """It has the spans half a second before the end, and those that were still running."""
    job = launch(
        f"""
        import os, time
        import numpy as np
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        def step():
            return hs.get_replica_context().all_reduce("SUM", np.ones(3))
        for _ in range(5):
            strategy.run(step)
        if hs.rank() == 1:
            time.sleep(2)
            {how}
        strategy.run(step)
        """,
        2,
        env={"HPCSTRAT_TIMELINE": "trace.json"},
    )
    assert job.status != 0
    path = str(launch.folder / "trace.json")
    runs = spans_of(path, 0, "run")
    assert [span.is_open for span in runs] == [False] * 5 + [True]
    (last,) = [span for span in spans_of(path, 0, "waiting") if span.is_open]
    assert last.start > runs[-1].start
    shown = subprocess.run(
        [sys.executable, "-m", "hpcstrat", "timeline", path], capture_output=True, text=True
    )
    assert "rank 0 ended within 'the other ranks' (waiting)" in shown.stdout


def test_several_hosts_write_one_trace(launch):
    if launch.open_mpi:
        pytest.skip("Open MPI cannot pose as several hosts")
    program = PROGRAM.replace("CentralStorageStrategy", "MultiWorkerMirroredStrategy").replace(
        "0.05", "0"
    )
    job = launch(program, 3, env={"HPCSTRAT_TIMELINE": "trace.json", "MPIR_CVAR_NUM_CLIQUES": "2"})
    assert job.status == 0, job.stderr
    found = read(str(launch.folder / "trace.json"))
    assert sorted(found.tracks) == [0, 1, 2]
    assert not (launch.folder / "trace.host1.json").exists()
    json.loads((launch.folder / "trace.json").read_text())


@pytest.mark.parametrize("ranks", slow_but([2], [None, 2]))
def test_a_file_that_cannot_be_written_is_an_error_of_all(launch, ranks):
    job = launch(
        "import hpcstrat as hs\nhs.CentralStorageStrategy()",
        ranks,
        env={"HPCSTRAT_TIMELINE": "no/such/folder/trace.json"},
    )
    assert job.status != 0
    assert "the file cannot be written" in job.stderr
    assert "name a file in a folder that exists" in job.stderr


def test_ranks_that_name_different_files_are_told(launch):
    job = launch(
        """
        import os
        rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
        os.environ["HPCSTRAT_TIMELINE"] = f"trace{rank}.json"
        import hpcstrat as hs
        hs.CentralStorageStrategy()
        """,
        2,
    )
    assert job.status != 0
    assert "HPCSTRAT_TIMELINE is trace0.json on rank 0; trace1.json on rank 1" in job.stderr


def test_a_forked_child_writes_nothing(launch):
    job = launch(
        """
        import contextlib, os
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        child = os.fork()
        with contextlib.suppress(RuntimeError) if child == 0 else contextlib.nullcontext():
            strategy.run(lambda: None)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        """,
        None,
        env={"HPCSTRAT_TIMELINE": "trace.json"},
    )
    assert job.status == 0, job.stderr
    assert len(spans_of(str(launch.folder / "trace.json"), 0, "run")) == 1


def test_without_the_variable_nothing_of_it_is_loaded(launch):
    job = launch(
        "import sys, hpcstrat\nprint([name for name in sys.modules if '_timeline' in name])", None
    )
    assert job.stdout.strip() == "[]"
