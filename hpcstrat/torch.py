"""PyTorch modules on the replicas of a strategy: what `DistributedDataParallel` does, call by call.

Each replica has its own module and optimizer, PyTorch's. They stay equal because they start equal
(`broadcast`) and make the same steps (`all_reduce_gradients`). Without PyTorch every call raises
`ImportError`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement import records
from hpcstrat._core import arrays, call_name, gpu, nests
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory import layout as layouts
from hpcstrat._memory import packing
from hpcstrat._replicas import contexts
from hpcstrat._replicas import group as groups
from hpcstrat._storage import parts
from hpcstrat._strategies import base as strategies
from hpcstrat._transports import connection, verbs
from hpcstrat._variable.variable import Variable

# The modules whose parameters were found equal on all ranks.
_compared: weakref.WeakSet[Any] = weakref.WeakSet()


@call_name.names_call("device")
def device(strategy: strategies.Strategy) -> Any:
    """The `torch.device` of this rank's replica: its GPU, or the CPU.

    Never communicates.

    A replica's part of the batches is there, so move its module there too, before the first step:
    `module.to(hs.torch.device(strategy))`.

    Args:
        strategy: any strategy.

    Raises:
        TypeError: `strategy` is not a strategy.
    """
    if not isinstance(strategy, strategies.Strategy):
        raise TypeError(
            f"{call_name.current_call()}: strategy is of type {type(strategy).__name__}; pass a "
            "strategy"
        )
    stream = strategy.replica_group.stream
    return _torch().device("cpu") if stream is None else _torch().device("cuda", stream.ordinal)


@call_name.names_call("as_tensors")
def as_tensors(nest: Any) -> Any:
    """The arrays and variables of a nest as tensors over the same memory, on the CPU or a GPU.

    Never communicates.

    For batches, and for variables in replica functions (elsewhere they are copied). A tensor over a
    variable changes with it, and must not be written to. It requires a gradient if the variable is
    trainable and of a floating dtype.

    Args:
        nest: a nest of arrays and variables; other leaves stay as they are.

    Raises:
        TypeError: PyTorch has no such dtype.
    """
    return nests.map_leaves(functools.partial(_as_tensor, _torch()), nest)


@call_name.names_call("broadcast")
def broadcast(module: Any) -> None:
    """Sets the parameters and buffers of a module to rank 0's, in place.

    Collective: all ranks call this, anywhere.

    Call it before the first step. From then on buffers, such as the running statistics of
    BatchNorm, differ between replicas: call it again before an evaluation or a save, or set them to
    their means. `DistributedDataParallel` broadcasts buffers before each forward pass instead.

    Tensors travel one at a time: beside the module a rank needs memory for the largest.

    Args:
        module: a `torch.nn.Module`, of equal structure on all ranks.

    Raises:
        TypeError: `module` is not a module, or a tensor of it is sparse or on the meta device.
        ReplicaMismatchError: names, shapes or dtypes differ between ranks; nothing has changed.
    """
    communicator = connection.connect()
    with communicator.raise_together():
        _check_module(module)
        torch = _torch()
        named = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in named:
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise TypeError(
                    f"{call_name.current_call()}: {name} is a {tensor.layout} tensor on "
                    f"{tensor.device}; make it a dense one on the CPU or a GPU"
                )
        described = tuple(
            [f"{name} ({tensor.dtype} of shape {tuple(tensor.shape)})" for name, tensor in named]
        )
        communicator.exchange(
            records.signature_of(call_name.current_call(), records.ManyValues(described))
        )
        for _, tensor in named:
            if tensor.numel():  # PyTorch views no empty bytes as another dtype
                values = torch.from_numpy(_of_rank_0(communicator, tensor))
                tensor.detach().copy_(values.view(tensor.dtype).view(tensor.shape))


@call_name.names_call("all_reduce_gradients")
def all_reduce_gradients(reduce_op: ReduceOp | str, module: Any) -> None:
    """Reduces the gradients of a module over all replicas, in one message.

    Collective: all replicas call this.

    Call it after `backward` (after the last one where gradients accumulate) and before the
    optimizer's step, or clipping. A parameter whose `grad` is None counts as zeros if another
    replica has a gradient; if none has, it stays None. Parameters that require no gradient are
    skipped. All replicas get the same bits, in every run.

    Args:
        reduce_op: `"MEAN"` for a loss that is the mean over the replica's part of the batch, as
            with `DistributedDataParallel`; all parts weigh the same. `"SUM"` for a loss that is
            divided by the size of the global batch, as by `hpcstrat.losses.compute_average_loss`;
            exact for parts of any sizes.
        module: a `torch.nn.Module`, of equal structure on all replicas.

    Raises:
        RuntimeError: called outside of a replica function.
        ValueError: `reduce_op` is another operation.
        TypeError: `module` is not a module; or a gradient is sparse, of a dtype that cannot be
            reduced, or neither on the CPU nor on the GPU of a strategy on GPUs.
        ReplicaMismatchError: the parameters that require gradients differ between replicas; or
            their values do, which the first call with a module compares, and every call with
            `HPCSTRAT_CHECK=1`.
    """
    context, group = contexts.current.get(), contexts.group()
    if not isinstance(context, contexts.InReplica):
        raise RuntimeError(
            f"{call_name.current_call()} was called outside of Strategy.run; call it inside the "
            "function it runs"
        )
    communicator = group.communicator
    with communicator.raise_together(), group.on_stream():
        op = ReduceOp.parse(reduce_op, call_name.current_call())
        if op is not ReduceOp.SUM and op is not ReduceOp.MEAN:
            raise ValueError(
                f"{call_name.current_call()}: reduce_op is {op.name}; gradients take SUM or MEAN"
            )
        _check_module(module)
        torch = _torch()
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        must_match = [name for name, _ in named]
        own = [_gradient(group, name, p) for name, p in named]
        values = [
            arrays.as_array(call_name.current_call(), gradient, on_gpu=True) for gradient in own
        ]
        if communicator.checks or module not in _compared:
            checksum = 0
            for _, p in named:
                checksum = zlib.crc32(_bytes(p).data, checksum)
            must_match.append(f"values of checksum {checksum:08x}, equal after hs.torch.broadcast")
        # Travels with the gradients: no rank alone knows whether any replica has a gradient.
        has_gradient = np.array([p.grad is not None for _, p in named], np.int32)
        *totals, has_gradient = _all_reduce(communicator, [*values, has_gradient], op, must_match)
        _compared.add(module)
        for (_, p), gradient, total, is_there in zip(named, own, totals, has_gradient, strict=True):
            if is_there:
                p.grad = gradient if p.is_cuda else _as_tensor(torch, total)
        if group.stream is not None and any(p.is_cuda for _, p in named):
            ordinal = group.stream.ordinal
            torch.cuda.current_stream(ordinal).wait_stream(
                torch.cuda.ExternalStream(group.stream.raw.ptr, ordinal)
            )


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            f"{call_name.current_call()} needs PyTorch, which cannot be imported ({error}); "
            "install it"
        ) from error


def _check_module(module: Any) -> None:
    if not hasattr(module, "named_parameters"):
        raise TypeError(
            f"{call_name.current_call()}: module is {type(module).__name__}; pass the "
            "torch.nn.Module itself, not its parameters"
        )


def _as_tensor(torch: Any, leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        tensor = _as_tensor(torch, leaf.value())
        has_gradient = leaf.trainable and (tensor.is_floating_point() or tensor.is_complex())
        return tensor.requires_grad_() if has_gradient else tensor
    if not (isinstance(leaf, np.ndarray) or gpu.is_on_gpu(leaf)):
        return leaf
    # NumPy's DLPack does not know bfloat16.
    if leaf.dtype.kind == "V" and leaf.dtype.name == "bfloat16":
        return _as_tensor(torch, leaf.view(np.int16)).view(torch.bfloat16)
    if gpu.is_on_gpu(leaf):
        return _gpu_tensor(torch, leaf)
    if leaf.flags.writeable:
        return torch.from_numpy(leaf)
    try:
        return torch.from_dlpack(leaf)
    except BufferError:  # older releases do not export read-only arrays
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(leaf)


def _gpu_tensor(torch: Any, array: Any) -> Any:
    with array.device:  # whose streams the two libraries order
        view, stream = array.view(), gpu.array_module(array).cuda.get_current_stream()
        # The tensor's memory holds only this view. When the view dies, the stream may write to its
        # elements again.
        weakref.finalize(
            view, _wait_for_torch, torch.cuda, array.data.device_id, stream
        ).atexit = False
        return torch.from_dlpack(view)


def _wait_for_torch(cuda: Any, gpu: int, stream: Any) -> None:
    """Makes a stream of CuPy wait for what PyTorch has queued on its own stream."""
    reading = cuda.current_stream(gpu)
    if reading.cuda_stream != stream.ptr:
        cuda.ExternalStream(stream.ptr, gpu).wait_stream(reading)


def _of_rank_0(communicator: verbs.Communicator, tensor: Any) -> Bytes:
    """The bytes of rank 0's tensor, which travel whatever its dtype; valid until the next call."""
    with communicator.raise_together():
        own = _bytes(tensor) if communicator.rank == 0 else np.empty(0, np.uint8)
        signature = records.signature_of(call_name.current_call())
        return communicator.exchange(signature, own.size, parts.writer_of(own))[0][: tensor.nbytes]


def _bytes(tensor: Any) -> Bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(_torch().uint8).numpy()


_packings_of = functools.lru_cache(maxsize=8)(packing.packings_of)


def _all_reduce(
    communicator: verbs.Communicator,
    values: Sequence[Array],
    op: ReduceOp,
    must_match: Sequence[str],
) -> list[Array]:
    """Reduces arrays over all ranks: those on the GPU, which are C-contiguous, in place.

    They are copied to one message per dtype and back, in a launch each.
    """
    sent: list[Array] = []
    by_dtype: dict[np.dtype[Any], list[Array]] = {}  # those on the GPU
    for value in values:
        members = by_dtype.setdefault(value.dtype, []) if gpu.is_on_gpu(value) else sent
        members.append(value)
    packed: list[tuple[packing.PackKernel, list[Array]]] = []
    for members in by_dtype.values():
        layout = layouts.layout_of_arrays(members)
        message = gpu.array_module(*members).empty(layout.nbytes, np.uint8)
        (pack,) = _packings_of(layout)
        pack(members, message)
        packed.append((pack, members))
        sent.append(layout.groups[0].of(message))
    shapes = [f"{one.dtype.name} of shape {one.shape}" for one in values if gpu.is_on_gpu(one)]
    received = iter(communicator.all_reduce(sent, op, *must_match, *shapes))
    totals = [value if gpu.is_on_gpu(value) else next(received) for value in values]
    for pack, members in packed:
        # On the strategy's stream, on which CuPy reuses the memory of the total.
        pack.unpack(next(received), members)
    return totals


def _gradient(group: groups.ReplicaGroup, name: str, parameter: Any) -> Any:
    """A parameter's gradient, or zeros, as a dense tensor."""
    call, device, gradient = call_name.current_call(), parameter.device, parameter.grad
    is_here = (
        device.type == "cuda" and group.stream is not None and device.index == group.stream.ordinal
    )
    if device.type != "cpu" and not is_here:
        raise TypeError(
            f"{call}: the parameter {name} is on {device}, but the replica computes on "
            f"{group.device.short}; move the module there or to the CPU, or make the strategy on "
            "the module's GPUs"
        )
    if gradient is None:
        return _torch().zeros_like(parameter, requires_grad=False)
    if gradient.is_sparse:
        raise TypeError(
            f"{call}: the gradient of {name} is sparse; make its layer with sparse=False"
        )
    return gradient.detach().contiguous() if gradient.is_cuda else gradient
