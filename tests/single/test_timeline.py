"""The timeline without ranks: what is recorded, written, read and computed."""

import itertools
import json
import os
import pathlib
import threading
import time
from types import SimpleNamespace

import pytest
from internals import (
    COMMUNICATION,
    KINDS,
    RUN,
    UPDATE,
    WAITING,
    Rank,
    Timeline,
    TimelineRecorder,
    TraceFile,
    TraceSpan,
    advise,
    difference,
    join_parts,
    move_waiting,
    part_name,
    periods_of,
    ranks_in_words,
    read,
    recorder,
    share_out,
)
from internals import timeline as command

# ---- recording


def make_file(path, rank=0, size=1, zero=0, is_first=True):
    return TraceFile(str(path), rank, size, zero, is_first)


def make(tmp_path, **arguments):
    path = str(tmp_path / "trace.json")
    return path, TimelineRecorder(make_file(path, zero=time.perf_counter_ns()), **arguments)


def begin(to, category, name, nbytes=None):
    """Starts a span, which must be recorded."""
    span = to.start(category, name, nbytes, None)
    assert span is not None
    return span


def spans_in(path):
    """Thread and name of each span in the file, in the order of their ends."""
    lines = pathlib.Path(path).read_text().splitlines()
    events = [json.loads(line.rstrip(",\n")) for line in lines if line.startswith("{")]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [(threads[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]


def test_a_span_within_one_of_its_category_is_a_part_of_it(tmp_path):
    path, to = make(tmp_path)
    run = begin(to, RUN, "run f")
    update = begin(to, UPDATE, "apply", 8)
    assert to.start(UPDATE, "apply again", 8, None) is None
    for span in (update, run):
        to.end(span)
    to.close()
    assert spans_in(path) == [("program", "apply"), ("program", "run f")]


def test_a_part_on_a_gpu_is_a_span_of_its_own(tmp_path, monkeypatch):
    nothing = SimpleNamespace(
        start=lambda *_: None, end=lambda _: None, wait=lambda: None, take_done=lambda: []
    )
    monkeypatch.setattr(recorder, "GpuSpans", lambda ordinal: nothing)
    path, to = make(tmp_path)
    outer = begin(to, UPDATE, "apply")
    kernel = to.start(UPDATE, "kernel", None, SimpleNamespace(ordinal=0, raw=None))
    assert kernel is not None
    for span in (kernel, outer):
        to.end(span)
    to.close()
    assert spans_in(path) == [("program", "kernel"), ("program", "apply")]


def test_threads_have_spans_of_their_own(tmp_path):
    path, to = make(tmp_path)
    run = begin(to, RUN, "run f")
    thread = threading.Thread(target=lambda: to.end(begin(to, RUN, "run g")), name="another")
    thread.start()
    thread.join()
    to.end(run)
    to.close()
    assert spans_in(path) == [("another", "run g"), ("program", "run f")]


# ---- the file


def note(to, *spans):
    """Records (category, name, bytes, the spans in it)."""
    for category, name, nbytes, inner in spans:
        span = begin(to, category, name, nbytes)
        note(to, *inner)
        to.end(span)


def test_what_is_recorded_can_be_read(tmp_path):
    path, to = make(tmp_path)
    note(
        to,
        (
            RUN,
            'run "f"',
            None,
            [(COMMUNICATION, "sum", 12, [(WAITING, "the other ranks", None, [])])],
        ),
    )
    to.close()
    join_parts(path, 1)
    events = json.loads(pathlib.Path(path).read_text())
    assert [e["name"] for e in events if e["ph"] == "X"] == ["the other ranks", "sum", 'run "f"']
    found = read(path)
    (spans,) = found.tracks[0].values()
    assert [(span.category, span.name, span.nbytes) for span in spans] == [
        ("run", 'run "f"', 0),
        ("communication", "sum", 12),
        ("waiting", "the other ranks", 0),
    ]
    for outer, inner in itertools.pairwise(spans):
        assert outer.start <= inner.start <= inner.end <= outer.end
    assert "rank 0 of 1" in found.names[0]
    assert found.cores[0] >= 1


def test_what_is_open_at_the_end_of_the_job_is_there(tmp_path):
    path, to = make(tmp_path)
    note(to, (RUN, "run f", None, []))
    to.start(RUN, "run g", None, None)
    to.start(WAITING, "the other ranks", None, None)
    to.close(is_failing=True)
    found = read(path)
    assert [(span.name, span.is_open) for span in found.tracks[0][0]] == [
        ("run f", False),
        ("run g", True),
        ("the other ranks", True),
    ]
    assert to.start(RUN, "run h", None, None) is None


def test_what_lasts_is_written_while_it_does_and_once(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_PERIOD", 0.01)
    path, to = make(tmp_path)
    span = begin(to, RUN, "long")
    while '"B"' not in pathlib.Path(path).read_text():
        time.sleep(0.01)
    assert [one.is_open for one in read(path).tracks[0][0]] == [True]
    to.end(span)
    to.close()
    assert [(one.name, one.is_open) for one in read(path).tracks[0][0]] == [("long", False)]


def test_a_line_that_a_kill_cut_is_left_out(tmp_path):
    path, to = make(tmp_path)
    note(to, (RUN, "run f", None, []))
    to.close()
    with open(path, "a") as file:
        file.write('{"name": "run g", "cat": "ru')
    assert [span.name for span in read(path).tracks[0][0]] == ["run f"]


def test_a_full_timeline_says_so_once(tmp_path, capsys):
    path, to = make(tmp_path, limit=1)
    for _ in range(3):
        if (span := to.start(RUN, "run f", None, None)) is not None:
            to.end(span)
    to.close()
    assert capsys.readouterr().err.count("is full") == 1
    assert len(read(path).tracks[0][0]) == 1


def test_a_full_disk_ends_the_timeline_and_not_the_program(tmp_path, capsys):
    _, to = make(tmp_path)
    to._file.close()
    to._file._file = open("/dev/full", "ab", buffering=0)
    note(to, (RUN, "run f", None, []))
    to.close()
    assert "cannot be written any more" in capsys.readouterr().err
    assert to.start(RUN, "run f", None, None) is None


def test_the_parts_of_all_hosts_become_one(tmp_path):
    path = str(tmp_path / "trace.json")
    parts = [part_name(path, host) for host in range(3)]
    assert parts[:2] == [path, str(tmp_path / "trace.host1.json")]
    for rank, part in enumerate(parts[:2]):  # the third host's files are elsewhere
        to = TimelineRecorder(make_file(part, rank, size=2))
        note(to, (RUN, f"run on host {rank}", None, []))
        to.close()
    before = read(path)
    join_parts(path, 3)
    assert json.loads(pathlib.Path(path).read_text())[-1]["name"] == "end"
    assert read(path) == before
    assert [spans[0][0].name for _, spans in sorted(before.tracks.items())] == [
        "run on host 0",
        "run on host 1",
    ]
    assert not (tmp_path / "trace.host1.json").exists()


def test_parts_of_a_run_before_are_removed_and_nothing_else(tmp_path):
    path = str(tmp_path / "t.json")
    for name in ("t.host1.json", "t.host12.json"):
        make_file(tmp_path / name).close()
    (tmp_path / "t.host3.json").write_text("[\n")  # killed early
    kept = {
        "t.host1-baseline.json": "[\n",
        "t.host2.notes.json": "[\n",
        "t.hosts.json": "[\n",
        "t.host01.json": "[\n",
        "t.host4.json": "[\n1]\n",
        "t.host5.json": "{}",
        "t.host6.json": "",
    }
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "t.host7.json").mkdir()
    make_file(path).close()
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "t.host7.json", "t.json"])
    assert {name: (tmp_path / name).read_text() for name in kept} == kept


def test_what_is_no_timeline_is_not_overwritten(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Mine\n")
    with pytest.raises(
        OSError,
        match=r"HPCSTRAT_TIMELINE=.*README\.md: that file exists and is not a timeline; name another",
    ):
        make_file(path)
    assert path.read_text() == "# Mine\n"
    for text in ("", "[\n"):
        path.write_text(text)
        make_file(path).close()


def test_parts_that_cannot_be_joined_do_not_keep_a_rank_from_its_end(tmp_path, capsys):
    join_parts(str(tmp_path / "gone" / "trace.json"), 2)
    assert "could not be finalized: " in capsys.readouterr().err


def test_clocks_are_compared_within_the_meetings():
    # The other rank's clock is 1000 ahead. The ranks meet at 50, where it arrives last, and at 80.
    one = [(10, 52), (79, 83)]
    other = [(1049, 1051), (1071, 1082)]
    least, most = difference(one, other)
    assert (least, most) == (1049 - 52, 1082 - 79)
    assert least <= 1000 <= most


# ---- where steps spend their time


def make_timeline(*ranks, cores=8):
    """A timeline from spans (start, end, category, name), or a dict of tracks, per rank."""
    tracks = {
        rank: {
            number: [TraceSpan(*span) for span in spans]
            for number, spans in (given if isinstance(given, dict) else {0: given}).items()
        }
        for rank, given in enumerate(ranks)
    }
    return Timeline(tracks, {rank: "" for rank in tracks}, {rank: cores for rank in tracks})


def steps(count, *inner, name="run f"):
    """Runs of 6 s, every 10 s; `inner` spans start and end relative to the start of the step."""
    spans = []
    for i in range(count):
        spans.append((10.0 * i, 10.0 * i + 6, "run", name))
        spans += [
            (10.0 * i + begin, 10.0 * i + end, category, category) for begin, end, category in inner
        ]
    return spans


def test_shares_are_of_the_innermost_span_and_sum_up_to_one():
    spans = steps(
        4, (1, 4, "update"), (1, 2, "communication"), (1.5, 2, "waiting"), (7, 9, "input")
    )
    (rank,) = share_out(make_timeline(spans))
    assert rank.steps == 2
    assert [rank.step, rank.mean] == pytest.approx([10, 10])
    assert rank.shares == pytest.approx(
        {
            "computing": 0.3,
            "update": 0.2,
            "communication": 0.05,
            "waiting": 0.05,
            "input": 0.2,
            "checkpoint": 0,
            "other": 0.2,
        }
    )


def test_the_bytes_of_a_step_are_those_of_its_communication():
    spans = [
        (*span, 100) if span[2] == "communication" else span
        for span in steps(5, (1, 2, "communication"))
    ]
    (rank,) = share_out(make_timeline(spans))
    assert rank.nbytes == pytest.approx(100)


def test_steps_are_of_the_function_that_runs_most_often():
    (rank,) = share_out(make_timeline([*steps(4), (38.0, 39.0, "run", "run evaluation")]))
    assert rank.steps == 2


def test_two_runs_are_too_few():
    with pytest.raises(
        ValueError,
        match=r"rank 0 ran at most 2 steps, and three are .* call Strategy\.run more often",
    ):
        share_out(make_timeline(steps(2)))


def test_what_the_gpu_does_counts_before_what_the_host_does():
    host = [(0.0, 2.0, "run", "run f"), (2.0, 9.0, "input", "next batch")]
    gpu = [(1.0, 5.0, "run", "run f"), (3.0, 4.0, "communication", "reduce")]
    copies = [(0.0, 9.0, "input", "copy a batch")]
    timeline = make_timeline({0: host, 1000: copies, 1001: gpu})
    assert [one[:3] for one in periods_of(timeline.tracks[0])] == [
        (0, 1, "computing"),
        (1, 3, "computing"),
        (3, 4, "communication"),
        (4, 5, "computing"),
        (5, 9, "input"),
    ]


def test_gpus_wait_until_all_have_begun():
    early = [(0.0, 6.0, "run", "run f"), (1.0, 5.0, "communication", "reduce", 4)]
    late = [(0.0, 6.0, "run", "run f"), (4.0, 5.0, "communication", "reduce", 4)]
    moved = move_waiting(make_timeline({0: [], 1000: early}, {0: [], 1000: late}))
    kinds = [
        [(one.start, one.end, one.category) for one in periods_of(tracks)]
        for tracks in moved.tracks.values()
    ]
    assert kinds[0] == [
        (0, 1, "computing"),
        (1, 4, "waiting"),
        (4, 5, "communication"),
        (5, 6, "computing"),
    ]
    assert kinds[1] == [(0, 4, "computing"), (4, 5, "communication"), (5, 6, "computing")]


# ---- advice


def rank_with(number, nbytes=0.0, mean=1.0, **shares):
    return Rank(
        number,
        10,
        1.0,
        mean,
        dict.fromkeys(KINDS, 0.0) | {"computing": 1 - sum(shares.values())} | shares,
        nbytes,
    )


@pytest.mark.parametrize(
    ("ranks", "cores", "says"),
    [
        (
            [rank_with(0, waiting=0.1), rank_with(1, update=0.19)],
            8,
            ["Nothing dominates: 86% of a step is"],
        ),
        (
            [rank_with(0, waiting=0.6), rank_with(1, waiting=0.02), rank_with(2, waiting=0.5)],
            8,
            ["Waiting takes 37% of a step: the others wait for rank 1, which itself waits 2%"],
        ),
        (
            [rank_with(rank, waiting=0.02 if 64 <= rank < 72 else 0.3) for rank in range(512)],
            8,
            ["the others wait for ranks 64-71, which themselves wait 2%"],
        ),
        (
            [rank_with(rank, waiting=0.5) for rank in range(4)],
            2,
            ["all ranks wait about equally, and 4 ranks share 2 cores"],
        ),
        (
            [rank_with(rank, waiting=0.5) for rank in range(2)],
            8,
            ["their work varies from step to step"],
        ),
        (
            [rank_with(0, communication=0.4, input=0.3, nbytes=2.5e6)],
            8,
            [
                "Communication takes 40% of a step: each rank sends 2.5 MB per step",
                "Input takes 30% of a step: make batches",
            ],
        ),
        (
            [rank_with(0, mean=2.0)],
            8,
            ["Nothing dominates", "longer than most: the mean is 2e+03 ms, the median 1e+03"],
        ),
        ([rank_with(0, checkpoint=0.3)], 8, ["Checkpoint takes 30% of a step: save less often."]),
        ([rank_with(0, other=0.3)], 8, ["the program's own lines between the steps"]),
        ([rank_with(0, update=0.3)], 8, ["use larger batches, or an optimizer with fewer slots"]),
    ],
    ids=[
        *(
            "nothing",
            "one rank",
            "a host",
            "too few cores",
            "work that varies",
            "communication and input",
            "a few long steps",
        ),
        *("checkpoints", "the program", "updates"),
    ],
)
def test_advice_names_what_dominates(ranks, cores, says):
    found = advise(ranks, make_timeline(*[()] * len(ranks), cores=cores))
    assert len(found) == len(says)
    for sentence, part in zip(found, says, strict=True):
        assert part in sentence


def test_ranks_of_other_hosts_share_no_cores():
    ranks = [rank_with(rank, waiting=0.5) for rank in range(512)]
    timeline = make_timeline(*[()] * 512)
    for rank in range(512):
        timeline.names[rank] = f"rank {rank} of 512 on n{rank // 8}"
    assert "their work varies" in advise(ranks, timeline)[0]


# ---- the command


@pytest.mark.parametrize("size", [2, 512])
def test_the_table_of_many_ranks_is_short(tmp_path, capsys, size):
    path = tmp_path / "trace.json"
    late = size - 1
    with path.open("w") as file:
        for rank in range(size):
            own = {"pid": rank, "tid": 0, "ph": "X"}
            name = {
                "name": "process_name",
                "ph": "M",
                "pid": rank,
                "args": {"name": f"rank {rank}"},
            }
            events = [name]
            for step in range(4):
                run = {"name": "run f", "cat": "run", "ts": 10.0 * step, "dur": 8.0}
                wait = {"name": "barrier", "cat": "waiting", "ts": 10.0 * step, "dur": 6.0}
                events += [own | run, own | wait] if rank != late else [own | run]
            opened = {"name": "barrier", "cat": "waiting", "ts": 40.0, "ph": "B"}
            lines = (json.dumps(event) + ",\n" for event in [*events, own | opened])
            file.write("".join(lines))
    assert command(str(path), None, 4, as_json=False) == 0
    ends, *table = capsys.readouterr().out.splitlines()
    assert ends == f"{ranks_in_words(range(size))} ended within 'barrier' (waiting)"
    words = [line.split()[0] for line in table if line.strip()]
    first = [word for word in words if word == "mean" or word.isdigit()]
    if size == 2:
        assert first == ["0", "1"]
    else:
        assert first == ["mean", *map(str, range(15)), "511"]
    assert any(f"the others wait for rank {late}, which itself waits 0%" in line for line in table)


SPAN = {"name": "run f", "cat": "run", "pid": 0, "tid": 0, "ph": "X", "ts": 0.0, "dur": 1.0}
CRAFTED = {
    **{
        f"{name} is {value!r:.20}": {name: value}
        for name, values in {
            "name": (3, None),
            "cat": ("x", "\x1b[2J", [], None),
            "pid": ("0", [], 1.5, None),
            "tid": ("0", {}, None),
            "ts": ("0", [], None, 10**400, float("nan"), float("inf")),
            "dur": ("1", {}, -1.0, 10**400, float("nan"), float("-inf")),
            "args": ([], {"bytes": "many"}, {"bytes": None}, {"bytes": 1e400}),
        }.items()
        for value in values
    },
    **{f"without {name}": {name: ...} for name in ("cat", "tid", "ts", "dur")},
    "labels of nothing": {"name": "process_labels", "ph": "M"},
    "labels without a number": {"name": "process_labels", "ph": "M", "args": {"labels": "x"}},
    "a name of nothing": {"name": "process_name", "ph": "M"},
}


@pytest.mark.parametrize("what", CRAFTED)
def test_the_command_names_a_file_with_crafted_events(tmp_path, capsys, what):
    path = tmp_path / "trace.json"
    changed = {name: value for name, value in (SPAN | CRAFTED[what]).items() if value is not ...}
    lines = [SPAN | {"ts": 2.0 * i} for i in range(4)] + [changed]
    path.write_text("".join(json.dumps(line) + ",\n" for line in lines))
    status = command(str(path), None, 4, as_json=False)
    error = capsys.readouterr().err
    assert (
        status == 1
        and error.startswith(f"python -m hpcstrat timeline {path}: ")
        and error.count("\n") == 1
    )
    assert "is damaged" in error and "\x1b" not in error


@pytest.mark.parametrize(
    "spans, says", [(0, "nothing is recorded"), (4, "the steps of rank 0 took no time")]
)
def test_the_command_names_a_file_of_no_time(tmp_path, capsys, spans, says):
    path = tmp_path / "trace.json"
    named = {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "rank 0"}}
    path.write_text("".join(json.dumps(line) + ",\n" for line in (named, *[SPAN] * spans)))
    assert command(str(path), None, 4, as_json=False) == 1
    assert f"timeline {path}: {says}" in capsys.readouterr().err


def test_brackets_are_no_event(tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_text("[" * 100_000)
    assert command(str(path), None, 4, as_json=False) == 1
    assert "is not a timeline" in capsys.readouterr().err
    assert command(str(path), None, 0, as_json=False) == 1
    assert "--steps is 0; it must be at least 1" in capsys.readouterr().err


def test_the_command_refuses_what_is_no_timeline(tmp_path, capsys):
    path = tmp_path / "other.json"
    assert command(str(path), None, 4, as_json=False) == 1
    assert "No such file" in capsys.readouterr().err
    path.write_text("[]\n")
    assert command(str(path), None, 4, as_json=False) == 1
    error = capsys.readouterr().err
    assert (
        "is not a timeline; pass the file that HPCSTRAT_TIMELINE named" in error
        and "HPCSTRAT_TIMELINE=" not in error
    )
