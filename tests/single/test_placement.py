"""Which device each rank gets, decided from facts alone: no test here needs a GPU, or several ranks."""

import itertools

import pytest
from internals import Facts, call_named, decide, device_names

NODE = ("a", "b", "c", "d")  # the unique ids of a node's four GPUs
PAIR = NODE[:2]


def on(*gpus, hosts=None, cupy=(True,), named=None, shares=False):
    """The facts of ranks that see these GPUs: by default on one host, with CuPy, naming none."""
    size = len(gpus)
    devices = map(device_names.parse, named) if named else [None] * size
    return [*map(Facts, hosts or [0] * size, gpus, [*cupy] * size, [shares] * size, devices)]


def shown(place):
    """Such as `1/GPU:3=0d`: of worker 1, which its process knows as number 0, of unique id d."""
    device, ordinal, gpu = place
    worker = "" if device.worker is None else f"{device.worker}/"
    known = "" if ordinal is None else f"={ordinal}{gpu}"
    return f"{worker}{device.short}{known}"


PLACED = {
    "no GPUs": (on((), (), ()), {}, "CPU:0 CPU:0 CPU:0"),
    "no GPUs, and no CuPy": (on((), cupy=[False]), {}, "CPU:0"),
    "a GPU each": (on(NODE, NODE, NODE, NODE), {}, "GPU:0=0a GPU:1=1b GPU:2=2c GPU:3=3d"),
    "more GPUs than ranks": (on(NODE, NODE), {}, "GPU:0=0a GPU:1=1b"),
    "each sees its own": (on(("a",), ("b",), ("c",)), {}, "GPU:0=0a GPU:1=0b GPU:2=0c"),
    "each sees another order": (on(PAIR, ("b", "a", "c"), shares=True), {}, "GPU:0=0a GPU:1=1a"),
    "more ranks than GPUs, on request": (
        on(PAIR, PAIR, PAIR, shares=True),
        {},
        "GPU:0=0a GPU:1=1b GPU:0=0a",
    ),
    "one GPU for all, on request": (on(("a",), ("a",), shares=True), {}, "GPU:0=0a GPU:0=0a"),
    "named": (on(NODE, NODE, named=["GPU:3", "/gpu:1"]), {}, "GPU:3=3d GPU:1=1b"),
    "named, and each sees its own": (
        on(("a",), ("b",), named=["GPU:0", "GPU:1"]),
        {},
        "GPU:0=0a GPU:1=0b",
    ),
    "named as each process knows its own": (
        on(("a",), ("b",), named=["GPU:0", "GPU:0"]),
        {},
        "GPU:0=0a GPU:0=0b",
    ),
    "one GPU named twice, on request": (
        on(PAIR, PAIR, named=["GPU:1", "GPU:1"], shares=True),
        {},
        "GPU:1=1b GPU:1=1b",
    ),
    "CPUs named": (on((), (), cupy=[False], named=["CPU:0", "cpu:0"]), {}, "CPU:0 CPU:0"),
    "a GPU each on two hosts": (
        on(PAIR, PAIR, ("c", "d"), ("c", "d"), hosts=[0, 0, 1, 1]),
        {"is_one_host": False},
        "0/GPU:0=0a 0/GPU:1=1b 1/GPU:0=0c 1/GPU:1=1d",
    ),
    "ranks on hosts in turn": (
        on(("a",), ("c",), ("b",), ("d",), hosts=[0, 1, 0, 1]),
        {"is_one_host": False},
        "0/GPU:0=0a 1/GPU:0=0c 0/GPU:1=0b 1/GPU:1=0d",
    ),
    "hosts without GPUs": (on((), (), hosts=[0, 1]), {"is_one_host": False}, "0/CPU:0 1/CPU:0"),
    "one host of a strategy for several": (on(PAIR), {"is_one_host": False}, "0/GPU:0=0a"),
}


@pytest.mark.parametrize("facts, options, expected", PLACED.values(), ids=PLACED)
def test_each_rank_gets_a_device(facts, options, expected):
    assert " ".join(map(shown, decide(facts, **options))) == expected


REFUSED = {
    "several hosts": (
        on((), (), (), hosts=[0, 1, 1]),
        {},
        RuntimeError,
        "^call has one worker, but the 3 ranks run on 2 hosts; .*MultiWorkerMirroredStrategy",
    ),
    "more ranks than GPUs": (
        on(PAIR, PAIR, PAIR),
        {},
        RuntimeError,
        "^call: 3 ranks run on a host with 2 GPUs, .*start 2 ranks, .*launch/share-gpu mpirun -n 3",
    ),
    "two ranks and one GPU": (
        on(("a",), ("a",)),
        {},
        RuntimeError,
        "^call: 2 ranks run on a host with 1 GPU, .*start 1 rank, or",
    ),
    "more ranks than GPUs on one of two hosts": (
        on(PAIR, ("c",), ("c",), hosts=[0, 1, 1]),
        {"is_one_host": False},
        RuntimeError,
        "^call: 2 ranks run on a host with 1 GPU, ",
    ),
    "one GPU in two places": (
        on(PAIR, ("b", "a")),
        {},
        RuntimeError,
        "^call: ranks 0, 1 would compute on one GPU, 1 for 2 ranks; name a GPU for each",
    ),
    "one GPU named twice": (
        on(PAIR, PAIR, PAIR, named=["GPU:0", "GPU:1", "GPU:0"]),
        {},
        RuntimeError,
        "^call: ranks 0, 2 would compute on one GPU, 2 for 3 ranks; .*launch/share-gpu mpirun -n 3",
    ),
    "GPUs on some ranks": (
        on(NODE, ()),
        {},
        RuntimeError,
        "^call: .* on GPUs and on CPUs: GPU:0 on rank 0; CPU:0 on rank 1; .*'CPU:0' for each",
    ),
    "GPUs on one of two hosts": (
        on(NODE, (), hosts=[0, 1]),
        {"is_one_host": False},
        RuntimeError,
        "on GPUs and on CPUs",
    ),
    "GPUs and CPUs named": (
        on(NODE, NODE, named=["CPU:0", "GPU:1"]),
        {},
        ValueError,
        "on GPUs and on CPUs: .*parameter_device='CPU:0'",
    ),
    "no such GPU": (
        on(NODE, ("a",), named=["GPU:0", "GPU:2"]),
        {},
        RuntimeError,
        r"^call: there is no GPU:2; the process of rank 1 sees 1 GPU\. .*CUDA_VISIBLE_DEVICES",
    ),
    "no GPU": (on((), named=["GPU:0"]), {}, RuntimeError, "no GPU:0; .* rank 0 sees no GPUs"),
    "another's own GPU": (
        on(("a",), ("b",), named=["GPU:0", "GPU:2"]),
        {},
        RuntimeError,
        "no GPU:2; .* rank 1 sees 1 GPU",
    ),
    "GPUs without CuPy": (
        on(PAIR, PAIR, cupy=[False]),
        {},
        RuntimeError,
        r"^call: there are GPUs, and CuPy, .* not installed for ranks 0, 1: `pip .*\.\[cuda12\].*"
        r"compute_devices=\['CPU:0'",
    ),
    "CuPy on the other ranks": (
        on(PAIR, PAIR, cupy=[True, False]),
        {},
        RuntimeError,
        "not installed for rank 1: ",
    ),
    "GPUs named without CuPy": (
        on((), (), cupy=[False], named=["GPU:0", "GPU:1"]),
        {},
        RuntimeError,
        r"GPU:0 needs CuPy, .* not installed for ranks 0, 1: `pip install '\.\[cuda12\]'",
    ),
}


@pytest.mark.parametrize("facts, options, error, text", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_placed_is_refused(facts, options, error, text):
    with call_named("call"), pytest.raises(error, match=text) as caught:
        decide(facts, **options)
    assert caught.type is error


def test_no_two_ranks_share_a_gpu_unasked():
    """Whatever each of three ranks sees: an error, or three GPUs, or three CPUs."""
    views = [(), ("a",), ("b",), PAIR, ("b", "a"), NODE]
    placed = 0
    for seen in itertools.product(views, repeat=3):
        try:
            places = decide(on(*seen))
        except RuntimeError:
            continue
        gpus = [place.gpu for place in places]
        assert gpus == [""] * 3 or len({*gpus} - {""}) == 3
        assert all(
            not place.gpu or view[place.ordinal] == place.gpu
            for place, view in zip(places, seen, strict=True)
        )
        placed += 1
    assert placed > 5
