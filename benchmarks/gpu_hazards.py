"""Tries what only real GPUs show: full launch queues, NCCL's first calls, hung and killed ranks.

    python benchmarks/gpu_hazards.py --log /tmp/hazards       # all parts, under eight minutes
    python benchmarks/gpu_hazards.py --parts queue events     # without MPI

    queue    launches that fit behind a kernel that does not end; calls that other threads can make
    events   the cost of events that a host can wait for without spinning: to record, to wait for
    calls    NCCL's first and second call of each kind, its memory, for NCCL_RUNTIME_CONNECT=0, 1
    hangs    a rank whose GPU never reaches its next reduction: when the report and the end come
    kills    SIGKILL of a rank: when the others end, driver and memory then, a new start of ranks

Each part runs in separate processes under a time limit, so that a part that freezes costs only
itself. A table comes at the end, whatever happened; --log keeps what was printed, each line with
its seconds. Ranks are started by `mpirun`, or by the command in MPIRUN (which may have options),
through launch/share-gpu if there are more ranks than GPUs.

The tests run it on simulated GPUs, which have no kernels that spin.
"""

import argparse
import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from gpu_hazard_jobs import PROGRAMS, Job, inside, mpirun, since
from gpu_hazard_programs import BEGINS, ROW

# This process starts the others: neither MPI nor CUDA may start in it.

# The time limit of each.
SECONDS = {
    "queue": 60,
    "events": 30,
    "calls": 80,
    "hangs": 150,
    "kills": 120,
}


class Part:
    """A part of the table. Its jobs share its time."""

    def __init__(self, name, options, device, rows):
        self.name, self.log, self.ranks = name, options.log, options.ranks
        self.is_simulated, self._gpus, self._rows = device["is_simulated"], device["gpus"], rows
        self._nccl = ["--nccl", options.nccl] if options.nccl else []
        self._deadline = time.monotonic() + (options.seconds or SECONDS[name])

    def sharing(self, ranks):
        """The command that lets the ranks share GPUs, if there are more ranks than GPUs."""
        share = PROGRAMS.parents[1] / "launch" / "share-gpu"
        return [share, *self._nccl] if ranks > self._gpus else []

    def job(self, case, command, **variables):
        log = self.log / f"{self.name}-{case.replace(' ', '-')}.log"
        return Job(command, log, max(self._deadline - time.monotonic(), 1.0), **variables)

    def add(self, case, seen, seconds, is_well=True):
        self._rows.append((self.name, case, seen if is_well else f"FAILED: {seen}", seconds))

    def collect(self, case, command, **variables):
        """Adds the rows that a command prints, and one more if it failed."""
        job = self.job(case, command, **variables)
        for _, line in job.lines:
            if ROW in line:
                self.add(*json.loads(line.partition(ROW)[2]))
        if job.status != 0:
            said = [line for _, line in job.lines if line.strip() and ROW not in line]
            self.add(
                case,
                f"{job.how()}: {said[-1][:150] if said else 'nothing was said'}",
                job.seconds,
                False,
            )


def calls(part):
    for connect in "01":
        command = [*part.sharing(part.ranks), *mpirun(part.ranks, "calls", f"connect={connect}")]
        part.collect(f"connect={connect}", command, NCCL_RUNTIME_CONNECT=connect)


def hangs(part):
    stall, timeout = ("2", "8") if part.is_simulated else ("5", "15")
    variables = {"HPCSTRAT_STALL_SECONDS": stall, "HPCSTRAT_TIMEOUT_SECONDS": timeout}
    if part.is_simulated:  # two calls per step, and some at the start
        variables["SIMULATED_GPU_FAULTS"] = "nccl-hangs@1:240"
    for case, launches, reads in (
        ("no reads", 0, 0),
        ("get() each step", 0, 1),
        ("1,500 launches a step", 1500, 0),
    ):
        ranks = mpirun(part.ranks, "train", "hang", tempfile.mkdtemp(dir=part.log), launches, reads)
        job = part.job(case, [*part.sharing(part.ranks), *ranks], **variables)
        begin = job.when(BEGINS)
        report, end = (
            job.when(text, begin or 0)
            for text in ("(HPCSTRAT_STALL_SECONDS)", "hpcstrat: the job ends")
        )
        seen = f"report {since(begin, report)}, end {since(begin, end)}; {job.how()}"
        part.add(
            case, seen, job.seconds, None not in (begin, report, end, job.status) and not job.stayed
        )


def kills(part):
    ranks = 2 * part.ranks
    part.collect("in one daemon", [*part.sharing(ranks), *inside("kills", part.log, ranks)])
    launcher = [sys.executable, "-m", "hpcstrat", "run", "-n", ranks, "--restarts", 2]
    program = inside("train", "kill", tempfile.mkdtemp(dir=part.log))[1:]
    job = part.job("restarts", [*part.sharing(ranks), *launcher, *program])
    killed, restarts = job.when(BEGINS), sum("; restart " in line for _, line in job.lines)
    seen = f"{restarts} restarts, trains {since(killed, job.when('training from', killed or 0))}; {job.how()}"
    part.add("hpcstrat run --restarts 2", seen, job.seconds, job.status == 0 and restarts > 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", nargs="+", choices=SECONDS, default=[*SECONDS], help="which to run (all)"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="of calls and hangs; kills: twice as many (%(default)s)",
    )
    parser.add_argument("--seconds", type=float, help=f"the time limit of each part ({SECONDS})")
    parser.add_argument(
        "--nccl", metavar="FILE", help="the libnccl.so.2 for ranks that share a GPU"
    )
    parser.add_argument(
        "--log", metavar="DIR", type=pathlib.Path, help="keeps what the parts print"
    )
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks: a hang takes two")
    found = subprocess.run(inside("device"), capture_output=True, text=True)
    if found.returncode:
        return f"gpu_hazards.py: no GPU can be used here: {found.stderr.strip().splitlines()[-1]}"
    device, rows = json.loads(found.stdout), []
    print(device["text"], flush=True)
    # The message comes after the table.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_hazards.py: ended by SIGTERM"))
    with contextlib.ExitStack() as stack:
        options.log = options.log or pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        options.log.mkdir(parents=True, exist_ok=True)
        try:
            for name in options.parts:
                print(f"{name} ...", flush=True)
                part = Part(name, options, device, rows)
                if name in ("calls", "hangs", "kills"):
                    globals()[name](part)
                elif name == "queue" and part.is_simulated:
                    part.add("all", "left out: a kernel that spins cannot be simulated", 0.0)
                else:
                    part.collect(
                        "all",
                        inside(name, *([8 if part.is_simulated else 24] * (name == "events"))),
                    )
        finally:
            print("\n| part | case | what was seen | s |\n| --- | --- | --- | --- |")
            for name, case, seen, seconds in rows:
                print(f"| {name} | {case} | {seen.replace('|', '/')} | {seconds:.1f} |")
    return int(any(seen.startswith("FAILED") for _, _, seen, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
