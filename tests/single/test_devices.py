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
    with pytest.raises(ValueError, match="call: there is no CPU:1; use 'CPU:0'"):
        device_names.parse_all(["CPU:0", "CPU:1"], 2)


def gpu(number):
    return device_names.Device("GPU", number)


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
