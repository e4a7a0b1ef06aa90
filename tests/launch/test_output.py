"""Standard output reads as one program's."""

import pytest

PROGRAM = """
    import sys, threading
    from hpcstrat import _output
    _output.install()
    print("first")
    from hpcstrat import _world
    world = _world.start()
    inside = False
    main = threading.current_thread()
    _output.replica_context = lambda: inside if threading.current_thread() is main else None
    print("cross-replica", "context")
    inside = True
    print(f"replica {world.rank}")
    thread = threading.Thread(target=print, args=(f"thread {world.rank}",))
    thread.start(); thread.join()
    inside = False
    thread = threading.Thread(target=print, args=("outer thread",))
    thread.start(); thread.join()
    sys.stdout.writelines(["a\\n", "b\\n"])
    sys.stdout.buffer.write(b"bytes\\n")
    print("errors are not filtered", file=sys.stderr)
"""
ONCE = ["first", "cross-replica context", "outer thread", "a", "b", "bytes"]


@pytest.mark.parametrize("ranks", [None, 1, 2, 3])
def test_what_shows(launch, ranks):
    result = launch(PROGRAM, ranks)
    count = ranks or 1
    assert result.status == 0
    inside = [f"{word} {rank}" for word in ("replica", "thread") for rank in range(count)]
    assert sorted(result.stdout.splitlines()) == sorted(ONCE + inside)
    assert [line for line in result.stdout.splitlines() if line in ONCE] == ONCE
    assert result.stderr.count("errors are not filtered") == count


def test_all(launch):
    result = launch(PROGRAM, 3, env={"HPCSTRAT_OUTPUT": "all"})
    inside = [f"{word} {rank}" for word in ("replica", "thread") for rank in range(3)]
    assert sorted(result.stdout.splitlines()) == sorted(ONCE * 3 + inside)


def test_lead(launch):
    result = launch(PROGRAM, 3, env={"HPCSTRAT_OUTPUT": "lead"})
    assert sorted(result.stdout.splitlines()) == sorted([*ONCE, "replica 0", "thread 0"])


def test_another_value_is_an_error(launch):
    result = launch(PROGRAM, 2, env={"HPCSTRAT_OUTPUT": "rank0"})
    assert result.status != 0
    assert "ValueError: HPCSTRAT_OUTPUT='rank0' is not allowed" in result.stderr


def test_lines_arrive_whole(launch):
    program = """
    from hpcstrat import _output
    _output.install()
    from hpcstrat import _world
    world = _world.start()
    _output.replica_context = lambda: True
    for number in range(300):
        print("rank", world.rank, "line", number, "x" * 100)
    """
    result = launch(program, 4)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == 1200
    assert {tuple(line[:3]) for line in lines} == {("rank", str(rank), "line") for rank in range(4)}
    assert all(line[4:] == ["x" * 100] for line in lines)
