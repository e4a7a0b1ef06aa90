"""One planted fault after another: the job ends in seconds, says what happened, and leaves nothing."""

import re

import pytest
from fault import ANY
from faults import FAULTS, KINDS, QUICK

ENV = {
    "HPCSTRAT_STALL_SECONDS": "40",
    "HPCSTRAT_TIMEOUT_SECONDS": "60",
    "HPCSTRAT_OUTPUT": "lead",
}


def test_one_of_each_kind_is_quick():
    assert set(QUICK) <= FAULTS.keys() and len(FAULTS) == sum(map(len, KINDS))
    assert all(kind.keys() & QUICK for kind in KINDS)


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name not in QUICK)],
)
def test_a_fault_ends_the_job(launch, name):
    fault = FAULTS[name]
    if launch.open_mpi and fault.hosts:
        pytest.skip("Open MPI cannot take one host for several")
    result = launch(fault.source, fault.ranks, env=ENV | fault.variables)
    if fault.status is None:
        assert result.status != 0
    elif fault.status != ANY:
        assert result.status == fault.status
    lines = [line for line in result.err.splitlines() if line.strip()] or [""]
    assert re.search(fault.first, lines[0])
    for text in fault.says:
        assert re.search(text, result.err + result.out), text
    for text in fault.prints:
        assert re.search(text, result.out), text
    if fault.status == 0:
        assert lines == [""]
    if not fault.prints:
        assert "went on" not in result.out
    if fault.limits is None and "HPCSTRAT_TIMEOUT_SECONDS" not in fault.env:
        assert "HPCSTRAT_TIMEOUT_SECONDS" not in result.err, "no rank may have waited until then"
    assert result.leftovers == []
