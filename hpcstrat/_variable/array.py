"""A variable read as an array: its value, arithmetic, an array's methods and protocols, rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core import gpu
from hpcstrat._core.call_name import call_named
from hpcstrat._core.types import Array
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._variable.state import VariableState, in_replica_of
from hpcstrat._variable.writing import as_row_numbers

_Method: TypeAlias = Callable[..., Any]


@final
class VariableReference:
    """A hashable reference to a variable: equal only to references to the same variable."""

    __slots__ = ("_variable",)

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def deref(self) -> Any:
        """The variable."""
        return self._variable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableReference) and self._variable is other._variable

    def __hash__(self) -> int:
        return id(self._variable)

    def __repr__(self) -> str:
        return f"<Reference to {self._variable!r}>"


def _method(name: str, read: Callable[[Any], Array]) -> _Method:
    """An array's method of that name, applied to what `read` returns of a variable."""

    def method(variable: Any, *args: Any, **options: Any) -> Any:
        return getattr(read(variable), name)(*args, **options)

    method.__name__, method.__qualname__ = name, f"ReadableAsArray.{name}"
    method.__doc__ = f"`numpy.ndarray.{name}`, or CuPy's, of `value()`."
    return method


class ReadableAsArray(np.lib.mixins.NDArrayOperatorsMixin):
    """The part of `Variable` that reads it.

    Nothing here communicates; a per-replica variable raises where reading would communicate.
    """

    __slots__ = ("_state", "name")

    _state: VariableState
    name: str

    # ---- properties

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._state.block.view.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes.

        Examples:
            As in TensorFlow, Python floats become `float32`; arrays keep theirs:

            >>> hs.Variable([1.0, 2.0]).dtype, hs.Variable(np.array([1.0, 2.0])).dtype
            (dtype('float32'), dtype('float64'))
        """
        return self._state.block.view.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._state.block.view.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._state.block.view.size

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self._state.block.view.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self._state.block.view.nbytes

    def get_shape(self) -> tuple[int, ...]:
        """Returns `shape`, by TensorFlow's other name.

        Examples:
            >>> hs.Variable(np.zeros((2, 3))).get_shape()
            (2, 3)
        """
        return self.shape

    def ref(self) -> VariableReference:
        """A hashable reference to this variable, for sets and dict keys.

        `==` between variables compares their elements.

        Examples:
            >>> v, w = hs.Variable([1.0, 2.0]), hs.Variable([1.0, 2.0])
            >>> v == w, v.ref() == w.ref()
            (array([ True,  True]), False)
            >>> names = {v.ref(): "v", w.ref(): "w"}
            >>> names[w.ref()], w.ref().deref() is w
            ('w', True)
        """
        return VariableReference(self)

    # ---- the array

    def value(self) -> Array:
        """The array: a read-only view of storage in a replica context, a copy everywhere else.

        Never communicates.

        On CPUs all ranks of a host may be reading this memory. NumPy refuses to write to it,
        except in `np.add.at` and the like before NumPy 2.5, which ignore the read-only flag: pass
        those a copy, `read_value()`. With `HPCSTRAT_CHECK=1` the next update detects such a write.

        Raises:
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of
                several replicas.

        Examples:
            A view in a replica function, which an update changes, and a copy elsewhere:

            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     v = hs.Variable(np.zeros(2), aggregation="SUM")
            >>> def step():
            ...     view, copy = v.value(), v.read_value()
            ...     v.assign_add(np.ones(2))
            ...     return view.flags.writeable, view.copy(), copy
            >>> strategy.run(step)
            (False, array([1., 1.]), array([0., 0.]))
        """
        state, context = self._state, contexts.current.get()
        view = state.block.view
        if type(context) is InReplica and context.group is state.group:
            return view.view()  # the caller may change the view's shape and flags
        self._check_readable()
        # Outside a replica the next line may write: a value that then changes would surprise.
        return view.copy()

    def _read_in_place(self) -> Array:
        """The array in storage, for reads that return a new array."""
        if self._state.is_on_read:
            self._check_readable()
        return self._state.block.view

    def _read_on_host(self) -> Array:
        return gpu.to_host(self._read_in_place())

    def _check_readable(self) -> None:
        if self._state.needs_aggregation_to_read():
            raise RuntimeError(
                f"Variable {self.name!r} has one value per replica (ON_READ), and arithmetic in "
                "the cross-replica context does not aggregate them; call read_value() or numpy(), "
                "which do"
            )

    # ---- operators and indexing

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `at` writes its first input, even a read-only one.
        written = inputs[:1] if method == "at" else kwargs.get("out", ())
        for out in written:
            if isinstance(out, ReadableAsArray):
                raise TypeError(
                    f"Variable {out.name!r} in {ufunc.__name__}: a variable is not written in "
                    "place, as by `+=`, `out=` or `at`; use assign, assign_add or assign_sub"
                )
        # Straight from storage: the result is a new array, so nothing has to be copied.
        arrays = [x._read_in_place() if isinstance(x, ReadableAsArray) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        # A view of storage may be returned only in a replica; a single element is a copy already.
        part = self._read_in_place()[index]
        is_final = in_replica_of(self._state.group) or isinstance(part, np.generic)
        return part if is_final else part.copy()

    if not TYPE_CHECKING:  # hidden, so that type checkers report item assignment

        def __setitem__(self, index: Any, value: Any) -> None:
            raise TypeError(
                f"Variable {self.name!r} does not support item assignment; write rows by "
                "v.scatter_update(IndexedSlices(values, indices)), or a changed copy: "
                "new = v.numpy(); new[i] = x; v.assign(new)"
            )

    def __len__(self) -> int:
        return len(self._state.block.view)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __contains__(self, key: Any) -> bool:
        return key in self._read_in_place()

    # ---- Python numbers and text

    def __bool__(self) -> bool:
        return bool(self._read_in_place())

    def __int__(self) -> int:
        return int(self._read_in_place())

    def __float__(self) -> float:
        return float(self._read_in_place())

    def __complex__(self) -> complex:
        return complex(self._read_in_place())

    def __index__(self) -> int:
        return operator.index(self._read_in_place())

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self._read_on_host()[()], ndigits)

    def __format__(self, format_spec: str) -> str:
        return format(self._read_on_host(), format_spec) if format_spec else str(self)

    # ---- an array's methods
    #
    # Of `value()` where the result may be a view of the array; of storage where it is a new one.

    transpose: _Method = _method("transpose", value)
    reshape: _Method = _method("reshape", value)
    ravel: _Method = _method("ravel", value)
    squeeze: _Method = _method("squeeze", value)
    copy: _Method = _method("copy", _read_in_place)
    flatten: _Method = _method("flatten", _read_in_place)
    tolist: _Method = _method("tolist", _read_in_place)
    item: _Method = _method("item", _read_on_host)  # CuPy's own takes no index
    sum: _Method = _method("sum", _read_in_place)
    prod: _Method = _method("prod", _read_in_place)
    mean: _Method = _method("mean", _read_in_place)
    std: _Method = _method("std", _read_in_place)
    var: _Method = _method("var", _read_in_place)
    max: _Method = _method("max", _read_in_place)
    min: _Method = _method("min", _read_in_place)
    argmax: _Method = _method("argmax", _read_in_place)
    argmin: _Method = _method("argmin", _read_in_place)
    any: _Method = _method("any", _read_in_place)
    all: _Method = _method("all", _read_in_place)

    @property
    def T(self) -> Array:
        """The array with its axes in reverse order."""
        return self.value().T

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> Array:
        """The array in another dtype; with `copy=False`, `value()` if it has that dtype already."""
        # With `copy=False` NumPy may return storage itself; `value()` returns it as it should be.
        array = self._read_in_place().astype(dtype, copy=copy)
        return self.value() if array is self._state.block.view else array

    def dot(self, other: Any, out: Any = None) -> Any:
        """The product with another array or variable, by the rules of `numpy.dot`."""
        factor = other._read_in_place() if isinstance(other, ReadableAsArray) else other
        return self._read_in_place().dot(factor, out)

    # ---- rows

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """A copy of the rows at these indices. Never communicates.

        Args:
            indices: integers of any shape, each in `0..shape[0]-1`.
            name: ignored; accepted for compatibility with TensorFlow.

        Returns:
            An array of shape `(*indices.shape, *shape[1:])`.

        Raises:
            ValueError: an index is out of range, or is not an integer.
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of
                several replicas.

        Examples:
            >>> table = hs.Variable(np.array([[1, 2], [3, 4], [5, 6]]))
            >>> table.sparse_read([2, 0, 2])
            array([[5, 6],
                   [1, 2],
                   [5, 6]])
        """
        del name
        with call_named(f"Variable.sparse_read of {self.name!r}"):
            array, group = self._read_in_place(), self._state.group
            with group.on_stream():
                return array.take(as_row_numbers(indices, array.shape, group), axis=0)

    # ---- other libraries: read-only views in a replica context, copies elsewhere

    @property
    def device(self) -> str:
        """The canonical string of the device that holds it; for a mirror, the replica's own.

        Examples:
            >>> hs.Variable(0.0).device
            '/job:localhost/replica:0/task:0/device:CPU:0'
        """
        return str(self._state.group.variable_device)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self._read_in_place()
        # An implicit copy to the host would make every such line wait for the GPU, unnoticed.
        if gpu.is_on_gpu(array):
            raise TypeError(
                f"Variable {self.name!r} is on a GPU and does not become a NumPy array implicitly; "
                "call numpy()"
            )
        in_place = in_replica_of(self._state.group)
        if copy is False and not in_place:
            raise ValueError(
                f"Variable {self.name!r} is read without a copy, copy=False, in a replica context "
                "only; call value() there"
            )
        if copy is False and dtype is not None and np.dtype(dtype) != array.dtype:
            raise ValueError(
                f"Variable {self.name!r} is of dtype {array.dtype.name}; as "
                f"{np.dtype(dtype).name} it is read with a copy only: leave out copy=False"
            )
        array = array.astype(dtype or array.dtype, copy=bool(copy) or not in_place)
        return array.view() if array is self._state.block.view else array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # The interface is an address, and keeps only the variable alive: the memory of a copy would
        # be freed before it is read.
        if (
            self._state.interface is None
            or self._state.block.interrupted_by
            or not in_replica_of(self._state.group)
        ):
            raise AttributeError(
                f"Variable {self.name!r} has an __array_interface__ on the CPU in a replica "
                "context only; call numpy()"
            )
        return self._state.interface.copy()

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy is False:
            raise BufferError(
                f"Variable {self.name!r} is exported as a copy, because the consumer could write "
                "to it; to export it read-only and without a copy, pass value() in a replica "
                "context"
            )
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(
                f"Variable {self.name!r} is on {self.device}; call numpy() for a copy in host "
                "memory"
            )
        del max_version  # a writable array needs no flag of the newer versions
        self._check_readable()
        return self._state.block.view.copy().__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._state.block.view.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self._state.block.view
        # The same restrictions, for the same reason, as `__array_interface__`.
        if not gpu.is_on_gpu(array) or not in_replica_of(self._state.group):
            raise AttributeError(
                f"Variable {self.name!r} has a __cuda_array_interface__ on a GPU in a replica "
                "context only; call value()"
            )
        # The consumer works on the current stream, which is ordered with the strategy's: no wait.
        return {**array.__cuda_array_interface__, "stream": None}

    @property
    def __cupy_get_ndarray__(self) -> Callable[[], Array]:
        if not gpu.is_on_gpu(self._state.block.view):
            raise AttributeError(f"Variable {self.name!r} is not on a GPU; use it as a NumPy array")
        return self.value
