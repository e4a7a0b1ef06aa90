import importlib.util
import types

import numpy as np
import pytest
from internals import call_named, device_names
from internals import gpu as gpus


@pytest.fixture(autouse=True)
def in_a_call():
    with call_named("call"):
        yield


@pytest.mark.parametrize("kind", ["CPU", "GPU", "cpu", "gpu", "Gpu"])
@pytest.mark.parametrize("number", [0, 1, 12])
def test_every_form_of_a_device(kind, number):
    canonical = f"/job:localhost/replica:0/task:0/device:{kind.upper()}:{number}"
    for form in (
        "{}:{}",
        "/{}:{}",
        "/device:{}:{}",
        "/job:localhost/replica:0/task:0/device:{}:{}",
    ):
        device = device_names.parse(form.format(kind, number))
        assert str(device) == canonical
        assert device == device_names.Device(kind.upper(), number)


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "",
            "CPU",
            "CPU:",
            ":0",
            "GPU:-1",
            "GPU:x",
            "GPU:0.5",
            "TPU:0",
            "GPU 0",
            " GPU:0",
            "GPU:0 ",
            "GPU:0\n",
        ),
        *(
            "//GPU:0",
            "device:GPU:0/",
            "/device:GPU:0:1",
            "/job:worker/device:GPU:0",
            "/job:localhost/replica:1/GPU:0",
        ),
        *(None, 0, b"GPU:0", ["GPU:0"], ("GPU", 0)),
    ],
    ids=repr,
)
def test_what_is_no_device(wrong):
    with pytest.raises(ValueError, match=r"^call: .* is not a device; write 'CPU:0', 'GPU:1'"):
        device_names.parse(wrong)


def test_devices_that_are_named():
    assert device_names.parse_all(None, 3) is None
    assert device_names.parse_all(["CPU:0", "/gpu:1"], 2) == [device_names.CPU, gpu(1)]
    with pytest.raises(
        ValueError, match="call: 1 compute devices were named and 2 ranks run; .*`mpirun -n 1`"
    ):
        device_names.parse_all(["CPU:0"], 2)
    with pytest.raises(
        TypeError,
        match=r"call: the string 'CPU:0' is not a list of devices; pass one .*\['CPU:0'\]",
    ):
        device_names.parse_all("CPU:0", 5)
    with pytest.raises(ValueError, match="'X:0' is not a device"):
        device_names.parse_all(["CPU:0", "X:0"], 2)


def gpu(number):
    return device_names.Device("GPU", number)


NODE = ["a", "b", "c", "d"]  # the unique ids of a node's four GPUs


def test_each_rank_gets_a_gpu_of_the_host():
    assert device_names.place([[]] * 3, False) == [device_names.CPU] * 3
    assert device_names.place([NODE] * 4, False) == [gpu(0), gpu(1), gpu(2), gpu(3)]
    assert device_names.place([NODE] * 2, False) == [gpu(0), gpu(1)]


def test_a_launcher_may_show_each_rank_one_gpu():
    seen = [[one] for one in NODE]
    placed = device_names.place(seen, False)
    assert placed == [gpu(0), gpu(1), gpu(2), gpu(3)]  # by different names
    if importlib.util.find_spec("cupy") is not None:
        assert [device_names.ordinal(one, rank, seen) for rank, one in enumerate(placed)] == [0] * 4


def test_more_ranks_than_gpus():
    with pytest.raises(
        RuntimeError,
        match=r"^call: 3 ranks run on a host with 2 GPUs, .*start 2 ranks, .*launch/share-gpu mpirun -n 3",
    ):
        device_names.place([["a", "b"]] * 3, False)
    with pytest.raises(
        RuntimeError, match=r"^call: 2 ranks run on a host with 1 GPU, .*start 1 rank, or"
    ):
        device_names.place([["a"]] * 2, False)
    assert device_names.place([["a", "b"]] * 3, True) == [gpu(0), gpu(1), gpu(0)]


def test_two_ranks_on_one_gpu():
    device_names.check_shared(["a", "b", ""], False)
    device_names.check_shared(["a", "b", "a"], True)
    with pytest.raises(
        RuntimeError, match="^call: ranks 0, 2 would compute on one GPU, 2 for 3 ranks; .*share-gpu"
    ):
        device_names.check_shared(["a", "b", "a"], False)


def test_there_is_one_cpu():
    assert device_names.ordinal(device_names.CPU, 0, [[]]) is None
    assert device_names.CPU.xp is np
    with pytest.raises(ValueError, match="call: there is no CPU:1"):
        device_names.ordinal(device_names.Device("CPU", 1), 0, [[]])


def test_a_gpu_without_cupy(monkeypatch):
    monkeypatch.setattr(device_names.gpu, "has_cupy", lambda: False)
    for wrong in (lambda: device_names.ordinal(gpu(0), 0, [["a"]]), lambda: gpu(0).xp):
        with pytest.raises(RuntimeError, match=r"GPU:0 needs CuPy, .*\.\[cuda12\]"):
            wrong()


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(device_names.gpu, "load_cupy", lambda wanted_by: None)
    with pytest.raises(
        RuntimeError,
        match=r"^call: there is no GPU:1; this process sees 1 GPU\. .*CUDA_VISIBLE_DEVICES",
    ):
        device_names.ordinal(gpu(1), 0, [["a"]])
    with pytest.raises(RuntimeError, match="^call: there is no GPU:0; this process sees no GPUs"):
        device_names.ordinal(gpu(0), 0, [[]])


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
