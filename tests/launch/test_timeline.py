"""`HPCSTRAT_TIMELINE`: one trace of all ranks, or none."""

import itertools
import json

import pytest
import simulated_gpu
from slow import slow_but

# What each of the 6 steps moves is known in closed form; the last rank works longest.
PROGRAM = """
import time
import numpy as np
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = hs.Variable(np.zeros(1000, np.float32))
    optimizer = hs.optimizers.SGD(0.5)

def step(x):
    time.sleep(0.01 * hs.rank())
    optimizer.apply_gradients([(np.full(1000, x.sum(), np.float32), w)])
    return x

dataset = hs.data.Dataset.range(24).batch(4)
for x in strategy.experimental_distribute_dataset(dataset):
    total = strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=0)
hs.checkpoint.Checkpoint(w=w).save("weights")
print(w.numpy()[0], total)
"""


class Trace:
    """A trace that is complete, as the file holds it."""

    def __init__(self, path):
        self.events = json.loads(path.read_text())
        self.spans = [event for event in self.events if event["ph"] == "X"]

    def names(self, kind):
        """The names of processes or threads."""
        return [e["args"]["name"] for e in self.events if e["name"] == f"{kind}_name"]

    def of(self, rank, category, name):
        """A rank's spans of this name, in order."""
        return sorted(
            (
                span
                for span in self.spans
                if (span["pid"], span["cat"], span["name"]) == (rank, category, name)
            ),
            key=start,
        )

    def parents(self):
        """(span, the span around it or None) of each; spans of a thread that overlap otherwise fail."""
        for _, track in itertools.groupby(
            sorted(self.spans, key=lambda one: (one["pid"], one["tid"], start(one), -end(one))),
            lambda one: (one["pid"], one["tid"]),
        ):
            around = []
            for span in track:
                while around and end(around[-1]) <= start(span):
                    around.pop()
                assert not around or end(span) <= end(around[-1]), (span, around[-1])
                yield span, around[-1] if around else None
                around.append(span)


def start(span):
    return round(1000 * span["ts"])


def end(span):
    return start(span) + round(1000 * span["dur"])


def traced(launch, program, ranks, **env):
    """The trace that a program leaves."""
    job = launch(program, ranks, env={"HPCSTRAT_TIMELINE": "trace.json", **env})
    assert (job.status, job.leftovers) == (0, []), job.stderr
    return Trace(launch.folder / "trace.json"), job


@pytest.mark.parametrize(
    "ranks, hosts",
    slow_but([(None, 1), (3, 1)], [(None, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]),
)
def test_all_ranks_are_in_one_trace(launch, ranks, hosts):
    if hosts > 1 and launch.open_mpi:
        pytest.skip("Open MPI cannot pose as several hosts")
    trace, job = traced(launch, PROGRAM, ranks, MPIR_CVAR_NUM_CLIQUES=str(hosts))
    assert job.stdout.split() == [f"{-0.5 * sum(range(24)):.1f}", str(20 + 21 + 22 + 23)]
    size = ranks or 1
    assert [name.split(" on ")[0] for name in trace.names("process")] == [
        f"rank {rank} of {size}" for rank in range(size)
    ]
    assert {span["pid"] for span in trace.spans} == set(range(size))
    assert all(start(span) >= 0 for span in trace.spans)
    for rank in range(size):
        runs = trace.of(rank, "run", "run step")
        updates = trace.of(rank, "update", "SGD.apply_gradients")
        assert len(runs) == len(updates) == 6
        assert [update["args"] for update in updates] == [{"bytes": 4000}] * 6
        assert all(
            start(run) <= start(update) <= end(update) <= end(run)
            for run, update in zip(runs, updates, strict=True)
        )
        sums = [one["args"]["bytes"] for one in trace.of(rank, "communication", "Strategy.reduce")]
        assert sums.count(16) == 6  # a number, padded as messages are
        assert len(trace.of(rank, "input", "next batch")) == 7
        assert len(trace.of(rank, "checkpoint", "save")) == 1
        assert (trace.of(rank, "waiting", "the other ranks") != []) == (size > 1)
    # Nested, and not within the same: an update waits, and its exchanges are not shown.
    assert all(outer is None or span["cat"] != outer["cat"] for span, outer in trace.parents())


@pytest.mark.parametrize("ranks", slow_but([3], [2, 3]))
def test_ranks_of_a_host_are_on_one_clock(launch, ranks):
    """No rank leaves a barrier before every rank has come."""
    program = """
    import time
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    for turn in range(3):
        if hs.rank() == turn:
            time.sleep(0.1)
        hs.barrier()
    """
    trace, _ = traced(launch, program, ranks)
    by_rank = [trace.of(rank, "communication", "barrier")[-3:] for rank in range(ranks)]
    for barrier in zip(*by_rank, strict=True):
        assert max(map(start, barrier)) <= min(map(end, barrier))


def test_threads_have_tracks_of_their_own(launch):
    program = """
    import threading
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    first, second = threading.Event(), threading.Event()

    def late():
        first.set()
        second.wait()

    def run():
        strategy.run(late)

    threads = [threading.Thread(target=run, name="loader") for _ in range(2)]
    threads[0].start()
    first.wait()
    first.clear()
    threads[1].start()
    first.wait()
    second.set()
    for thread in threads:
        thread.join()
    """
    trace, _ = traced(launch, program, None)
    runs = trace.of(0, "run", "run late")
    assert len({run["tid"] for run in runs}) == 2
    assert sorted(trace.names("thread")) == ["MainThread", "loader", "loader"]
    assert [outer for _, outer in trace.parents() if outer in runs] == []


@pytest.mark.gpu
@pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")
def test_spans_are_nvtx_ranges_where_there_are_gpus(simulated):
    job = simulated(
        """
        import cupy
        import hpcstrat as hs

        opened, done = [], []
        cupy.cuda.nvtx.RangePush = opened.append
        cupy.cuda.nvtx.RangePop = lambda: done.append(opened.pop())
        strategy = hs.MirroredStrategy()

        def step():
            assert opened == ["run step"]
            return cupy.ones(3)

        for _ in range(3):
            strategy.reduce("SUM", strategy.run(step), axis=None)
        print(opened, [name for name in done if name in ("run step", "Strategy.reduce")])
        """,
        2,
        env={"HPCSTRAT_TIMELINE": "trace.json"},
    )
    assert (job.status, job.leftovers) == (0, []), job.stderr
    assert job.stdout == f"[] {['run step', 'Strategy.reduce'] * 3}\n"


def test_without_the_variable_functions_are_as_they_are_written(launch):
    program = """
    import gc, types
    import hpcstrat

    print(sum(
        isinstance(one, types.FunctionType)
        and one.__code__.co_filename.endswith("timeline.py")
        and one.__code__.co_name == "call"
        for one in gc.get_objects()
    ))
    """
    decorated = [
        int(launch(program, None, env={"HPCSTRAT_TIMELINE": value}).stdout)
        for value in (None, "trace.json")
    ]
    assert decorated[0] == 0 < decorated[1]


# ---- where there is no trace


@pytest.mark.parametrize("ranks", slow_but([3], [None, 2, 3]))
def test_a_file_that_cannot_be_written_is_an_error_of_all(launch, ranks):
    job = launch(
        """
        import hpcstrat as hs
        try:
            hs.CentralStorageStrategy()
        except OSError as error:
            print(f"refused {error}")
        """,
        ranks,
        env={"HPCSTRAT_TIMELINE": "no/such/folder/trace.json", "HPCSTRAT_OUTPUT": "all"},
    )
    assert job.status == 0, job.stderr
    refused = job.stdout.splitlines()
    assert len(refused) == (ranks or 1)
    for line in refused:
        assert line.startswith("refused HPCSTRAT_TIMELINE=/")
        assert "written: No such file or directory; name a file in a folder that exists" in line


def test_what_is_no_timeline_is_not_overwritten(launch):
    path = launch.folder / "trace.json"
    for text in ("# Mine\n", '[\n{"name": "mine"}]\n', "x"):
        path.write_text(text)
        job = launch(
            "import hpcstrat as hs\nhs.CentralStorageStrategy()",
            None,
            env={"HPCSTRAT_TIMELINE": "trace.json"},
        )
        assert job.status == 1
        assert "FileExistsError: HPCSTRAT_TIMELINE=" in job.stderr
        assert "trace.json: that file exists and is not a timeline; name another" in job.stderr
        assert path.read_text() == text


@pytest.mark.parametrize("ranks", slow_but([2], [None, 2]))
def test_a_killed_job_leaves_no_trace_and_not_that_of_an_older_job(launch, ranks):
    program = """
    import os, sys
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    strategy.run(lambda: None)
    hs.barrier()
    if sys.argv[1:] and hs.rank() == hs.size() - 1:
        os.kill(os.getpid(), 9)
    hs.barrier()
    """
    traced(launch, program, ranks)
    env = {"HPCSTRAT_TIMELINE": "trace.json"}
    assert launch(program, ranks, "killed", env=env).status != 0
    assert (launch.folder / "trace.json").read_bytes() == b""
    trace, _ = traced(launch, program, ranks)
    assert len(trace.of(0, "run", "run <lambda>")) == 1


@pytest.mark.parametrize("ranks", slow_but([2], [None, 2, 3]))
def test_a_full_disk_costs_the_trace_and_no_rank_its_end(launch, ranks):
    job = launch(
        """
        import resource
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        for _ in range(25_000):  # travel in parts
            strategy.run(bool)
        hs.broadcast_object(bytes(1 << 22))  # mailboxes that grow are files, too
        if hs.rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        """,
        ranks,
        env={"HPCSTRAT_TIMELINE": "trace.json"},
    )
    assert (job.status, job.leftovers) == (0, []), job.stderr
    assert job.stderr.count("\n") == 1, job.stderr
    assert "trace.json could not be written: File too large" in job.stderr
    with pytest.raises(json.JSONDecodeError):
        Trace(launch.folder / "trace.json")


@pytest.mark.parametrize("ranks", slow_but([None], [None, 2]))
def test_a_forked_child_adds_nothing(launch, ranks):
    trace, _ = traced(
        launch,
        """
        import atexit, contextlib, os
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        strategy.run(lambda: None)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(RuntimeError):
                strategy.run(lambda: None)
            atexit._run_exitfuncs()  # not all of an exit: MPI's end is its parent's
            os._exit(0)
        os.waitpid(child, 0)
        strategy.run(lambda: None)
        """,
        ranks,
    )
    for rank in range(ranks or 1):
        assert len(trace.of(rank, "run", "run <lambda>")) == 2


@pytest.mark.slow
def test_a_trace_has_a_limit(launch):
    trace, job = traced(
        launch,
        """
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        for number in range(1_000_000):
            strategy.run(bool)
        """,
        None,
    )
    assert len(trace.spans) <= 1_000_000  # some came before the trace's start
    assert job.stderr.count("is full: it has the first 1,000,000 spans of each rank") == 1


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
