"""How much memory is left: of the host, and within the control groups of this process."""

import pytest
from internals import available_memory, host_limits

MIB = 1 << 20


def test_this_host_has_memory():
    with open("/proc/meminfo") as file:
        total = 1024 * int(file.readline().split()[1])
    assert 0 < available_memory() <= total


@pytest.mark.parametrize(("ranks", "each"), [(1, 64 * MIB), (2, 32 * MIB)])
def test_only_large_requests_are_compared_with_what_is_free(monkeypatch, ranks, each):
    monkeypatch.setattr(host_limits, "available_memory", lambda: 1000)
    host_limits.check_available(each - 1, ranks)
    of_each = ", but" if ranks == 1 else " for 2 ranks, 33,554,432 for each, but"
    with pytest.raises(MemoryError, match=f"67,108,864 bytes were requested{of_each} this host"):
        host_limits.check_available(each, ranks)
    monkeypatch.setattr(host_limits, "available_memory", lambda: 64 * MIB)
    host_limits.check_available(each, ranks)


@pytest.fixture
def system(tmp_path):
    """A stand-in for /: `system(path=text, ...)` writes files to it; 1,000 MiB are free."""

    def write(**files):
        for path, text in (
            {"proc/meminfo": f"MemTotal: 4096000 kB\nMemAvailable: {1000 * 1024} kB\n"} | files
        ).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def group(folder, limit, used, cached):
    """The files of a control group, in MiB."""
    stat = f"anon 1\ninactive_file {cached * MIB}\nactive_file {MIB}\n"
    return {
        f"{folder}/memory.max": limit if isinstance(limit, str) else str(limit * MIB),
        f"{folder}/memory.current": str(used * MIB),
        f"{folder}/memory.stat": stat,
    }


ROOT = "sys/fs/cgroup"
JOB = {"proc/self/cgroup": "0::/job/step\n"}
GROUPS = {
    "no groups": ({}, 1000),
    "no files": (JOB, 1000),
    "the job's": (JOB | group(f"{ROOT}/job/step", 500, 200, 9), 310),
    "one further out": (
        JOB | group(f"{ROOT}/job/step", "max", 200, 9) | group(f"{ROOT}/job", 400, 300, 0),
        101,
    ),
    # It shows the path on the host, but its group is at the root.
    "a container's": (JOB | group(ROOT, 100, 90, 0), 11),
    "a container's, by dots": (
        {"proc/self/cgroup": "0::/../../job\n"} | group(ROOT, 100, 90, 0),
        11,
    ),
    "more than the host's": (JOB | group(f"{ROOT}/job/step", 5000, 200, 0), 1000),
    "more used than allowed": (JOB | group(f"{ROOT}/job/step", 500, 600, 0), 0),
    "beside version 1": (
        {"proc/self/cgroup": "4:memory:/job\n0::/job\n"}
        | group(f"{ROOT}/unified/job", 500, 400, 0),
        101,
    ),
    "nonsense": (JOB | {f"{ROOT}/job/step/memory.max": "nonsense"}, 1000),
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_control_groups_leave(system, name):
    files, left = GROUPS[name]
    assert available_memory(system(**files)) == left * MIB
