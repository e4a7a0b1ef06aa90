"""The examples, and the code of README.md, run as their readers run them."""

import os
import pathlib
import re

import pytest

from hpcstrat import _gpu

ROOT = pathlib.Path(__file__).parents[2]
RANKS = [None, 1, 2, 3, 4]  # None: without mpirun


@pytest.fixture(params=["CPU", "GPU"])
def gpus(request):
    """Whether programs see the GPUs, and on how many ranks they then run: `None`, for without mpirun, and more."""
    if request.param == "CPU":
        return False, RANKS
    count = len(_gpu.visible()) if _gpu.has_cupy() else 0
    if count == 0:
        missing = "there is no GPU, or no CuPy"
        if os.environ.get("HPCSTRAT_TEST_GPU") == "1":
            pytest.fail(f"HPCSTRAT_TEST_GPU=1: {missing}")
        pytest.skip(missing)
    is_shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return True, [ranks for ranks in RANKS if is_shared or (ranks or 1) <= count]


@pytest.mark.timeout(300)
def test_train_learns_the_same_on_any_number_of_ranks(launch, gpus):
    histories = {}
    are_seen, numbers = gpus
    for ranks in numbers:
        result = launch(ROOT / "examples" / "train.py", ranks, timeout=60, gpus=are_seen)
        assert (result.status, result.leftovers) == (0, [])
        first, *epochs, last = result.stdout.splitlines()
        assert first.endswith(f"replicas: {ranks or 1}")
        histories[ranks] = [_losses(line, epoch) for epoch, line in enumerate(epochs, start=1)]
        assert len(histories[ranks]) == 10
        match = re.fullmatch(r"test accuracy: (0\.\d{4})", last)
        assert match is not None
        assert float(match[1]) >= 0.95
        for warning in ("Warning", "Error", "Traceback"):
            assert warning not in result.stderr
    for ranks, history in histories.items():
        for epoch in history:
            assert epoch == pytest.approx(histories[1][history.index(epoch)], rel=1e-4), ranks


def _losses(line, epoch):
    """The loss and the accuracy that a line of the epoch tells."""
    match = re.fullmatch(rf"epoch +{epoch}: loss (\d+\.\d+), accuracy (\d\.\d+)", line)
    assert match is not None, line
    return float(match[1]), float(match[2])


@pytest.mark.parametrize("ranks", [None, 2, 4])
def test_train_takes_batches_that_leave_replicas_empty(launch, ranks):
    options = ["--epochs", "1", "--batch-size", "359", "--learning-rate", "0.2"]
    result = launch(ROOT / "examples" / "train.py", ranks, *options, env={"PYTHONWARNINGS": "error"})
    assert result.status == 0
    assert result.stdout.count("test accuracy: ") == 1


@pytest.mark.parametrize("ranks", RANKS)
def test_code_of_the_readme(launch, ranks):
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert programs
    for program in programs:
        result = launch(program, ranks)
        assert (result.status, result.stderr) == (0, "")
        assert len(result.stdout.splitlines()) == program.count("print(")


def test_commands_of_the_readme():
    text = (ROOT / "README.md").read_text()
    for command in (
        'pip install ".[mpich,examples]" && mpirun -n 4 python examples/train.py',
        'pip install ".[mpich,test]" && launch/test',
    ):
        assert f"\n{command}\n" in text
