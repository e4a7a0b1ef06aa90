"""The examples run as their readers run them."""

import pathlib
import re
import shutil

import numpy as np
import pytest
from launcher import skip_unless_it_computes

ROOT = pathlib.Path(__file__).parents[2]
# Next to other tests, the threads of a BLAS wait for each other for longer than they compute.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def rounding(steps, batch_size):
    """How far losses may be apart, relatively, after so few steps, if sums have another order.

    Such a sum is off by at most one rounding unit (2**-24) per element, and each step adds its own.
    This holds for the first steps only: sooner or later one image's input of a ReLU is so close to
    0 that rounding decides its sign, and from there on the weights take another path, to another
    loss after ten epochs, and are as well trained.
    """
    return steps * batch_size * 2.0**-24


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([None, 2], id="alone and on 2 ranks"),
        pytest.param([None, 1, 3, 4], id="alone and on 1, 3 and 4 ranks", marks=pytest.mark.slow),
    ],
)
def test_train_learns_on_any_number_of_ranks(launch, gpus, counts):
    first_epochs = {}
    are_seen, numbers = gpus
    for ranks in [ranks for ranks in counts if ranks in numbers]:
        result = launch(ROOT / "examples" / "train.py", ranks, gpus=are_seen, env=ONE_THREAD)
        assert (result.status, result.leftovers) == (0, [])
        first, *epochs, last = result.stdout.splitlines()
        assert first.endswith(f"replicas: {ranks or 1}")
        history = [_loss_and_accuracy(line, epoch) for epoch, line in enumerate(epochs, start=1)]
        assert len(history) == 10
        assert history[-1][0] < 0.1 and history[-1][1] > 0.97
        first_epochs[ranks] = history[0]
        match = re.fullmatch(r"test accuracy: (0\.\d{4})", last)
        assert match is not None
        assert float(match[1]) >= 0.95
        for warning in ("Warning", "Error", "Traceback"):
            assert warning not in result.stderr
    for loss, accuracy in first_epochs.values():
        assert loss == pytest.approx(first_epochs[None][0], rel=rounding(steps=23, batch_size=64))
        # Two of the 1437 images.
        assert accuracy == pytest.approx(first_epochs[None][1], abs=1.5e-3)


def _loss_and_accuracy(line, epoch):
    """The numbers in an epoch's line."""
    match = re.fullmatch(rf"epoch +{epoch}: loss (\d+\.\d+), accuracy (\d\.\d+)", line)
    assert match is not None, line
    return float(match[1]), float(match[2])


@pytest.mark.slow
def test_train_takes_batches_that_leave_replicas_empty(launch):
    """The fifth and last batch is one image.

    After so few steps no image is on the edge yet: a few units each.
    """
    options = ["--epochs", "1", "--batch-size", "359", "--learning-rate", "0.2"]
    losses = []
    for ranks in (None, 2, 4):
        result = launch(
            ROOT / "examples" / "train.py",
            ranks,
            *options,
            env={"PYTHONWARNINGS": "error,ignore:iterating over"},
        )
        assert result.status == 0
        _, epoch, _ = result.stdout.splitlines()
        losses.append(_loss_and_accuracy(epoch, 1)[0])
    assert losses == pytest.approx(3 * losses[:1], rel=rounding(steps=5, batch_size=8))


on_some_ranks = pytest.mark.parametrize(
    "counts",
    [
        pytest.param([2], id="on 2 ranks"),
        pytest.param([1, 3], id="on 1 and 3 ranks", marks=pytest.mark.slow),
    ],
)


def printed(launch, gpus, counts, name, *options):
    """An example's lines on those of these numbers of ranks that GPUs exist for, or on one."""
    are_seen, numbers = gpus
    for ranks in [ranks for ranks in counts if ranks in numbers] or [1]:
        result = launch(ROOT / "examples" / name, ranks, *options, gpus=are_seen, env=ONE_THREAD)
        assert (result.status, result.leftovers) == (0, [])
        assert "Warning" not in result.stderr
        yield result.stdout.splitlines()


def numbers_of(lines):
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


@pytest.mark.slow
@on_some_ranks
def test_kmeans(launch, gpus, counts):
    for lines in printed(launch, gpus, counts, "kmeans.py"):
        *totals, pure = numbers_of(lines)
        assert totals == sorted(totals, reverse=True)
        assert totals[-1] < 0.8 * totals[0]
        assert pure > 0.7


@on_some_ranks
def test_monte_carlo(launch, gpus, counts):
    for lines in printed(launch, gpus, counts, "monte_carlo.py", "--seed", "3"):
        plain, spread, price, narrow = (
            float(n) for line in lines for n in re.findall(r"\d+\.\d{4}", line)
        )
        assert narrow < spread / 20
        assert abs(price - 5.631) < 4 * narrow  # of 10^8 paths
        assert abs(plain - price) < 2 * spread


@pytest.mark.slow
@on_some_ranks
def test_pca(launch, gpus, counts):
    images = np.load(ROOT / "examples" / "digits.npz")["images"] / 16
    expected = np.linalg.eigvalsh(np.cov(images.T, bias=True))[::-1]
    for lines in printed(launch, gpus, counts, "pca.py"):
        found = np.reshape(numbers_of(lines[1:]), (4, 2))
        np.testing.assert_allclose(found[:, 0], expected[:4], atol=2e-6)
        np.testing.assert_allclose(found[:, 1], 100 * expected[:4] / expected.sum(), atol=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kmeans", "pca", "monte_carlo", "train"])
def test_pictures_of_the_gallery(launch, gpus, tmp_path, name):
    """docs/gallery's pictures have equal words in both colours; its commands draw on four ranks."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    svgs = [ROOT / "docs" / "gallery" / f"{name}-{page}.svg" for page in ("light", "dark")]
    assert all(svg.stat().st_size < 60_000 for svg in svgs)
    are_seen, numbers = gpus
    for ranks in [ranks for ranks in (1, 3) if ranks in numbers]:
        svgs.append(tmp_path / f"{ranks}.svg")
        env = {"MATPLOTLIBRC": str(ROOT / "docs" / "gallery" / "light.mplstyle")}
        result = launch(
            ROOT / "examples" / f"{name}.py", ranks, "--plot", svgs[-1], gpus=are_seen, env=env
        )
        assert (result.status, result.leftovers) == (0, [])
        assert "Warning" not in result.stderr
    words = [re.findall(r">([^<>\n]*[a-z][^<>\n]*)</text>", svg.read_text()) for svg in svgs]
    assert len(words[0]) >= 2
    assert words == words[:1] * len(words)


@on_some_ranks
def test_linear_regression(launch, gpus, counts):
    for lines in printed(launch, gpus, counts, "linear_regression.py"):
        *losses, worst = numbers_of(lines)
        # The noise that was added.
        assert len(losses) == 3 and losses[-1] == pytest.approx(0.01, rel=0.05)
        assert worst < 0.005


@on_some_ranks
def test_embedding(launch, gpus, counts):
    histories = [
        numbers_of(lines)
        for lines in printed(launch, gpus, counts, "embedding.py", "--epochs", "3")
    ]
    for history in histories:
        assert history == sorted(history, reverse=True) and history[-1] < 0.5 * history[0]
        assert history == pytest.approx(histories[0], rel=1e-3)


@pytest.mark.slow
def test_early_stopping_goes_on_where_it_was(launch, gpus, tmp_path):
    are_seen, numbers = gpus
    program = ROOT / "examples" / "early_stopping.py"
    whole = launch(program, 1, "--folder", tmp_path / "whole", gpus=are_seen).stdout.splitlines()
    assert re.fullmatch(r"best: epoch \d+, accuracy 0\.9[5-9]\d\d", whole[-1])
    launch(program, 1, "--folder", tmp_path / "parts", "--epochs", "3", gpus=are_seen)
    shutil.copytree(tmp_path / "parts", tmp_path / "on other ranks")
    begin, *rest = launch(
        program, 1, "--folder", tmp_path / "parts", gpus=are_seen
    ).stdout.splitlines()
    assert begin == "continues after epoch 3"
    assert rest == whole[3:]
    if 2 in numbers:
        # By rounding, an image or two of the 397 may be read differently, and the end come an epoch
        # earlier or later.
        options = "--folder", tmp_path / "on other ranks", "--epochs", "4"
        begin, epoch, _ = launch(program, 2, *options, gpus=are_seen).stdout.splitlines()
        assert begin == "continues after epoch 3" and epoch.startswith("epoch  4: ")
        assert numbers_of([epoch]) == pytest.approx(numbers_of(whole[3:4]), abs=0.0055)


# The same with PyTorch alone.
DDP = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import torch
    from mpi4py import MPI
    from torch_ddp import load_data, make_module

    comm = MPI.COMM_WORLD
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sys.argv[2]}", rank=comm.rank, world_size=comm.size
    )
    data = load_data()
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    loader = torch.utils.data.DataLoader(data, 64 // comm.size, sampler=sampler)
    module = torch.nn.parallel.DistributedDataParallel(make_module())
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)

    for epoch in range(1, 4):
        total = torch.zeros(1)
        for images, digits in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(images), digits)
            loss.backward()  # whose gradients DDP averages over the ranks
            optimizer.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        if comm.rank == 0:
            print(f"epoch {epoch}: loss {total.item() / comm.size / len(loader):.7f}")
    torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("example", ["torch_mlp.py", "torch_ddp.py"])
def test_modules_of_pytorch_learn_as_ddp_does(launch, gpus, tmp_path, example):
    are_seen, numbers = gpus
    skip_unless_it_computes("torch", are_seen)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ddp = launch(DDP, 2, ROOT / "examples", tmp_path / "ranks", env=env, timeout=60)
    expected = numbers_of(ddp.stdout.splitlines())
    assert len(expected) == 3 and expected == sorted(expected, reverse=True)
    for ranks in [ranks for ranks in (None, 2, 4) if ranks in numbers]:
        result = launch(ROOT / "examples" / example, ranks, gpus=are_seen, env=env, timeout=60)
        assert (result.status, result.stderr, result.leftovers) == (0, "", [])
        found = numbers_of(result.stdout.splitlines())
        assert found[0] == pytest.approx(expected[0], rel=rounding(steps=28, batch_size=64))
        assert found == pytest.approx(expected, rel=0.01)


# The example, interrupted by a signal to the last rank after one step.
PREEMPTED = f"""
    import os, runpy, signal, sys
    import hpcstrat as hs

    last_step = int(sys.argv.pop(1))
    step = hs.checkpoint.CheckpointManager.step

    def signal_and_step(manager):
        if manager.steps + 1 == last_step and hs.rank() == hs.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        step(manager)

    hs.checkpoint.CheckpointManager.step = signal_and_step
    runpy.run_path({str(ROOT / "examples" / "resume.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resume_ends_as_if_undisturbed(launch, gpus, tmp_path):
    are_seen, numbers = gpus
    for ranks in numbers[1::2]:
        options = ["--epochs", "3", "--checkpoint"]
        path = tmp_path / f"undisturbed {ranks}"
        undisturbed = launch(ROOT / "examples" / "resume.py", ranks, *options, path, gpus=are_seen)
        assert (undisturbed.status, undisturbed.leftovers) == (0, [])
        options.append(tmp_path / f"preempted {ranks}")
        # 29 steps are an epoch: in the first epoch, at its end, and in the second.
        for steps in (10, 29, 39):
            result = launch(PREEMPTED, ranks, str(steps), *options, gpus=are_seen)
            assert result.status == 75
        result = launch(ROOT / "examples" / "resume.py", ranks, *options, gpus=are_seen)
        assert result.status == 0
        lines = result.stdout.splitlines()
        assert lines[0] == "continues in epoch 2, after step 39"
        assert lines[-3:] == undisturbed.stdout.splitlines()[-3:]
