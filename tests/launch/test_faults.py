"""One planted fault after the other: each ends the job in seconds, says what happened and where, and leaves nothing.

`pytest -rP tests/launch/test_faults.py | grep FAULT` shows how long each took, and the first line that it printed.
"""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault import ANY
from faults import FAULTS, QUICK
from launcher import Launcher
from slow import slow_but

CONNECT = "for the others to connect"
SECONDS = 18  # 10 from the fault to the end, and some to start on a machine that does other work too
PATIENCE = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "3", "HPCSTRAT_OUTPUT": "lead"}
TWO_HOSTS = {"MPIR_CVAR_NUM_CLIQUES": "2"}


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    """What came of each fault of this run. Two jobs run at a time: they wait most of it."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here")

    def run(name):
        launcher, fault = Launcher(tmp_path_factory.mktemp("fault")), FAULTS[name]
        if launcher.open_mpi and fault.hosts:
            pytest.skip("Open MPI cannot take one host for several")
        env = PATIENCE | (TWO_HOSTS if fault.hosts else {}) | dict(fault.env)
        return launcher.run(fault.source, fault.ranks, timeout=SECONDS, env=env)

    ours = [item for item in request.session.items if getattr(item, "function", None) is test_a_fault_ends_the_job]
    pool = ThreadPoolExecutor(2)
    yield {name: pool.submit(run, name) for name in [item.callspec.params["name"] for item in ours]}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS))
def test_a_fault_ends_the_job(jobs, name):
    fault, result = FAULTS[name], jobs[name].result()
    print(result.stdout, result.stderr, sep="\n")
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if CONNECT not in fault.first:  # a busy machine may start more slowly than these seconds allow
        lines = [line for line in lines if CONNECT not in line]
    lines = lines or [""]
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
    assert [left for left in result.leftovers if not (fault.left and left.startswith(fault.left))] == []
