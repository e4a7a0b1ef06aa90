"""Where elements come from: ranges, arrays, generators, and what other libraries iterate over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np

from hpcstrat import _nest
from hpcstrat._types import TensorSpec
from hpcstrat.data import elements
from hpcstrat.data.node import UNKNOWN, Chunk, Keys, Node, first
from hpcstrat.data.walk import Walk

_CHUNK = 1 << 16


def _positions(size: int) -> Iterator[Keys]:
    for start in range(0, size, _CHUNK):
        yield np.arange(start, min(size, start + _CHUNK), dtype=np.int64)[:, np.newaxis]


class _Indexed(Node):
    """A source whose elements can be had in any order; a key is the position of one."""

    def __init__(self) -> None:
        self.inputs = ()
        self.width = 1
        self.user_code = False
        self.batch_sizes = ()
        self.rows = None

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        return _positions(self.cardinality())

    def load(self, item: Any) -> Any:
        return first(self.fetch(item[np.newaxis]))


@final
class Range(_Indexed):
    """The integers of a `range`."""

    def __init__(self, numbers: range, dtype: Any) -> None:
        super().__init__()
        self._numbers = numbers
        self._dtype = np.dtype(dtype)

    def __repr__(self) -> str:
        return f"Dataset.{self._numbers!r}"

    def spec(self) -> Any:
        return TensorSpec((), self._dtype)

    def cardinality(self) -> int:
        return len(self._numbers)

    def fetch(self, chunk: Chunk) -> Any:
        return (chunk[:, 0] * self._numbers.step + self._numbers.start).astype(self._dtype, copy=False)


@final
class Tensors(_Indexed):
    """One element."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._element = elements.as_element(tensors)

    def __repr__(self) -> str:
        return f"Dataset.from_tensors({self.spec()})"

    def spec(self) -> Any:
        return elements.spec_of(self._element)

    def cardinality(self) -> int:
        return 1

    def fetch(self, chunk: Chunk) -> Any:
        return _nest.map_leaves(lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], len(chunk), 0), self._element)


@final
class Slices(_Indexed):
    """The slices of arrays along their first dimension; the arrays are kept as they are, not copied."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._leaves, self._structure = _nest.flatten(elements.as_element(tensors))
        self._size = elements.leading_size(self._leaves)

    def __repr__(self) -> str:
        return f"Dataset.from_tensor_slices({self._size} of {self.spec()})"

    def spec(self) -> Any:
        return self._structure.unflatten(TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in self._leaves)

    def cardinality(self) -> int:
        return self._size

    def fetch(self, chunk: Chunk) -> Any:
        places = chunk[:, 0]
        size = len(places)
        if size and places[-1] - places[0] == size - 1 and (places[1:] > places[:-1]).all():
            start = int(places[0])
            return self._structure.unflatten([leaf[start : start + size].copy() for leaf in self._leaves])
        return self._structure.unflatten([leaf.take(places, 0) for leaf in self._leaves])


class _Produced(Node):
    """A source whose elements come one after the other out of code of the user's; an item is the element."""

    def __init__(self, batch_sizes: tuple[int, ...]) -> None:
        self.inputs = ()
        self.width = None
        self.user_code = True
        self.batch_sizes = batch_sizes
        self.rows = None

    def cardinality(self) -> int:
        return UNKNOWN

    def load(self, item: Any) -> Any:
        return item

    def fetch(self, chunk: Chunk) -> Any:
        return elements.stack(chunk)


@final
class Generated(_Produced):
    """What a generator function yields."""

    def __init__(self, generator: Callable[..., Iterable[Any]], args: tuple[Any, ...], signature: Any) -> None:
        super().__init__(())
        self._generator = generator
        self._args = args
        self._signature = signature
        self._expected = None if signature is None else _nest.flatten(signature)

    def __repr__(self) -> str:
        return f"Dataset.from_generator({name_of(self._generator)})"

    def spec(self) -> Any:
        if self._signature is not None:
            return self._signature
        for element in self.elements(Walk(frozen=True)):
            return elements.spec_of(element)
        raise ValueError(
            "Dataset.element_spec: the generator yields nothing and has no output_signature, so its elements' shapes "
            "and dtypes are not known; give Dataset.from_generator an output_signature"
        )

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        for value in self._generator(*self._args):
            yield [elements.as_element(value) if self._expected is None else self._checked(value)]

    def _checked(self, value: Any) -> Any:
        specs, structure = self._expected  # pyright: ignore[reportGeneralTypeIssues]
        try:
            leaves = structure.flatten_up_to(value)
            arrays = [np.asarray(leaf, spec.dtype)[()] for leaf, spec in zip(leaves, specs, strict=True)]
        except (TypeError, ValueError) as error:
            raise _unlike(value, self._signature) from error
        for array, spec in zip(arrays, specs, strict=True):
            shape = array.shape
            if len(shape) != len(spec.shape) or any(m not in (None, n) for m, n in zip(spec.shape, shape, strict=True)):
                raise _unlike(value, self._signature)
        return structure.unflatten(arrays)


@final
class Batches(_Produced):
    """The batches of anything that can be iterated over again and again, or of a generator function."""

    def __init__(self, iterable: Any) -> None:
        super().__init__((0,))
        self._iterable = iterable

    def __repr__(self) -> str:
        return name_of(self._iterable) if callable(self._iterable) else type(self._iterable).__name__

    def spec(self) -> Any:
        for element in self.elements(Walk(frozen=True)):
            return _nest.map_leaves(lambda leaf: TensorSpec((None, *leaf.shape[1:]), leaf.dtype), element)
        raise ValueError(f"element_spec: {self!r} has no batches, so their shapes and dtypes are not known")

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        batches = self._iterable if hasattr(self._iterable, "__iter__") else self._iterable()
        for batch in batches:
            yield [_nest.map_leaves(lambda leaf: np.array(elements.as_leaf(leaf)), batch)]


def name_of(function: Any) -> str:
    """A function's name, the same on all ranks."""
    return getattr(function, "__name__", type(function).__name__)


def _unlike(value: Any, signature: Any) -> ValueError:
    leaves, _ = _nest.flatten(value)
    found = ", ".join(f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}" for leaf in leaves)
    return ValueError(f"Dataset.from_generator: the generator yielded {found}; output_signature says {signature}")
