"""How much memory this host has, and how much of it this process can still get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Controller(NamedTuple):
    """The files of one version of control groups.

    Attributes:
        folder: of the hierarchy, where it is mounted.
        limit: bytes that a group and those in it may have.
        usage: bytes that they have, with cached files, which the system gives up first.
        cached: the fields of `memory.stat` with those.
    """

    folder: str
    limit: str
    usage: str
    cached: tuple[str, str]


_V2_FILES = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Controller(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = (_Controller("sys/fs/cgroup", *_V2_FILES), _Controller("sys/fs/cgroup/unified", *_V2_FILES))


def physical_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still get: what the host has left, or one of its control groups if that is less.

    Args:
        root: the folder that `proc` and `sys` are in.
    """
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    return max(0, min([1024 * int(fields["MemAvailable"].split()[0]), *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left in each group that this process is in, from the innermost out, where it has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for controller in (_V1,) if controllers else _V2:
            # A container may show the group's path on the host, and mount the group itself at the root.
            parts = [part for part in path.split("/") if part and part != ".."]
            for length in range(len(parts), -1, -1):
                yield from _left(root.joinpath(controller.folder, *parts[:length]), controller)


def _left(group: Path, controller: _Controller) -> Iterator[int]:
    try:
        limit = int((group / controller.limit).read_text())
        usage = int((group / controller.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group here, or "max"
        return
    yield limit - usage + sum(int(stat.get(name, 0)) for name in controller.cached)
