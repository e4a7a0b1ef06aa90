"""Re-iterables of batches, such as PyTorch's `DataLoader`, and their own positions."""

from __future__ import annotations

import base64
import importlib
import sys
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from hpcstrat._core.types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._node import UNKNOWN, Chunk, EpochPass, Node
from hpcstrat.data._sources import name_of


@final
class Batches(Node):
    """The batches of a re-iterable object, or of a generator function."""

    def __init__(self, iterable: Any) -> None:
        super().__init__()
        self.batched = 1
        self._iterable = iterable
        self._text = name_of(iterable) if callable(iterable) else type(iterable).__name__

    def __repr__(self) -> str:
        return self._text

    def spec(self) -> Any:
        batch = self.first()
        if batch is None:
            raise ValueError(
                f"DistributedDataset.element_spec: {self!r} has no batches, so their shapes and "
                "dtypes are unknown; give it at least one batch"
            )
        return _elements.map_leaves(
            lambda leaf: TensorSpec((None, *leaf.shape[1:]), leaf.dtype), batch
        )

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        iterable = self._iterable
        batches = iter(iterable if hasattr(iterable, "__iter__") else iterable())
        # Once it has begun: torchdata's loader draws another order from the state of a pass's end.
        epoch.loader = self.state()
        for number, batch in enumerate(batches):
            element = _elements.map_leaves(
                lambda leaf: np.array(_elements.as_leaf(leaf)), _elements.with_columns(batch)
            )
            if epoch.checksum.takes(number, 1):
                epoch.checksum.add(element)
            yield [element]

    def state(self) -> Any:
        """The object's own state, from which it goes on; `None` if it has none."""
        return self._iterable.state_dict() if _has_state(self._iterable) else None

    def set_state(self, state: Any) -> None:
        """Makes the next pass go on from this state."""
        if state is not None and _has_state(self._iterable):
            self._iterable.load_state_dict(state)

    def check_resumable(self, call: str) -> None:
        """Refuses a `DataLoader` whose order no checkpoint can hold."""
        torch = sys.modules.get("torch.utils.data")
        loader = self._iterable
        if torch is None or not isinstance(loader, torch.DataLoader) or _has_state(loader):
            return
        order = loader.batch_sampler or loader.sampler
        if type(order) is torch.BatchSampler:
            order = order.sampler
        is_known = isinstance(order, torch.SequentialSampler)
        if not is_known and not isinstance(loader.dataset, torch.IterableDataset):
            raise ValueError(
                f"{call}: the order of a DataLoader with a {type(order).__name__} is not in the "
                "checkpoint, so a restored program would lose elements; pass the arrays to "
                "hs.data.Dataset.from_tensor_slices(...).shuffle(..., seed=0), or use torchdata's "
                "StatefulDataLoader"
            )


def _has_state(iterable: Any) -> bool:
    return all(
        callable(getattr(iterable, name, None)) for name in ("state_dict", "load_state_dict")
    )


def encode(state: Any) -> Any:
    """A loader's state as values that JSON can hold.

    Raises:
        TypeError: it has values other than nests of numbers, texts, bytes and arrays.
    """
    if state is None or type(state) in (bool, int, str):
        return state
    if type(state) is float:  # the header of a checkpoint has no fractions
        return ["float", state.hex()]
    if type(state) in (list, tuple):
        return [type(state).__name__, *map(encode, state)]
    if type(state) is dict:
        return ["dict", *([encode(key), encode(value)] for key, value in state.items())]
    if isinstance(state, bytes):
        return ["bytes", base64.b64encode(state).decode()]
    kind = "array" if isinstance(state, (np.ndarray, np.generic)) else "tensor"
    if kind == "tensor" and type(state).__module__ != "torch":
        raise TypeError(f"the loader's state has a {type(state).__name__}")
    array = np.asarray(state)
    if array.dtype.kind in "OTV":  # Python objects, texts that are stored elsewhere, and records
        raise TypeError(f"the loader's state has an array of dtype {array.dtype}")
    return [kind, array.dtype.str, [*array.shape], base64.b64encode(array.tobytes()).decode()]


def decode(state: Any) -> Any:
    """The state of which `encode` made this.

    Raises:
        ValueError: it is no such state.
    """
    if not isinstance(state, list):
        return state
    try:
        kind, *rest = state
        if kind in ("list", "tuple"):
            return {"list": list, "tuple": tuple}[kind](map(decode, rest))
        if kind == "dict":
            return {decode(key): decode(value) for key, value in rest}
        if kind == "float":
            return float.fromhex(rest[0])
        if kind == "bytes":
            return base64.b64decode(rest[0])
        dtype, shape, data = rest
        array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()[()]
        if kind == "tensor":
            return importlib.import_module("torch").as_tensor(array)
        return array
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"a loader's state is damaged: {error}") from error
