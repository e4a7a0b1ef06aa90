"""A substitute for PyTorch on GPUs."""

import types

import numpy as np


class Torch:
    """Stands in for the module `torch`, which does not know simulated GPUs.

    Its tensors are over CuPy's memory. As in PyTorch, the current GPU is CUDA's, and each GPU has
    its own current stream, which nothing orders with CuPy's. `streams` may be passed by pointers.
    """

    uint8 = np.uint8

    def __init__(self, cupy, *streams):
        self.cupy, self.Tensor, self._own = cupy, Tensor, {}
        self._by_pointer = {stream.ptr: stream for stream in streams}
        self.cuda = types.SimpleNamespace(
            current_stream=self._current_stream, ExternalStream=self._external_stream
        )

    def _current_stream(self, device=None):
        device = self.cupy.cuda.Device().id if device is None else device
        if device not in self._own:
            with self.cupy.cuda.Device(device):
                made = self._own[device] = TorchStream(
                    self.cupy, self.cupy.cuda.Stream(non_blocking=True), device
                )
                self._by_pointer[made.cuda_stream] = made.raw
        return self._own[device]

    def _external_stream(self, pointer, device=None):
        device = self.cupy.cuda.Device().id if device is None else device
        return TorchStream(self.cupy, self._by_pointer[pointer], device)

    def from_dlpack(self, array):
        """PyTorch's, whose tensor keeps the exporter of the memory alive."""
        stream = self._current_stream(array.__dlpack_device__()[1])
        capsule, device = array.__dlpack__(stream=stream.cuda_stream), array.__dlpack_device__()
        exported = types.SimpleNamespace(
            __dlpack__=lambda **_: capsule, __dlpack_device__=lambda: device
        )
        return Tensor(self, self.cupy.from_dlpack(exported))

    def full(self, shape, value, gpu):
        """A tensor that the current stream of a GPU writes."""
        with self.cupy.cuda.Device(gpu), self._current_stream(gpu).raw:
            return Tensor(self, self.cupy.full(shape, value))


class TorchStream:
    """PyTorch's stream, on a given GPU."""

    def __init__(self, cupy, raw, device):
        self.cupy, self.raw, self.device, self.cuda_stream = cupy, raw, device, raw.ptr

    def wait_stream(self, other):
        """PyTorch's: an event of the other stream's GPU is recorded there, and waited for here."""
        with self.cupy.cuda.Device(other.device):
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(other.raw)
        with self.cupy.cuda.Device(self.device):
            self.raw.wait_event(event)


class Tensor:
    """PyTorch's on a GPU."""

    is_cuda, is_sparse, requires_grad, grad = True, False, True, None

    def __init__(self, torch, data):
        self.torch, self.data = torch, data
        self.device = types.SimpleNamespace(type="cuda", index=data.data.device_id)

    def detach(self):
        return Tensor(self.torch, self.data)

    def contiguous(self):
        return self

    def cpu(self):
        """A copy on the host, with the methods that a tensor needs there."""
        found = types.SimpleNamespace(numpy=lambda: host.view(np.uint8))
        found.contiguous = found.reshape = found.view = lambda *_: found
        with self.data.device, self.torch.cuda.current_stream(self.device.index).raw as stream:
            host = self.data.get(stream).reshape(-1)
        return found

    def tolist(self):
        return self.cpu().numpy().view(self.data.dtype).tolist()  # flat

    def __mul__(self, number):
        with self.data.device, self.torch.cuda.current_stream(self.device.index).raw:
            return Tensor(self.torch, self.data * number)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()

    def __dlpack__(self, *, stream, **_):
        """PyTorch's, which refuses GPUs other than the current one."""
        if self.device.index != self.torch.cupy.cuda.Device().id:
            raise BufferError("Can't export tensors on a different CUDA device index")
        self.torch.cuda.ExternalStream(stream).wait_stream(self.torch.cuda.current_stream())
        return self.data.__dlpack__(stream=-1)
