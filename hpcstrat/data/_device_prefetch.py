"""Prefetches batches to a GPU."""

from __future__ import annotations

import contextvars
import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from hpcstrat import _gpu, _nest
from hpcstrat._arrays import is_numeric
from hpcstrat._communicators.packing import Layout, layout
from hpcstrat._spans import INPUT, Details, span
from hpcstrat.data._splitting import Prefetcher, Step

_ALIGNMENT = 256  # bytes, for fast loads on the GPU


def prefetch_to_gpu(stream: _gpu.Stream, ahead: int) -> Prefetcher:
    """Copies the arrays of steps to a stream's GPU, `ahead` steps before their use.

    A thread loads batches into pinned memory; from there a copy stream of its own brings each to the GPU in one piece,
    while the GPU computes. What is no array of numbers stays on the host.
    """
    return lambda steps: _staged(steps, stream, ahead)


class _Loaded(NamedTuple):
    """A step in pinned memory.

    Attributes:
        step: without its part.
        leaves: the nest's; those that go to the GPU are not used.
        structure: of the nest.
        places: which leaves go to the GPU.
        form: where they are in `pinned`.
        pinned: their bytes.
        slot: to which `pinned` belongs.
    """

    step: Step
    leaves: list[Any]
    structure: _nest.Structure
    places: list[int]
    form: Layout
    pinned: Any
    slot: _Slot


class _Slot:
    """Pinned memory for one step, which grows, and the event after which it may be written again."""

    def __init__(self) -> None:
        self._pinned: Any = np.empty(0, np.uint8)
        self.copied: Any = None

    @span(INPUT, "load a batch")
    def load(self, steps: Iterator[Step]) -> _Loaded | None:
        """The next step, in this slot; `None` where there is none."""
        step = next(steps, None)
        if step is None:
            return None
        leaves, structure = _nest.flatten(step.part)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (np.ndarray, np.generic)) and _moves(leaf)]
        arrays = [np.asarray(leaves[i]) for i in places]
        form = layout(tuple([array.shape for array in arrays]), tuple([array.dtype for array in arrays]), _ALIGNMENT)
        if self.copied is not None:
            self.copied.synchronize()
        if self._pinned.size < form.nbytes:
            self._pinned = _gpu.pinned(form.nbytes)
        form.write(self._pinned, arrays)
        return _Loaded(step._replace(part=None), leaves, structure, places, form, self._pinned[: form.nbytes], self)


def _moves(leaf: Any) -> bool:
    return is_numeric(leaf.dtype) and leaf.dtype.isnative


def _staged(steps: Iterator[Step], stream: _gpu.Stream, ahead: int) -> Iterator[Step]:
    device = stream.xp.cuda.Device(stream.ordinal)
    with device:
        copies = stream.xp.cuda.Stream(non_blocking=True)
        # What a pipeline's functions compute on the GPU has a stream, and so memory, that steps have nothing of.
        computing = stream.xp.cuda.Stream(non_blocking=True)
    # While `ahead` steps load, one more slot is on its way to the GPU.
    slots = itertools.cycle([_Slot() for _ in range(ahead + 1)])
    context = contextvars.copy_context()  # a pipeline's functions print, and see the strategy, as their user does
    executor = ThreadPoolExecutor(1, "hpcstrat-input")

    def load(slot: _Slot) -> _Loaded | None:
        with device, computing:
            return context.run(slot.load, steps)

    loading: deque[Future[_Loaded | None]] = deque()
    copying: deque[tuple[Step, Any]] = deque()
    try:
        for _ in range(ahead):
            loading.append(executor.submit(load, next(slots)))
        while True:
            # The first is waited for, and an error comes when it is its turn.
            while loading and len(copying) <= ahead and (not copying or _is_there(loading[0])):
                loaded = loading.popleft().result()
                if loaded is None:
                    loading.clear()
                    break
                with device:
                    copying.append(_copied(loaded, stream.xp, copies))
                loading.append(executor.submit(load, next(slots)))
            if not copying:
                return
            step, arrived = copying.popleft()
            with device:
                stream.xp.cuda.get_current_stream().wait_event(arrived)
            yield step
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        copies.synchronize()  # before the memory that is being copied to goes back


def _is_there(future: Future[_Loaded | None]) -> bool:
    return future.done() and future.exception() is None


class _Copies(NamedTuple):
    """The stream on which input is copied, as a `_gpu.Stream` looks."""

    raw: Any
    ordinal: int


@span(
    INPUT,
    lambda loaded, xp, copies: Details("copy a batch", loaded.form.nbytes, _Copies(copies, copies.device_id)),
)
def _copied(loaded: _Loaded, xp: Any, copies: Any) -> tuple[Step, Any]:
    """The step with arrays on the GPU, and the event of their arrival.

    Their memory is of the current stream, where it may just have been used for something else: the copy waits for what
    is there now, and no longer.
    """
    flat = xp.empty(loaded.form.nbytes, np.uint8)
    current = xp.cuda.get_current_stream()
    free = xp.cuda.Event(disable_timing=True)
    free.record(current)
    copies.wait_event(free)
    flat.set(loaded.pinned, stream=copies)
    arrived = xp.cuda.Event(disable_timing=True)
    arrived.record(copies)
    loaded.slot.copied = arrived
    for i, array in zip(loaded.places, loaded.form.views(flat), strict=True):
        loaded.leaves[i] = array
    return loaded.step._replace(part=loaded.structure.unflatten(loaded.leaves)), arrived
