"""The methods that a variable has in common with arrays: shapes, dtypes, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._variable.array import ReadableAsArray

Axis: TypeAlias = "int | Sequence[int] | None"


class HasArrayMethods(ReadableAsArray):
    """The part of `Variable` with the methods of an array; they never communicate."""

    __slots__ = ()

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
