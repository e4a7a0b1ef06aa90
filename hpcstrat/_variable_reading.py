"""Reading a variable as the array that it is: in arithmetic, by methods of arrays, as a Python number."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstrat import _context, _gpu
from hpcstrat._context import InReplica
from hpcstrat._group import ReplicaGroup
from hpcstrat._storage.base import Array
from hpcstrat._storage.memory import Block

Axis: TypeAlias = "int | Sequence[int] | None"


class ReadableAsArray(np.lib.mixins.NDArrayOperatorsMixin):
    """What reads a variable. Nothing here communicates; a variable with a value a replica refuses where it would."""

    __slots__ = ("_block", "_group", "_is_on_read", "name")

    _block: Block
    _is_on_read: bool
    _group: ReplicaGroup
    name: str

    # ---- facts

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._block.view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        return self._block.view.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._block.view.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._block.view.size

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._block.view.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self._block.view.nbytes

    # ---- the array

    def value(self) -> Array:
        """The array: in a replica context storage itself, read-only; elsewhere a copy. Never communicates.

        Storage is shared memory, which every rank may be reading. NumPy refuses to write to it, but for `np.add.at` and
        the like, which do not look at whether an array is read-only: pass them a copy, `read_value()`. With
        `HPCSTRAT_CHECK=1` the next update finds what they wrote.

        Raises:
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of several replicas.
        """
        view = self._block.view
        context = _context.current.get()
        if type(context) is InReplica and context.group is self._group:
            return view.view()  # whose shape and flags the caller may change
        self._check_readable()
        return view.copy()

    def _readable(self) -> Array:
        """The array in storage, for a read whose result is a fresh array."""
        if self._is_on_read:
            self._check_readable()
        return self._block.view

    def _check_readable(self) -> None:
        if self._is_divided():
            raise RuntimeError(
                f"Variable {self.name!r} has one value a replica (ON_READ), and in the cross-replica context "
                "arithmetic does not bring them together; call read_value() or numpy(), which do"
            )

    def _is_divided(self) -> bool:
        """Whether a read here would have to bring several replicas' values together."""
        if not self._is_on_read or self._group.communicator.size == 1:
            return False
        return not in_replica_of(self._group)

    # ---- operators and indexing

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        written = inputs[:1] if method == "at" else kwargs.get("out", ())  # NumPy's `at` writes read-only arrays too
        for out in written:
            if isinstance(out, ReadableAsArray):
                raise TypeError(
                    f"Variable {out.name!r} in {ufunc.__name__}: a variable is not written in place, as by `+=`, "
                    "`out=` or `at`; use assign, assign_add or assign_sub"
                )
        arrays = [x._readable() if isinstance(x, ReadableAsArray) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        part = self._readable()[index]
        return part if in_replica_of(self._group) or isinstance(part, np.generic) else part.copy()

    if not TYPE_CHECKING:  # to which assigning to an item is an error

        def __setitem__(self, index: Any, value: Any) -> None:
            raise TypeError(
                f"Variable {self.name!r} does not support item assignment; change a copy, `new = v.numpy()`, and pass "
                "all of it to v.assign(new)"
            )

    def __len__(self) -> int:
        return len(self._block.view)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __contains__(self, key: Any) -> bool:
        return key in self._readable()

    # ---- Python numbers and text

    def __bool__(self) -> bool:
        return bool(self._readable())

    def __int__(self) -> int:
        return int(self._readable())

    def __float__(self) -> float:
        return float(self._readable())

    def __complex__(self) -> complex:
        return complex(self._readable())

    def __index__(self) -> int:
        return operator.index(self._readable())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(_gpu.to_host(self._readable())[()], ndigits)

    def __format__(self, format_spec: str) -> str:
        return format(_gpu.to_host(self._readable()), format_spec) if format_spec else str(self)

    def item(self, *index: Any) -> Any:
        """The one element, or that at `index`, as a Python number."""
        return _gpu.to_host(self._readable()).item(*index)

    def tolist(self) -> Any:
        """The elements as Python numbers, in nested lists."""
        return self._readable().tolist()

    # ---- other shapes and dtypes: like `value()` in place in a replica context, and a copy elsewhere

    @property
    def T(self) -> Array:
        """The array with its axes in reverse order."""
        return self.value().T

    def transpose(self, *axes: Any) -> Array:
        """The array with its axes in this order; in reverse order by default."""
        return self.value().transpose(*axes)

    def reshape(self, *shape: Any, **options: Any) -> Array:
        """The array in another shape."""
        return self.value().reshape(*shape, **options)

    def ravel(self, order: Any = "C") -> Array:
        """The elements in one dimension."""
        return self.value().ravel(order)

    def squeeze(self, axis: Axis = None) -> Array:
        """The array without its dimensions of size 1."""
        return self.value().squeeze(axis)

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> Array:
        """The array in another dtype; without `copy` the array itself if it has it."""
        array = self._readable().astype(dtype, copy=copy)
        return self.value() if array is self._block.view else array

    def copy(self) -> Array:
        """A copy of the array, in a replica context too."""
        return self._readable().copy()

    def flatten(self, order: Any = "C") -> Array:
        """A copy of the elements in one dimension."""
        return self._readable().flatten(order)

    # ---- reductions, by NumPy's or CuPy's methods of these names

    def sum(self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any) -> Any:
        """The sum of the elements."""
        return self._readable().sum(axis, dtype, out, **options)

    def prod(self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any) -> Any:
        """The product of the elements."""
        return self._readable().prod(axis, dtype, out, **options)

    def mean(self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any) -> Any:
        """The mean of the elements."""
        return self._readable().mean(axis, dtype, out, **options)

    def std(self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any) -> Any:
        """The standard deviation of the elements."""
        return self._readable().std(axis, dtype, out, **options)

    def var(self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any) -> Any:
        """The variance of the elements."""
        return self._readable().var(axis, dtype, out, **options)

    def max(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """The largest of the elements."""
        return self._readable().max(axis, out, **options)

    def min(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """The smallest of the elements."""
        return self._readable().min(axis, out, **options)

    def argmax(self, axis: int | None = None, out: Any = None, **options: Any) -> Any:
        """The index of the largest of the elements."""
        return self._readable().argmax(axis, out=out, **options)

    def argmin(self, axis: int | None = None, out: Any = None, **options: Any) -> Any:
        """The index of the smallest of the elements."""
        return self._readable().argmin(axis, out=out, **options)

    def any(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """Whether any of the elements is true."""
        return self._readable().any(axis, out, **options)

    def all(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """Whether all of the elements are true."""
        return self._readable().all(axis, out, **options)

    def dot(self, other: Any, out: Any = None) -> Any:
        """The product with another array, or variable, by NumPy's rules of `dot`."""
        return self._readable().dot(other._readable() if isinstance(other, ReadableAsArray) else other, out)


def in_replica_of(group: ReplicaGroup) -> bool:
    """Whether this line runs in a replica of the group."""
    context = _context.current.get()
    return type(context) is InReplica and context.group is group


def note_read_only(error: BaseException) -> None:
    """Adds to NumPy's error of a write to a read-only array what that array may be, from Python 3.11 on."""
    add_note = getattr(error, "add_note", None)
    if add_note is not None and isinstance(error, ValueError) and str(error).endswith("read-only"):
        add_note(
            "In a replica context a variable's value() is its memory, which other ranks may be reading: change the "
            "variable by assign, assign_add or assign_sub, or a copy of it, read_value()."
        )
