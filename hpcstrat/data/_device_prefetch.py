"""Prefetches batches to a GPU: a thread loads them, and a copy stream moves them to the device."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from hpcstrat._core import gpu, nests
from hpcstrat._core.arrays import is_numeric
from hpcstrat._core.timeline import INPUT, span
from hpcstrat._memory.layout import layout_of
from hpcstrat.data._splitting import Prefetcher, Step
from hpcstrat.data._threads import threads_of

_ALIGNMENT = 256  # bytes, for fast loads on the GPU


def prefetch_to_gpu(stream: gpu.Stream, ahead: int) -> Prefetcher:
    """Copies the arrays of steps to a stream's GPU, `ahead` steps before they are used.

    A thread loads batches into pinned memory; a separate copy stream moves each batch to the GPU in
    one transfer, while the GPU computes. Leaves that are not numeric arrays stay on the host.
    """
    return lambda steps: _prefetch(steps, stream, ahead)


class _Slot:
    """Pinned memory for one step, which grows as needed, and the step that is in it.

    Attributes:
        step: the step, without its value.
        leaves: the value's leaves, some of which are still to be replaced by GPU arrays.
        structure: the value's structure.
        moved: the indices of the leaves that go to the GPU.
        layout: their places in `pinned`.
        pinned: the part of the memory that has them.
        copied: the event after which the memory may be overwritten.
    """

    def __init__(self) -> None:
        self._memory: Any = np.empty(0, np.uint8)
        self.copied: Any = None

    @span(INPUT, "load a batch")
    def load(self, steps: Iterator[Step]) -> _Slot | None:
        """Loads the next step, and returns itself; `None` at the end."""
        step = next(steps, None)
        if step is None:
            return None
        self.step = step._replace(value=None)
        self.leaves, self.structure = nests.flatten(step.value)
        self.moved = [i for i, leaf in enumerate(self.leaves) if _goes_to_gpu(leaf)]
        arrays = [np.asarray(self.leaves[i]) for i in self.moved]
        self.layout = layout_of(
            tuple([array.shape for array in arrays]),
            tuple([array.dtype for array in arrays]),
            _ALIGNMENT,
        )
        nbytes = self.layout.nbytes
        if self.copied is not None:
            # The previous transfer from this memory may still be running: a step is yielded before
            # its transfer ends. Where the GPU is slower than the host, each load waits here: with a
            # pause much longer than a step the GPU would run out of batches.
            gpu.wait_for(self.copied, pause=1e-4)
        if self._memory.size < nbytes:
            self._memory = gpu.allocate_pinned(nbytes)
        self.layout.write(self._memory, arrays)
        self.pinned = self._memory[:nbytes]
        return self


def _goes_to_gpu(leaf: Any) -> bool:
    is_array = isinstance(leaf, (np.ndarray, np.generic))
    return is_array and is_numeric(leaf.dtype) and leaf.dtype.isnative


def _prefetch(steps: Iterator[Step], stream: gpu.Stream, ahead: int) -> Iterator[Step]:
    device = stream.xp.cuda.Device(stream.ordinal)
    with device:
        copies = stream.xp.cuda.Stream(non_blocking=True)
        # User functions that compute on the GPU get their own stream. CuPy's pool reuses memory per
        # stream, so their temporary arrays can never be memory that a training step still uses.
        computing = stream.xp.cuda.Stream(non_blocking=True)
    # While `ahead` slots load, one more is being copied to the GPU.
    #
    #   thread:  steps -> slot.load -> pinned memory     (`loading`, at most `ahead`)
    #   caller:  pinned memory -> copy stream -> GPU     (`copying`), then yield
    slots = itertools.cycle([_Slot() for _ in range(ahead + 1)])
    loading: deque[Future[_Slot | None]] = deque()
    copying: deque[tuple[Step, Any]] = deque()
    with contextlib.ExitStack() as stack:
        stack.callback(copies.synchronize)  # before the target of a transfer is freed
        with device, computing:
            submit = stack.enter_context(threads_of(1))
        for _ in range(ahead):
            loading.append(submit(next(slots).load, steps))
        while True:
            # Wait for a batch only if none is being copied, and raise an error only in its turn.
            while loading and len(copying) <= ahead and (not copying or _is_loaded(loading[0])):
                loaded = loading.popleft().result()
                if loaded is None:
                    loading.clear()
                    break
                with device:
                    copying.append(_copy(loaded, stream.xp, copies))
                loading.append(submit(next(slots).load, steps))
            if not copying:
                return
            step, arrived = copying.popleft()
            with device:
                stream.xp.cuda.get_current_stream().wait_event(arrived)
            yield step


def _is_loaded(future: Future[_Slot | None]) -> bool:
    return future.done() and future.exception() is None


def _copy(loaded: _Slot, xp: Any, copies: Any) -> tuple[Step, Any]:
    """The step with arrays on the GPU, and the event of their arrival.

    The arrays' memory comes from the current stream's pool, and kernels already queued there may
    still use it: the transfer waits for those kernels, and for nothing queued later.
    """
    flat = xp.empty(loaded.layout.nbytes, np.uint8)
    current = xp.cuda.get_current_stream()
    free = xp.cuda.Event(disable_timing=True)
    free.record(current)
    copies.wait_event(free)
    flat.set(loaded.pinned, stream=copies)
    arrived = xp.cuda.Event(disable_timing=True)
    arrived.record(copies)
    loaded.copied = arrived
    leaves, loaded.leaves = loaded.leaves, []  # a slot must not keep a batch
    for i, array in zip(loaded.moved, loaded.layout.views(flat), strict=True):
        leaves[i] = array
    return loaded.step._replace(value=loaded.structure.unflatten(leaves)), arrived
