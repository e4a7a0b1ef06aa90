"""PyTorch modules on the replicas of a strategy: what `DistributedDataParallel` does, call by call.

Each replica has its own module and optimizer, PyTorch's. They stay equal because they start equal
(`broadcast`) and make the same steps (`all_reduce_gradients`). Without PyTorch every call raises
`ImportError`.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import warnings
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._agreement import records
from hpcstrat._core import arrays, atomic_file, call_name, gpu, nests
from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory import layout as layouts
from hpcstrat._memory import packing
from hpcstrat._program import extend_timeout, rank
from hpcstrat._replicas import contexts
from hpcstrat._replicas import group as groups
from hpcstrat._strategies import base as strategies
from hpcstrat._transports import connection, verbs
from hpcstrat._variable.variable import Variable

_HOUR = 3600.0  # seconds that the others wait longer while rank 0 reads or writes a file
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
    return nests.map_leaves(_as_tensor, nest)


@call_name.names_call("broadcast")
def broadcast(module: Any) -> None:
    """Sets the parameters and buffers of a module to rank 0's, in place.

    Collective: all ranks call this, anywhere.

    Call it before the first step. From then on buffers, such as the running statistics of
    BatchNorm, differ between replicas. To make them equal before an evaluation or a `save`, call it
    again, or call `average_buffers`. `DistributedDataParallel` broadcasts buffers before each
    forward pass instead.

    Args:
        module: a `torch.nn.Module`, of equal structure on all ranks.

    Raises:
        TypeError: `module` is not a module.
        ReplicaMismatchError: names, shapes or dtypes differ between ranks.
    """
    communicator = connection.connect()
    with communicator.raise_together():
        _check_module(module)
        named = [*module.named_parameters(), *module.named_buffers()]
        parts = [_bytes(tensor) for _, tensor in named]  # bytes travel whatever the dtype
        described = tuple(
            [f"{name} ({tensor.dtype} of shape {tuple(tensor.shape)})" for name, tensor in named]
        )
        communicator.exchange(
            records.signature_of(call_name.current_call(), records.ManyValues(described))
        )
        for (_, tensor), part in zip(named, communicator.broadcast_obj(parts), strict=True):
            tensor.detach().copy_(_torch().from_numpy(part).view(tensor.dtype).view(tensor.shape))


@call_name.names_call("average_buffers")
def average_buffers(module: Any) -> None:
    """Sets the floating-point buffers of a module to their means over the ranks.

    Collective: all ranks call this.

    Other buffers, such as BatchNorm's counts of batches, stay as they are.

    Args:
        module: a `torch.nn.Module`, of equal structure on all ranks.

    Raises:
        TypeError: `module` is not a module, or a dtype cannot be reduced.
        ReplicaMismatchError: names, shapes or dtypes differ between ranks.
    """
    communicator = connection.connect()
    with communicator.raise_together():
        _check_module(module)
        named = [
            (name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()
        ]
        values = [
            arrays.as_array(call_name.current_call(), buffer.detach().cpu(), on_gpu=False)
            for _, buffer in named
        ]
        means = communicator.all_reduce(values, ReduceOp.MEAN, *[name for name, _ in named])
        for (_, buffer), mean in zip(named, means, strict=True):
            buffer.copy_(_as_tensor(mean))


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
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        parameters, must_match = named.values(), [*named]
        own = [_gradient(group, name, p) for name, p in named.items()]
        values = [
            arrays.as_array(call_name.current_call(), gradient, on_gpu=True) for gradient in own
        ]
        if communicator.checks or module not in _compared:
            checksum = functools.reduce(
                lambda crc, p: zlib.crc32(_bytes(p).data, crc), parameters, 0
            )
            must_match.append(f"values of checksum {checksum:08x}, equal after hs.torch.broadcast")
        # Travels with the gradients: no rank alone knows whether any replica has a gradient.
        has_gradient = np.array([p.grad is not None for p in parameters], np.int32)
        *totals, has_gradient = _all_reduce(communicator, [*values, has_gradient], op, must_match)
        _compared.add(module)
        for p, gradient, total, is_there in zip(parameters, own, totals, has_gradient, strict=True):
            if is_there:
                p.grad = gradient if p.is_cuda else _as_tensor(total)
        if group.stream is not None and any(p.is_cuda for p in parameters):
            cuda, ordinal = _torch().cuda, group.stream.ordinal
            cuda.current_stream(ordinal).wait_stream(
                cuda.ExternalStream(group.stream.raw.ptr, ordinal)
            )


@call_name.names_call("seed")
def seed(seed: int, epoch: int = 0) -> None:
    """Seeds PyTorch differently on each rank, as dropout needs, and equally in each run.

    Never communicates.

    Args:
        seed: from 0 up, the same on every rank.
        epoch: from 0 up. A program that seeds at the start of each epoch draws the same numbers
            after a restart.

    Raises:
        ValueError: a number is negative.
    """
    own = np.random.SeedSequence([seed, epoch], spawn_key=(rank(),)).generate_state(1, np.uint64)
    _torch().manual_seed(int(own[0]))


@call_name.names_call("save")
def save(obj: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` by rank 0, whose file replaces the previous one once it is on disk.

    Collective: all ranks call this.

    Args:
        obj: rank 0's object, such as
            `{"module": module.state_dict(), "optimizer": optimizer.state_dict()}`.
        path: the file; missing folders are made.

    Raises:
        OSError: the file system refuses on rank 0; all ranks raise, and the previous file is whole.
    """
    communicator = connection.connect()
    with communicator.raise_together():
        if communicator.rank == 0:
            # In memory first, because PyTorch hides ENOSPC behind another exception.
            contents = io.BytesIO()
            _torch().save(obj, contents)
            with extend_timeout(_HOUR), atomic_file.replacing(os.fspath(path), keep=None) as file:
                rest = contents.getbuffer()
                while rest:
                    rest = rest[file.write(rest) :]
        communicator.exchange(records.signature_of(call_name.current_call()))


@call_name.names_call("load")
def load(path: str | os.PathLike[str]) -> Any:
    """Rank 0 reads a file of `save` or `torch.save`; every rank gets the object.

    Collective: all ranks call this.

    Returns:
        The object, with its tensors on the CPU, read with `weights_only=True`.

    Raises:
        OSError: rank 0 cannot read the file; all ranks raise.
        pickle.UnpicklingError: it holds more than tensors, numbers, strings, and nests of them.
    """
    communicator = connection.connect()
    with communicator.raise_together():
        with extend_timeout(_HOUR if communicator.rank == 0 else 0):
            contents = np.fromfile(path, np.uint8) if communicator.rank == 0 else None
        file = io.BytesIO(communicator.broadcast_obj(contents))
        return _torch().load(file, map_location="cpu", weights_only=True)


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


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        tensor = _as_tensor(leaf.value())
        has_gradient = leaf.trainable and (tensor.is_floating_point() or tensor.is_complex())
        return tensor.requires_grad_() if has_gradient else tensor
    if not (isinstance(leaf, np.ndarray) or gpu.is_on_gpu(leaf)):
        return leaf
    torch = _torch()
    # NumPy's DLPack does not know bfloat16.
    if leaf.dtype.kind == "V" and leaf.dtype.name == "bfloat16":
        return _as_tensor(leaf.view(np.int16)).view(torch.bfloat16)
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
    totals = list(values)
    on_gpu = [i for i, value in enumerate(values) if gpu.is_on_gpu(value)]
    on_host = [i for i in range(len(values)) if i not in on_gpu]
    packed: list[tuple[packing.PackKernel, list[Array]]] = []
    sent: list[Array] = []
    for dtype in dict.fromkeys([values[i].dtype for i in on_gpu]):
        members = [values[i] for i in on_gpu if values[i].dtype == dtype]
        layout = layouts.layout_of(tuple([one.shape for one in members]), (dtype,) * len(members))
        message = gpu.array_module(*members).empty(layout.nbytes, np.uint8)
        (pack,) = _packings_of(layout)
        pack(members, message)
        packed.append((pack, members))
        sent.append(layout.groups[0].of(message))
    shapes = [f"{values[i].dtype.name} of shape {values[i].shape}" for i in on_gpu]
    sent += [values[i] for i in on_host]
    received = iter(communicator.all_reduce(sent, op, *must_match, *shapes))
    for pack, members in packed:
        # On the strategy's stream, on which CuPy reuses the memory of the total.
        pack.unpack(next(received), members)
    for i in on_host:
        totals[i] = next(received)
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
