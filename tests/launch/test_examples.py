"""The examples run as their readers run them."""

import pathlib
import re
import shutil

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
# Next to other tests, the threads of a BLAS wait for each other for longer than they compute.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def rounding(steps, batch_size):
    """How far losses may be apart, relatively, after so few steps, if sums have another order.

    Such a sum is off by at most one rounding unit (2**-24) per element, and each step adds its own.
    Later, rounding decides the sign of a ReLU's input, and the weights take another path.
    """
    return steps * batch_size * 2.0**-24


def lines_of(place, ranks, name, *options, **env):
    """What an example prints, if it ends well and warns of nothing."""
    result = place(EXAMPLES / name, ranks, *options, env=ONE_THREAD | env)
    assert (result.status, result.leftovers) == (0, [])
    for word in ("Warning", "Error", "Traceback"):
        assert word not in result.err
    return result.out.splitlines()


def numbers_of(lines):
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


# ---- train.py


def history_of(place, ranks, *options):
    """Each epoch's loss and accuracy, and the accuracy of the test."""
    first, *epochs, last = lines_of(place, ranks, "train.py", *options)
    assert first.endswith(f"replicas: {ranks or 1}")
    history = []
    for epoch, line in enumerate(epochs, start=1):
        match = re.fullmatch(rf"epoch +{epoch}: loss (\d+\.\d+), accuracy (\d\.\d+)", line)
        assert match is not None, line
        history.append((float(match[1]), float(match[2])))
    return history, float(last.removeprefix("test accuracy: "))


def check_that_train_learns(place, *numbers):
    ((first, accuracy),), _ = history_of(place, None, "--epochs", "1")
    for ranks in place.choose(*numbers):
        history, tested = history_of(place, ranks)
        assert len(history) == 10
        assert history[-1][0] < 0.1 and history[-1][1] > 0.97 and tested >= 0.95
        assert history[0][0] == pytest.approx(first, rel=rounding(steps=23, batch_size=64))
        # Two of the 1437 images.
        assert history[0][1] == pytest.approx(accuracy, abs=1.5e-3)


def test_train_learns_on_two_ranks(place):
    check_that_train_learns(place, 2)


@pytest.mark.slow
def test_train_learns_on_any_number_of_ranks(place):
    check_that_train_learns(place, None, 1, 3, 4)


# ---- what each other prints, on any number of ranks


def check_kmeans(lines):
    *totals, pure = numbers_of(lines)
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < 0.8 * totals[0]
    assert pure > 0.7


def check_monte_carlo(lines):
    plain, spread, price, narrow = map(float, re.findall(r"\d+\.\d{4}", " ".join(lines)))
    assert narrow < spread / 20
    assert abs(price - 5.631) < 4 * narrow  # of 10^8 paths
    assert abs(plain - price) < 2 * spread


def check_pca(lines):
    images = np.load(EXAMPLES / "digits.npz")["images"] / 16
    expected = np.linalg.eigvalsh(np.cov(images.T, bias=True))[::-1]
    found = np.reshape(numbers_of(lines[1:]), (4, 2))
    np.testing.assert_allclose(found[:, 0], expected[:4], atol=2e-6)
    np.testing.assert_allclose(found[:, 1], 100 * expected[:4] / expected.sum(), atol=0.006)


def check_linear_regression(lines):
    *losses, worst = numbers_of(lines)
    # The noise that was added.
    assert len(losses) == 3 and losses[-1] == pytest.approx(0.01, rel=0.05)
    assert worst < 0.005


def check_embedding(lines):
    history = numbers_of(lines)
    assert history == sorted(history, reverse=True) and history[-1] < 0.5 * history[0]


CHECKS = {
    "kmeans.py": (check_kmeans, []),
    "monte_carlo.py": (check_monte_carlo, ["--seed", "3"]),
    "pca.py": (check_pca, []),
    "linear_regression.py": (check_linear_regression, []),
    "embedding.py": (check_embedding, ["--epochs", "3"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_example(place, name):
    check, options = CHECKS[name]
    first = None
    for ranks in place.choose(1, 2, 3):
        lines = lines_of(place, ranks, name, *options)
        check(lines)
        if name == "embedding.py":
            first = first or numbers_of(lines)
            assert numbers_of(lines) == pytest.approx(first, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kmeans", "pca", "monte_carlo", "train"])
def test_pictures_of_the_gallery(place, tmp_path, name):
    """docs/gallery's pictures have equal words in both colours; its commands draw on four ranks."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    gallery = EXAMPLES.parent / "docs" / "gallery"
    svgs = [gallery / f"{name}-{page}.svg" for page in ("light", "dark")]
    assert all(svg.stat().st_size < 60_000 for svg in svgs)
    for ranks in place.choose(1, 3):
        svgs.append(tmp_path / f"{ranks}.svg")
        style = {"MATPLOTLIBRC": str(gallery / "light.mplstyle")}
        lines_of(place, ranks, f"{name}.py", "--plot", svgs[-1], **style)
    words = [re.findall(r">([^<>\n]*[a-z][^<>\n]*)</text>", svg.read_text()) for svg in svgs]
    assert len(words[0]) >= 2
    assert words == words[:1] * len(words)


@pytest.mark.slow
@pytest.mark.parametrize("example", ["torch_mlp.py", "torch_ddp.py"])
def test_modules_of_pytorch_learn_the_same_on_any_number_of_ranks(place, example):
    place.skip_unless_it_has("torch")
    expected = numbers_of(lines_of(place, None, example))
    assert len(expected) == 3 and expected == sorted(expected, reverse=True)
    for ranks in place.choose(2, 4):
        found = numbers_of(lines_of(place, ranks, example))
        assert found[0] == pytest.approx(expected[0], rel=rounding(steps=28, batch_size=64))
        assert found == pytest.approx(expected, rel=0.01)


# ---- examples that go on where they were


@pytest.mark.slow
def test_early_stopping_goes_on_where_it_was(place, tmp_path):
    def run(ranks, folder, *options):
        return lines_of(place, ranks, "early_stopping.py", "--folder", tmp_path / folder, *options)

    whole = run(1, "whole")
    assert re.fullmatch(r"best: epoch \d+, accuracy 0\.9[5-9]\d\d", whole[-1])
    run(1, "parts", "--epochs", "3")
    shutil.copytree(tmp_path / "parts", tmp_path / "on other ranks")
    begin, *rest = run(1, "parts")
    assert begin == "continues after epoch 3"
    assert rest == whole[3:]
    if 2 in place.ranks:
        # By rounding, an image or two of the 397 may be read differently, and the end come an epoch
        # earlier or later.
        begin, epoch, _ = run(2, "on other ranks", "--epochs", "4")
        assert begin == "continues after epoch 3" and epoch.startswith("epoch  4: ")
        assert numbers_of([epoch]) == pytest.approx(numbers_of(whole[3:4]), abs=0.0055)


@pytest.mark.slow
def test_resume_ends_as_if_undisturbed(place, tmp_path):
    """Although the last rank has a signal in the first epoch, at its end, and in the second."""
    preempted = f"""
        import os, runpy, signal, sys
        import hpcstrat as hs

        last_step = int(sys.argv.pop(1))
        step = hs.checkpoint.CheckpointManager.step

        def signal_and_step(manager):
            if manager.steps + 1 == last_step and hs.rank() == hs.size() - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            step(manager)

        hs.checkpoint.CheckpointManager.step = signal_and_step
        runpy.run_path({str(EXAMPLES / "resume.py")!r}, run_name="__main__")
    """
    for ranks in place.choose(1, 3):
        options = ["--epochs", "3", "--checkpoint"]
        undisturbed = lines_of(place, ranks, "resume.py", *options, tmp_path / f"whole {ranks}")
        options.append(tmp_path / f"preempted {ranks}")
        for steps in (10, 29, 39):  # of 29 in an epoch
            assert place(preempted, ranks, steps, *options).status == 75
        lines = lines_of(place, ranks, "resume.py", *options)
        assert lines[0] == "continues in epoch 2, after step 39"
        assert lines[-3:] == undisturbed[-3:]
