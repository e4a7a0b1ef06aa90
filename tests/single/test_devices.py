"""Names of devices, and which device each rank gets, decided from facts alone: needs no GPU."""

import itertools
import types
from typing import Any

import numpy as np
import pytest
from internals import Facts, call_named, decide, device_names
from internals import gpu as gpus


@pytest.fixture(autouse=True)
def in_a_call():
    with call_named("call"):
        yield


def gpu(number):
    return device_names.Device("GPU", number)


@pytest.mark.parametrize("kind", ["CPU", "GPU", "cpu", "Gpu"])
@pytest.mark.parametrize("number", [0, 12])
def test_every_form_of_a_device(kind, number):
    whole = "/job:localhost/replica:0/task:0/device:"
    for form in ("{}:{}", "/{}:{}", "/device:{}:{}", whole + "{}:{}"):
        device = device_names.parse(form.format(kind, number))
        assert device == device_names.Device(kind.upper(), number)
        assert str(device) == f"{whole}{kind.upper()}:{number}"


WRONG = ["", "CPU", "CPU:", ":0", "GPU:-1", "GPU:x", "GPU:0.5", "TPU:0", "GPU 0", " GPU:0"]
WRONG += ["GPU:0\n", "//GPU:0", "device:GPU:0/", "/device:GPU:0:1", "/job:worker/device:GPU:0"]
WRONG += ["/job:localhost/replica:1/GPU:0", None, 0, b"GPU:0", ["GPU:0"], ("GPU", 0)]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_no_device(wrong):
    with pytest.raises(ValueError, match=r"^call: .* is not a device; write 'CPU:0', 'GPU:1'"):
        device_names.parse(wrong)


def test_devices_that_are_named():
    assert device_names.parse_all(None, 3) is None
    assert device_names.parse_all(["CPU:0", "/gpu:1"], 2) == [device_names.CPU, gpu(1)]
    for named, ranks, error, facts in [
        (["CPU:0"], 2, ValueError, "call: 1 compute devices .* 2 ranks.*`mpirun -n 1`"),
        ("CPU:0", 5, TypeError, r"call: the string 'CPU:0' .*\['CPU:0'\]"),
        (["CPU:0", "X:0"], 2, ValueError, "'X:0' is not a device"),
        (["CPU:0", "CPU:1"], 2, ValueError, "call: there is no CPU:1; use 'CPU:0'"),
    ]:
        with pytest.raises(error, match=facts):
            device_names.parse_all(named, ranks)


def test_the_arrays_of_a_device(monkeypatch):
    assert device_names.CPU.xp is np
    monkeypatch.setattr(gpus, "has_cupy", lambda: False)
    with pytest.raises(RuntimeError, match=r"GPU:0 needs CuPy, .*\.\[cuda12\]"):
        _ = gpu(0).xp


@pytest.mark.parametrize("status", [0, 700])
def test_a_wait_for_an_event_looks_and_sleeps(monkeypatch, status):
    def fail():
        raise RuntimeError("an illegal address")

    seen, answers = [], iter([600, 600, status])
    monkeypatch.setattr(gpus, "_event_query", lambda: lambda at: seen.append(at) or next(answers))
    monkeypatch.setattr(gpus, "time", types.SimpleNamespace(sleep=seen.append))
    event = types.SimpleNamespace(ptr=17, synchronize=fail)
    if status:
        with pytest.raises(RuntimeError, match="an illegal address"):
            gpus.wait_for(event, pause=0.25)
    else:
        gpus.wait_for(event, pause=0.25)
    assert seen == [17, 0.25, 17, 0.25, 17]


# ---- which rank gets which

NODE = ("a", "b", "c", "d")  # the unique ids of a node's four GPUs
PAIR = NODE[:2]
A, B, C, D = [(one,) for one in NODE]


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
    "no GPUs": (on((), (), ()), "CPU:0 CPU:0 CPU:0"),
    "no GPUs, and no CuPy": (on((), cupy=[False]), "CPU:0"),
    "a GPU each": (on(NODE, NODE, NODE, NODE), "GPU:0=0a GPU:1=1b GPU:2=2c GPU:3=3d"),
    "each sees its own": (on(A, B, C), "GPU:0=0a GPU:1=0b GPU:2=0c"),
    "each sees another order": (on(PAIR, ("b", "a", "c"), shares=True), "GPU:0=0a GPU:1=1a"),
    "more ranks, on request": (on(PAIR, PAIR, PAIR, shares=True), "GPU:0=0a GPU:1=1b GPU:0=0a"),
    "named": (on(NODE, NODE, named=["GPU:3", "/gpu:1"]), "GPU:3=3d GPU:1=1b"),
    "named as each process knows it": (on(A, B, named=["GPU:0", "GPU:0"]), "GPU:0=0a GPU:0=0b"),
    "one named twice, on request": (
        on(PAIR, PAIR, named=["GPU:1", "GPU:1"], shares=True),
        "GPU:1=1b GPU:1=1b",
    ),
    "CPUs named": (on((), (), cupy=[False], named=["CPU:0", "cpu:0"]), "CPU:0 CPU:0"),
}
# Of a strategy for several hosts.
ON_HOSTS = {
    "hosts with a GPU each": (
        on(PAIR, PAIR, NODE[2:], NODE[2:], hosts=[0, 0, 1, 1]),
        "0/GPU:0=0a 0/GPU:1=1b 1/GPU:0=0c 1/GPU:1=1d",
    ),
    "ranks on hosts in turn": (
        on(A, C, B, D, hosts=[0, 1, 0, 1]),
        "0/GPU:0=0a 1/GPU:0=0c 0/GPU:1=0b 1/GPU:1=0d",
    ),
    "one host": (on(PAIR), "0/GPU:0=0a"),
}


@pytest.mark.parametrize("name", [*PLACED, *ON_HOSTS])
def test_each_rank_gets_a_device(name):
    facts, expected = (PLACED | ON_HOSTS)[name]
    places = decide(facts, **({"is_one_host": False} if name in ON_HOSTS else {}))
    assert " ".join(map(shown, places)) == expected


MIXED = "on GPUs and on CPUs"
REFUSED = {
    "several hosts": (
        on((), (), (), hosts=[0, 1, 1]),
        "^call has one worker.* 3 ranks run on 2 hosts.*MultiWorkerMirroredStrategy",
    ),
    "more ranks than GPUs": (
        on(PAIR, PAIR, PAIR),
        "^call: 3 ranks .* 2 GPUs, .*start 2 ranks, .*launch/share-gpu mpirun -n 3",
    ),
    "one GPU in two places": (
        on(PAIR, ("b", "a")),
        "^call: ranks 0, 1 .* one GPU, 1 for 2 ranks; name a GPU for each",
    ),
    "one GPU named twice": (
        on(PAIR, PAIR, PAIR, named=["GPU:0", "GPU:1", "GPU:0"]),
        "^call: ranks 0, 2 .* one GPU, 2 for 3 ranks; .*launch/share-gpu mpirun -n 3",
    ),
    "GPUs on some ranks": (
        on(NODE, ()),
        f"^call: .* {MIXED}: GPU:0 on rank 0; CPU:0 on rank 1; .*'CPU:0' for each",
    ),
    "GPUs and CPUs named": (
        on(NODE, NODE, named=["CPU:0", "GPU:1"]),
        f"^call: .*{MIXED}: .*parameter_device='CPU:0'",
    ),
    "no such GPU": (
        on(NODE, A, named=["GPU:0", "GPU:2"]),
        "^call: there is no GPU:2; .* rank 1 sees 1 GPU.*CUDA_VISIBLE_DEVICES",
    ),
    "no GPU": (on((), named=["GPU:0"]), "no GPU:0; .* rank 0 sees no GPUs"),
    "GPUs without CuPy": (
        on(PAIR, PAIR, cupy=[False]),
        r"^call: there are GPUs.*CuPy.* ranks 0, 1: `pip .*\.\[cuda12\].*compute_devices=\['CPU:0'",
    ),
    "GPUs named without CuPy": (
        on((), (), cupy=[False], named=["GPU:0", "GPU:1"]),
        r"GPU:0 needs CuPy, .* not installed for ranks 0, 1: `pip install '\.\[cuda12\]'",
    ),
}
REFUSED_ON_HOSTS = {
    "more ranks than GPUs on one": (on(PAIR, C, C, hosts=[0, 1, 1]), "^call: 2 ranks .* 1 GPU, "),
    "GPUs on one of two": (on(NODE, (), hosts=[0, 1]), MIXED),
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_ON_HOSTS])
def test_what_cannot_be_placed_is_refused(name):
    facts, text = (REFUSED | REFUSED_ON_HOSTS)[name]
    error = ValueError if name == "GPUs and CPUs named" else RuntimeError
    with pytest.raises(error, match=text) as caught:
        decide(facts, **({"is_one_host": False} if name in REFUSED_ON_HOSTS else {}))
    assert caught.type is error


def test_no_two_ranks_share_a_gpu_unasked():
    """Whatever each of three ranks sees: an error, or three GPUs, or three CPUs."""
    views: list[Any] = [(), A, B, PAIR, ("b", "a"), NODE]
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
