"""How much memory the host, and this process's control groups, have left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

LARGE = 1 << 26
"""Requests of at least this many bytes are compared with the host's free memory."""

# Cached files count as used in `memory.stat`, but the system drops them before it refuses memory.
_CACHED = ("inactive_file", "active_file")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still get, from the host and within its control groups.

    `root` is the folder with `proc` and `sys`.
    """
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    # Not MemFree: MemAvailable counts cached files, which the kernel drops on demand.
    return max(0, min([1024 * int(fields["MemAvailable"].split()[0]), *_read_free_in_groups(root)]))


def _read_free_in_groups(root: Path) -> Iterator[int]:
    """The bytes that are left in each of this process's groups with a limit, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers:  # of version 1
            continue
        # Limits of the outer groups apply as well: batch systems and containers set theirs at
        # different levels. A container may show the group's path on the host, but mount the group
        # at the root.
        parts = [part for part in path.split("/") if part and part != ".."]
        for folder in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
            for length in range(len(parts), -1, -1):
                group = root.joinpath(folder, *parts[:length])
                try:
                    limit = int((group / "memory.max").read_text())
                    used = int((group / "memory.current").read_text())
                    fields = (group / "memory.stat").read_text().splitlines()
                    stat = dict(field.split() for field in fields)
                except (OSError, ValueError):  # no such group here, or "max"
                    continue
                yield limit - used + sum(int(stat.get(name, 0)) for name in _CACHED)


def check_available(nbytes: int, ranks: int = 1) -> None:
    """Refuses a large request for more than is free; the system would grant it and kill later.

    Args:
        nbytes: bytes per rank.
        ranks: how many ranks of this host request as much at the same time.
    """
    wanted = ranks * nbytes
    if wanted >= LARGE and wanted > (free := available_memory()):
        each = f" for {ranks} ranks, {nbytes:,} for each," if ranks > 1 else ","
        raise MemoryError(
            f"{wanted:,} bytes were requested{each} but this host has {free:,} free; start fewer "
            "ranks per host"
        )
