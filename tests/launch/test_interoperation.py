"""Programs with PyTorch or JAX: the documentation's, and DataLoaders with worker processes."""

import pathlib
import re

import pytest
from launcher import skip_unless_it_computes

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "interoperation.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
ENV = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
ON_GPUS = {"JAX_PLATFORMS": None, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def numbers_of(text):
    return [float(number) for number in text.split()]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_programs_of_the_documentation(launch, gpus, library):
    are_seen, numbers = gpus
    skip_unless_it_computes(library, are_seen)
    (program,) = [program for program in PROGRAMS if f"import {library}\n" in program]
    env = ENV | ON_GPUS if are_seen else ENV
    results = [
        launch(program, ranks, gpus=are_seen, env=env, timeout=60)
        for ranks in (1, 2, 3)
        if ranks in numbers
    ]
    for result in results:
        assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    first, *others = [numbers_of(result.stdout) for result in results]
    assert len(first) > 2 and first[-1] < first[0] / 2
    for other in others:
        assert other == pytest.approx(first, rel=1e-3, abs=2e-4)


WORKERS = """
    import sys
    import warnings

    import numpy as np
    import torch

    import hpcstrat as hs

    warnings.filterwarnings("ignore", ".*use of fork.*")  # of Python 3.12 and later
    warnings.filterwarnings("ignore", "iterating over .* have no")  # the last batch has two numbers


    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 50

        def __getitem__(self, i):
            return np.float32(i), torch.utils.data.get_worker_info().id


    strategy = hs.CentralStorageStrategy()
    generator = torch.Generator().manual_seed(0) if sys.argv[1] == "seeded" else None
    loader = torch.utils.data.DataLoader(
        Numbers(), 8, shuffle=True, num_workers=2, generator=generator, persistent_workers=sys.argv[2] == "persistent"
    )
    for epoch in range(2):
        found = [strategy.gather(batch, 0) for batch in strategy.experimental_distribute_dataset(loader)]
        numbers = np.concatenate([x for x, _ in found])
        workers = np.concatenate([worker for _, worker in found])
        print(len(found), sorted(numbers) == list(range(50)), list(numbers) == list(range(50)), set(workers.tolist()))
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["persistent", "anew"])
def test_loaders_with_workers(launch, ranks, kind):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    result = launch(WORKERS, ranks, "seeded", kind, env=ENV, timeout=90)
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert result.stdout.splitlines() == ["7 True False {0, 1}"] * 2


def test_loaders_with_workers_end_where_the_orders_differ(launch):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    result = launch(WORKERS, 3, "unseeded", "anew", env=ENV, timeout=90)
    assert result.status != 0 and result.leftovers == []
    assert (
        "ReplicaMismatchError: iterating over Strategy.experimental_distribute_dataset: the ranks "
        "have" in result.stderr
    )
    assert "generator=torch.Generator().manual_seed(0)" in result.stderr


TRAINING = """
    import torch

    import hpcstrat as hs

    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    hs.torch.broadcast(module)


    def train(steps, harm):
        for _ in range(steps):
            optimizer.zero_grad()
            module(torch.ones(3, 2)).sum().backward()
            hs.torch.all_reduce_gradients("MEAN", module)
            optimizer.step()
            if hs.rank() == 1:
                harm()


    def add():
        module.weight.data += 1


    def fail():
        raise ZeroDivisionError("of this rank alone")


    steps = 3
    HARM
    hs.CentralStorageStrategy().run(train, args=(steps, harm))
    hs.barrier()
"""


@pytest.mark.parametrize(
    "harm, env, message",
    [
        (
            "harm, steps = int, 3 + hs.rank()",
            {},
            "ranks 1, 2: all_reduce_gradients(MEAN, weight, bias, int32 as float64)",
        ),
        ("harm = fail", {}, "ZeroDivisionError: of this rank alone"),
        ("harm = add", {"HPCSTRAT_CHECK": "1"}, "equal after hs.torch.broadcast"),
    ],
    ids=["one step more", "exception", "other parameters"],
)
def test_ranks_that_train_differently_end(launch, harm, env, message):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    result = launch(TRAINING.replace("HARM", harm), 3, env=ENV | env, timeout=60)
    assert result.status != 0 and result.leftovers == []
    assert message in result.stderr


BROADCAST = """
    import torch

    import hpcstrat as hs

    module = torch.nn.Sequential(*[torch.nn.Linear(2, 1) for _ in range(3)])
    taken = getattr(torch.Tensor, CALL)
    calls = []


    def interrupted(tensor, *values):
        calls.append(taken(tensor, *values))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return calls[-1]


    if hs.rank() == INTERRUPTED:
        setattr(torch.Tensor, CALL, interrupted)
    try:
        hs.torch.broadcast(module)
    except KeyboardInterrupt:
        pass
    hs.torch.broadcast(module)
    print("unreachable")
"""


@pytest.mark.parametrize("call, interrupted", [("cpu", 0), ("copy_", 2)])
def test_a_broadcast_that_is_interrupted_on_one_rank_ends_the_job(launch, call, interrupted):
    """Although the program goes on: of its module only a part is rank 0's."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    program = BROADCAST.replace("CALL", repr(call)).replace("INTERRUPTED", str(interrupted))
    result = launch(program, 3, env=ENV, timeout=60)
    assert result.status != 0 and result.leftovers == []
    assert f"raised in a call on rank {interrupted} and was caught, but other" in result.stderr
    assert result.stdout == ""
