import importlib.util

import numpy as np
import pytest

from hpcstrat import _devices


@pytest.mark.parametrize("kind", ["CPU", "GPU", "cpu", "gpu", "Gpu"])
@pytest.mark.parametrize("number", [0, 1, 12])
def test_every_form_of_a_device(kind, number):
    canonical = f"/job:localhost/replica:0/task:0/device:{kind.upper()}:{number}"
    for form in ("{}:{}", "/{}:{}", "/device:{}:{}", "/job:localhost/replica:0/task:0/device:{}:{}"):
        device = _devices.parse(form.format(kind, number), "call")
        assert str(device) == canonical
        assert device == _devices.Device(kind.upper(), number)


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "CPU", "CPU:", ":0", "GPU:-1", "GPU:x", "GPU:0.5", "TPU:0", "GPU 0", " GPU:0", "GPU:0 ", "GPU:0\n"),
        *("//GPU:0", "device:GPU:0/", "/device:GPU:0:1", "/job:worker/device:GPU:0", "/job:localhost/replica:1/GPU:0"),
        *(None, 0, b"GPU:0", ["GPU:0"], ("GPU", 0)),
    ],
)
def test_what_is_no_device(wrong):
    with pytest.raises(ValueError, match=r"^some_call: .* is not a device; write 'CPU:0', 'GPU:1'"):
        _devices.parse(wrong, "some_call")


def test_devices_of_ranks():
    assert _devices.place(None, 3, "call") == [_devices.CPU] * 3
    assert _devices.place(["CPU:0", "/gpu:1"], 2, "call") == [_devices.CPU, _devices.Device("GPU", 1)]
    with pytest.raises(ValueError, match="call: 1 compute devices were named and 2 ranks run; .*`mpirun -n 1`"):
        _devices.place(["CPU:0"], 2, "call")
    with pytest.raises(TypeError, match=r"call: compute_devices is the string 'CPU:0'; pass a list .*\['CPU:0'\]"):
        _devices.place("CPU:0", 5, "call")
    with pytest.raises(ValueError, match="'X:0' is not a device"):
        _devices.place(["CPU:0", "X:0"], 2, "call")


def test_there_is_one_cpu():
    _devices.check_present(_devices.CPU, "call")
    assert _devices.CPU.array_module is np
    with pytest.raises(ValueError, match="call: there is no CPU:1"):
        _devices.check_present(_devices.Device("CPU", 1), "call")


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_a_gpu_without_cupy():
    gpu = _devices.Device("GPU", 0)
    for wrong in (lambda: _devices.check_present(gpu, "call"), lambda: gpu.array_module):
        with pytest.raises(RuntimeError, match=r"GPU:0 needs CuPy, .*hpcstrat\[cuda12\]"):
            wrong()
