"""A variable read as an array: its value, arithmetic, an array's methods and protocols, rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core import gpu
from hpcstrat._core.call_name import call_named
from hpcstrat._core.types import Array
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._update.rows import row_view
from hpcstrat._variable.state import VariableState, in_replica_of
from hpcstrat._variable.writing import as_indices, row_numbers

Axis: TypeAlias = "int | Sequence[int] | None"


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
        """The shape.

        Examples:
            >>> hs.Variable(np.zeros((2, 3))).shape
            (2, 3)
        """
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
        """The number of dimensions.

        Examples:
            >>> hs.Variable(np.zeros((2, 3))).ndim
            2
        """
        return self._state.block.view.ndim

    @property
    def size(self) -> int:
        """The number of elements.

        Examples:
            >>> hs.Variable(np.zeros((2, 3))).size
            6
        """
        return self._state.block.view.size

    @property
    def itemsize(self) -> int:
        """The bytes of one element.

        Examples:
            >>> hs.Variable(np.zeros(3, np.float32)).itemsize
            4
        """
        return self._state.block.view.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements.

        Examples:
            >>> hs.Variable(np.zeros(3, np.float32)).nbytes
            12
        """
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

        Storage is shared memory, which every rank may be reading. NumPy refuses to write to it,
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
                "v.scatter_update(IndexedSlices(values, indices)), elements by "
                "v.scatter_nd_update(indices, values), or all of it by v.assign(new)"
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
        return round(gpu.to_host(self._read_in_place())[()], ndigits)

    def __format__(self, format_spec: str) -> str:
        return format(gpu.to_host(self._read_in_place()), format_spec) if format_spec else str(self)

    # ---- elements

    def item(self, *index: Any) -> Any:
        """The only element, or the element at `index`, as a Python number.

        Examples:
            >>> v = hs.Variable(np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> v.item(1, 0), hs.Variable(7).item()
            (3.0, 7)
        """
        # CuPy's own `item` takes no index.
        return gpu.to_host(self._read_in_place()).item(*index)

    def tolist(self) -> Any:
        """The elements as Python numbers, in nested lists.

        Examples:
            >>> hs.Variable(np.array([[1, 2], [3, 4]])).tolist()
            [[1, 2], [3, 4]]
        """
        return self._read_in_place().tolist()

    # ---- other shapes and dtypes: views in a replica context, copies elsewhere, as `value()`

    @property
    def T(self) -> Array:
        """The array with its axes in reverse order.

        Examples:
            >>> hs.Variable(np.array([[1, 2, 3], [4, 5, 6]])).T
            array([[1, 4],
                   [2, 5],
                   [3, 6]])
        """
        return self.value().T

    def transpose(self, *axes: Any) -> Array:
        """The array with its axes in this order; in reverse order by default.

        Examples:
            >>> hs.Variable(np.zeros((2, 3, 4))).transpose(1, 0, 2).shape
            (3, 2, 4)
        """
        return self.value().transpose(*axes)

    def reshape(self, *shape: Any, **options: Any) -> Array:
        """The array in another shape.

        Examples:
            >>> hs.Variable(np.arange(4)).reshape(2, 2)
            array([[0, 1],
                   [2, 3]])
        """
        return self.value().reshape(*shape, **options)

    def ravel(self, order: Any = "C") -> Array:
        """The elements in one dimension.

        Examples:
            >>> hs.Variable(np.array([[1, 2], [3, 4]])).ravel()
            array([1, 2, 3, 4])
        """
        return self.value().ravel(order)

    def squeeze(self, axis: Axis = None) -> Array:
        """The array without its dimensions of size 1.

        Examples:
            >>> hs.Variable(np.zeros((1, 3, 1))).squeeze(axis=0).shape
            (3, 1)
        """
        return self.value().squeeze(axis)

    def astype(self, dtype: npt.DTypeLike, copy: bool = True) -> Array:
        """The array in another dtype; with `copy=False`, `value()` if it has that dtype already.

        Examples:
            >>> hs.Variable(np.array([1.75, -1.75])).astype(np.int64)  # rounds towards 0
            array([ 1, -1])
        """
        # With `copy=False` NumPy may return storage itself; `value()` returns it as it should be.
        array = self._read_in_place().astype(dtype, copy=copy)
        return self.value() if array is self._state.block.view else array

    def copy(self) -> Array:
        """A copy of the array, also in a replica context.

        Examples:
            A copy keeps its elements; the view that `value()` returns changes with the variable:

            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     v = hs.Variable(np.zeros(2), aggregation="SUM")
            >>> def step():
            ...     view, copy = v.value(), v.copy()
            ...     v.assign(np.ones(2))
            ...     print(view, copy)
            >>> strategy.run(step)
            [1. 1.] [0. 0.]
        """
        return self._read_in_place().copy()

    def flatten(self, order: Any = "C") -> Array:
        """A copy of the elements in one dimension.

        Examples:
            >>> v = hs.Variable(np.array([[1, 2], [3, 4]]))
            >>> v.flatten(), v.flatten("F")  # by rows and by columns
            (array([1, 2, 3, 4]), array([1, 3, 2, 4]))
        """
        return self._read_in_place().flatten(order)

    # ---- reductions, by the NumPy or CuPy methods of the same names

    def sum(
        self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any
    ) -> Any:
        """The sum of the elements.

        Examples:
            >>> v = hs.Variable(np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> print(v.sum(), v.sum(axis=0))
            10.0 [4. 6.]
        """
        return self._read_in_place().sum(axis, dtype, out, **options)

    def prod(
        self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any
    ) -> Any:
        """The product of the elements.

        Examples:
            >>> print(hs.Variable(np.array([2.0, 3.0, 4.0])).prod())
            24.0
        """
        return self._read_in_place().prod(axis, dtype, out, **options)

    def mean(
        self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any
    ) -> Any:
        """The mean of the elements.

        Examples:
            >>> v = hs.Variable(np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> print(v.mean(), v.mean(axis=1))
            2.5 [1.5 3.5]
        """
        return self._read_in_place().mean(axis, dtype, out, **options)

    def std(
        self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any
    ) -> Any:
        """The standard deviation of the elements.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 3.0]))
            >>> print(v.std(), v.std(ddof=1).round(4))
            1.0 1.4142
        """
        return self._read_in_place().std(axis, dtype, out, **options)

    def var(
        self, axis: Axis = None, dtype: npt.DTypeLike | None = None, out: Any = None, **options: Any
    ) -> Any:
        """The variance of the elements.

        Examples:
            >>> v = hs.Variable(np.array([1.0, 3.0]))
            >>> print(v.var(), v.var(ddof=1))
            1.0 2.0
        """
        return self._read_in_place().var(axis, dtype, out, **options)

    def max(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """The largest element.

        Examples:
            >>> v = hs.Variable(np.array([[1, 7], [5, 3]]))
            >>> print(v.max(), v.max(axis=0))
            7 [5 7]
        """
        return self._read_in_place().max(axis, out, **options)

    def min(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """The smallest element.

        Examples:
            >>> v = hs.Variable(np.array([[1, 7], [5, 3]]))
            >>> print(v.min(), v.min(axis=0))
            1 [1 3]
        """
        return self._read_in_place().min(axis, out, **options)

    def argmax(self, axis: int | None = None, out: Any = None, **options: Any) -> Any:
        """The index of the largest element.

        Examples:
            >>> v = hs.Variable(np.array([[1, 7], [5, 3]]))
            >>> print(v.argmax(), v.argmax(axis=1))  # in the flattened array; in each row
            1 [1 0]
        """
        return self._read_in_place().argmax(axis, out=out, **options)

    def argmin(self, axis: int | None = None, out: Any = None, **options: Any) -> Any:
        """The index of the smallest element.

        Examples:
            >>> v = hs.Variable(np.array([[1, 7], [5, 3]]))
            >>> print(v.argmin(), v.argmin(axis=1))
            0 [0 1]
        """
        return self._read_in_place().argmin(axis, out=out, **options)

    def any(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """Whether any element is true.

        Examples:
            >>> hs.Variable(np.array([[0, 1], [0, 0]])).any(axis=1)
            array([ True, False])
        """
        return self._read_in_place().any(axis, out, **options)

    def all(self, axis: Axis = None, out: Any = None, **options: Any) -> Any:
        """Whether all elements are true.

        Examples:
            >>> hs.Variable(np.array([[1, 1], [1, 0]])).all(axis=1)
            array([ True, False])
        """
        return self._read_in_place().all(axis, out, **options)

    def dot(self, other: Any, out: Any = None) -> Any:
        """The product with another array or variable, by the rules of `numpy.dot`.

        Examples:
            >>> v = hs.Variable(np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> v.dot(np.array([1.0, 10.0])), v.dot(v)
            (array([21., 43.]), array([[ 7., 10.],
                   [15., 22.]]))
        """
        factor = other._read_in_place() if isinstance(other, ReadableAsArray) else other
        return self._read_in_place().dot(factor, out)

    # ---- rows and elements by their indices

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        """A copy of the rows at these indices. Never communicates.

        Args:
            indices: integers of any shape, each in `0..shape[0]-1`.
            name: ignored; accepted for compatibility with TensorFlow.

        Returns:
            An array with a row for each index, of shape
            `(*indices.shape, *shape[1:])`.

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
            return self._take(as_indices(indices, self._state.group)[..., None])

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        """A copy of the elements, or parts, at these indices. Never communicates.

        Args:
            indices: integers of shape `(..., k)`; each row is an index into the first k dimensions.
            name: ignored; accepted for compatibility with TensorFlow.

        Returns:
            An array with an entry for each index, of shape
            `(*indices.shape[:-1], *shape[k:])`.

        Raises:
            ValueError: an index is out of range or is not an integer, or k is more than the number
                of dimensions.
            RuntimeError: the variable is `ON_READ`, and this is the cross-replica context of
                several replicas.

        Examples:
            >>> table = hs.Variable(np.array([[1, 2], [3, 4], [5, 6]]))
            >>> table.gather_nd([[2, 0], [0, 1]])  # elements
            array([5, 2])
            >>> table.gather_nd([[2]])  # a row
            array([[5, 6]])
        """
        del name
        with call_named(f"Variable.gather_nd of {self.name!r}"):
            return self._take(as_indices(indices, self._state.group))

    def _take(self, indices: Array) -> Any:
        array, group = self._read_in_place(), self._state.group
        with group.on_stream():
            rows, shape = row_numbers(indices, array.shape, group)
            return row_view(array, len(shape))[rows].reshape((*indices.shape[:-1], *shape))[()]

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
