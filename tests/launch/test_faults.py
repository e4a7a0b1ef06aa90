"""One planted fault after another: the job ends in seconds, says what happened, and leaves nothing.

`pytest -rP tests/launch/test_faults.py | grep FAULT` shows how long each took, and the first line
that it printed.
"""

import re

import pytest
from fault import ANY
from faults import FAULTS, KINDS, QUICK
from slow import slow_but

# The time limit of a job, many times what it needs, for machines that do other work too.
SECONDS = 90
ENV = {"HPCSTRAT_STALL_SECONDS": "40", "HPCSTRAT_TIMEOUT_SECONDS": "60", "HPCSTRAT_OUTPUT": "lead"}
TWO_HOSTS = {"MPIR_CVAR_NUM_CLIQUES": "2"}


def test_one_of_each_kind_is_quick():
    assert set(QUICK) <= FAULTS.keys()
    assert all(kind.keys() & QUICK for kind in KINDS)


@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS))
def test_a_fault_ends_the_job(launch, name):
    fault = FAULTS[name]
    if launch.open_mpi and fault.hosts:
        pytest.skip("Open MPI cannot take one host for several")
    env = ENV | (TWO_HOSTS if fault.hosts else {}) | dict(fault.env)
    result = launch(fault.source, fault.ranks, timeout=SECONDS, env=env)
    lines = [line for line in result.stderr.splitlines() if line.strip()] or [""]
    print(f"FAULT | {name} | {result.seconds:.1f} | {lines[0]}")
    if fault.status is None:
        assert result.status != 0
    elif fault.status != ANY:
        assert result.status == fault.status
    assert re.search(fault.first, lines[0])
    for text in fault.says:
        assert re.search(text, result.stderr + result.stdout), text
    for text in fault.prints:
        assert re.search(text, result.stdout), text
    if fault.status == 0:
        assert lines == [""]
    if not fault.prints:
        assert "went on" not in result.stdout
    if fault.limits is None and "HPCSTRAT_TIMEOUT_SECONDS" not in fault.env:
        assert "HPCSTRAT_TIMEOUT_SECONDS" not in result.stderr, (
            "no rank may have waited until the time-out"
        )
    assert [
        left for left in result.leftovers if not (fault.left and left.startswith(fault.left))
    ] == []
