"""`HPCSTRAT_TIMELINE`: one trace of all ranks, or none."""

import itertools
import json
import operator
import re

import pytest
import simulated_gpu

ENV = {"HPCSTRAT_TIMELINE": "trace.json"}


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
        what = rank, category, name
        return sorted((s for s in self.spans if (s["pid"], s["cat"], s["name"]) == what), key=start)

    def parents(self):
        """(span, the span around it or None) of each; those of a thread must not overlap otherwise."""
        track = operator.itemgetter("pid", "tid")
        ordered = sorted(self.spans, key=lambda one: (*track(one), start(one), -end(one)))
        for _, spans in itertools.groupby(ordered, track):
            around = []
            for span in spans:
                while around and end(around[-1]) <= start(span):
                    around.pop()
                assert not around or end(span) <= end(around[-1]), (span, around[-1])
                yield span, around[-1] if around else None
                around.append(span)


def start(span):
    return round(1000 * span["ts"])


def end(span):
    return start(span) + round(1000 * span["dur"])


def traced(launch, program, ranks, *arguments, **env):
    """The trace that a program leaves."""
    job = launch(program, ranks, *arguments, env=ENV | env)
    assert (job.status, job.leftovers) == (0, []), job.err
    return Trace(launch.folder / "trace.json"), job


def check_all_ranks(launch, ranks, hosts=1):
    trace, job = traced(launch, "timeline_training.py", ranks, MPIR_CVAR_NUM_CLIQUES=hosts)
    assert job.out.split() == [f"{-0.5 * sum(range(24)):.1f}", str(20 + 21 + 22 + 23)]
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
        for run, update in zip(runs, updates, strict=True):
            assert start(run) <= start(update) <= end(update) <= end(run)
        sums = [one["args"]["bytes"] for one in trace.of(rank, "communication", "Strategy.reduce")]
        assert sums.count(16) == 6  # a number, padded as messages are
        assert len(trace.of(rank, "input", "next batch")) == 7
        assert len(trace.of(rank, "checkpoint", "save")) == 1
        assert (trace.of(rank, "waiting", "the other ranks") != []) == (size > 1)
    if hosts == 1:  # whose ranks are on one clock: none leaves a barrier before all have come
        by_rank = [trace.of(rank, "communication", "barrier")[-3:] for rank in range(size)]
        for barrier in zip(*by_rank, strict=True):
            assert max(map(start, barrier)) <= min(map(end, barrier))
    # Nested, and not within the same: an update waits, and its exchanges are not shown.
    assert all(outer is None or span["cat"] != outer["cat"] for span, outer in trace.parents())


def test_all_ranks_are_in_one_trace(launch):
    check_all_ranks(launch, 3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, hosts", [(None, 1), (1, 1), (2, 1), (2, 2), (3, 2)])
def test_ranks_of_any_number_of_hosts_are_in_one_trace(launch, ranks, hosts):
    if launch.open_mpi and hosts == 2:
        pytest.skip("Open MPI cannot pose as several hosts")
    check_all_ranks(launch, ranks, hosts)


def test_threads_have_tracks_of_their_own_and_a_forked_child_adds_nothing(launch):
    trace, _ = traced(launch, "timeline_threads.py", None)
    runs = trace.of(0, "run", "run late")
    assert len({run["tid"] for run in runs}) == 2
    assert sorted(trace.names("thread")) == ["MainThread", "loader", "loader"]
    assert [outer for _, outer in trace.parents() if outer in runs] == []
    assert len(trace.of(0, "run", "run <lambda>")) == 2


def test_without_the_variable_functions_are_as_they_are_written(launch):
    program = """
        import gc, types
        import hpcstrat

        codes = [one.__code__ for one in gc.get_objects() if isinstance(one, types.FunctionType)]
        print(sum(c.co_name == "call" and c.co_filename.endswith("timeline.py") for c in codes))
    """
    assert int(launch(program).out) == 0 < int(launch(program, env=ENV).out)


@pytest.mark.gpu
@pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")
def test_spans_are_nvtx_ranges_where_there_are_gpus(simulated):
    program = """
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
    """
    job = simulated(program, 2, env=ENV)
    assert (job.status, job.leftovers) == (0, []), job.err
    assert job.out == f"[] {['run step', 'Strategy.reduce'] * 3}\n"


# ---- where there is no trace

# Prints what each of some attempts raises; before each, a file with a text is there.
ATTEMPTS = """
    import pathlib, sys
    import hpcstrat as hs

    for text in sys.argv[1:]:
        if text:
            pathlib.Path("trace.json").write_text(text)
        try:
            hs.CentralStorageStrategy()
        except OSError as error:
            print(f"{type(error).__name__} {error}")
        if text:
            assert pathlib.Path("trace.json").read_text() == text
"""


def test_what_is_no_timeline_is_not_overwritten(launch):
    texts = "# Mine\n", '[\n{"name": "mine"}]\n', "x"
    job = launch(ATTEMPTS, None, *texts, env=ENV)
    said = "FileExistsError HPCSTRAT_TIMELINE=.*trace.json: that file exists and is not a timeline"
    assert (job.status, len(re.findall(said, job.out))) == (0, 3), job.err


def test_a_file_that_cannot_be_written_is_an_error_of_all(launch):
    env = {"HPCSTRAT_TIMELINE": "no/such/folder/trace.json", "HPCSTRAT_OUTPUT": "all"}
    job = launch(ATTEMPTS, 3, "", env=env)
    said = "OSError HPCSTRAT_TIMELINE=/.*: No such file or directory; name a file in a folder"
    assert (job.status, len(re.findall(said, job.out))) == (0, 3), job.err


def test_ranks_that_name_different_files_are_told(launch):
    program = """
        import os
        rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
        os.environ["HPCSTRAT_TIMELINE"] = f"trace{rank}.json"
        import hpcstrat as hs
        hs.CentralStorageStrategy()
    """
    job = launch(program, 2)
    assert job.status != 0
    assert "HPCSTRAT_TIMELINE is trace0.json on rank 0; trace1.json on rank 1" in job.err


def test_a_killed_job_leaves_no_trace_and_not_that_of_an_older_job(launch):
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
    traced(launch, program, None)
    assert launch(program, 2, "killed", env=ENV).status != 0
    assert (launch.folder / "trace.json").read_bytes() == b""
    trace, _ = traced(launch, program, None)
    assert len(trace.of(0, "run", "run <lambda>")) == 1


def test_a_full_disk_costs_the_trace_and_no_rank_its_end(launch):
    program = """
        import resource
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        for _ in range(25_000):  # travel in parts
            strategy.run(bool)
        hs.broadcast_object(bytes(1 << 22))  # mailboxes that grow are files, too
        if hs.rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    """
    job = launch(program, 2, env=ENV)
    assert (job.status, job.leftovers) == (0, []), job.err
    assert job.err.count("\n") == 1, job.err
    assert "trace.json could not be written: File too large" in job.err
    with pytest.raises(json.JSONDecodeError):
        Trace(launch.folder / "trace.json")


@pytest.mark.slow
def test_a_trace_has_a_limit(launch):
    program = """
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        for number in range(1_000_000):
            strategy.run(bool)
    """
    trace, job = traced(launch, program, None)
    assert len(trace.spans) <= 1_000_000  # some came before the trace's start
    assert job.err.count("is full: it has the first 1,000,000 spans of each rank") == 1
