"""`python -m hpcstrat info`: one table of what there is, and what is wrong with it."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcstrat._cli import facts, faults
from hpcstrat._communicators.connection import connect


def info(as_json: bool) -> int:
    """Prints it on the lead; returns the exit status, 1 where something is wrong. Collective."""
    own, error, communicator = facts.gather_own(), "", None
    everyones, is_lead = [own], own["rank"] == 0  # as the launcher alone says
    try:
        communicator = connect()
        everyones, is_lead = communicator.all_gather_obj("info", own), communicator.rank == 0
    except RuntimeError as problem:
        error = str(problem)
    mpirun = facts.find_mpirun() if is_lead else (None, "")
    found = faults.find_faults(everyones, mpirun, error) if is_lead else []
    if is_lead and as_json:
        print(
            json.dumps(
                {
                    "launcher": facts.describe_launcher(),
                    "mpirun": mpirun[0],
                    "ranks": [facts.as_any(one) for one in everyones],
                    "faults": [one._asdict() for one in found],
                },
                indent=2,
            )
        )
    elif is_lead:
        _show(everyones, mpirun, found)
    if communicator is None:
        return 1
    return int(communicator.broadcast_obj("info", bool(found)))


def _show(everyones: list[facts.RankFacts], mpirun: tuple[str | None, str], found: list[faults.Fault]) -> None:
    console = Console(markup=False, emoji=False)  # names and remedies may hold brackets: '.[mpich]'
    versions = Table(title="Versions", show_header=False)
    for name, version in everyones[0]["versions"].items():
        versions.add_row(name, version)
    versions.add_row("Python's path", facts.own_python())
    path, owner = mpirun
    versions.add_row("mpirun", f"{path or 'not found'}{f' ({owner})' if owner else ''}")
    versions.add_row("launcher", facts.describe_launcher())
    versions.add_row("large updates", everyones[0]["updates"])
    console.print(versions)
    ranks = Table("rank", "host", "device", "cores", "/dev/shm, MiB left", title="Ranks")
    for one in everyones:
        local = [other["rank"] for other in everyones if other["host"] == one["host"]].index(one["rank"])
        gpus = one["gpus"]
        device = f"GPU:{local % len(gpus)} ({gpus[local % len(gpus)]})" if gpus else "CPU:0"
        ranks.add_row(str(one["rank"]), one["host"], device, _spans(one["cores"]), str(one["shared_memory"] or "none"))
    console.print(ranks)
    for fault in found:
        console.print(
            Text.assemble(("wrong:", "bold red"), f" {fault.what}\n  ", ("remedy:", "bold"), f" {fault.remedy}")
        )
    if not found:
        console.print("Nothing is wrong.")


def _spans(cores: list[int]) -> str:
    """`0-3, 6` of 0, 1, 2, 3 and 6."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)
