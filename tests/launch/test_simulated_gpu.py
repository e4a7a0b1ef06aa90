"""The simulated GPU refuses what GPUs do not forgive, and counts what programs have it do."""

import pathlib
import re

import pytest
import simulated_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler"),
]

TESTS = pathlib.Path(__file__).parents[1]
KIT = [TESTS / "conformance" / name for name in ("compare.py", "golden.json", "cases")]
# What gpu_kernels.py prints after `the simulated GPU: `.
REFUSALS = [
    ".*summed: thread 1 reads word 0 of sums, which thread 0 writes: which comes first is chance",
    ".*summed: thread 2 writes 8 bytes at an address that is outside of what its arguments say",
    ".*kernel, gets x of float64 at an address that is not a multiple of 8",
    ".*copy_arrays: thread 0 writes 8 bytes at an address that is not a multiple of them",
    r"a read at .* is not ordered with the write at .*, of the same memory \(bytes 56 to 64 of ",
    "an array on GPU 1 is used at ",
]


def test_what_a_gpu_does_not_forgive_is_refused(simulated):
    result = simulated("gpu_kernels.py")
    assert (result.status, result.leftovers) == (0, []), result.err
    for line, said in zip(result.out.splitlines(), REFUSALS, strict=True):
        assert re.match(f"the simulated GPU: {said}", line)


def test_for_an_update_of_a_metric_the_host_does_not_wait(simulated):
    """For a sparse gradient it waits twice: for the largest index, and for the number of rows."""
    result = simulated("gpu_waits.py")
    assert (result.status, result.leftovers) == (0, [])
    assert result.out.split() == ["2", *"0000000"]


def test_a_program_with_a_graph(simulated):
    """Its graphs end before its communicator."""
    for end in "closes", "ends":
        result = simulated("gpu_graph.py", 2, end)
        assert result.status == 0 and result.out == "200 0.0\n", result.err


def test_a_rank_that_makes_another_call_than_a_launch_of_a_graph(simulated):
    result = simulated("gpu_graph.py", 2, "hangs")
    assert result.status != 0
    assert "rank 0: Strategy.run(step), at " in result.err, result.err
    assert "rank 1: barrier(), at " in result.err, result.err


# ---- whole programs


def test_the_conformance_kit(simulated):
    result = simulated(KIT[0], 2, *KIT[1:])
    assert result.status == 0 and " passed, 0 failed" in result.out
    assert result.err == ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 1, 4])
def test_whole_programs_on_other_numbers_of_ranks(simulated, ranks):
    result = simulated(KIT[0], ranks, *KIT[1:])
    assert (result.status, result.err) == (0, "") and " passed, 0 failed" in result.out
    assert simulated("gpu_graph.py", ranks, "closes").out == "200 0.0\n"


def test_the_kit_where_there_are_fewer_gpus_than_ranks(simulated):
    env = {"SIMULATED_GPUS": "1", "HPCSTRAT_TEST_GPU": None}
    result = simulated(KIT[0], 2, *KIT[1:], "--only", "reduce", env=env)
    assert result.status == 0 and " passed, 0 failed" in result.out
    assert result.err == "there are fewer GPUs than ranks: the replicas compute on CPUs\n"
