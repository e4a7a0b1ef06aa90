"""A variable as an array for other libraries, by the protocols that they speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat import _gpu
from hpcstrat._storage.base import Array
from hpcstrat._variable_reading import ReadableAsArray, in_replica_of


class ExportsArray(ReadableAsArray):
    """What hands a variable's numbers out: in place, read-only, in a replica context; as a copy elsewhere."""

    __slots__ = ("_interface",)

    _interface: dict[str, Any] | None

    def _make_interface(self) -> None:
        view = self._block.view
        # A dtype of `ml_dtypes` has no name in it: then NumPy takes `__array__`, as everywhere outside of a replica.
        has_interface = isinstance(view, np.ndarray) and view.dtype.kind != "V"
        self._interface = view.__array_interface__ if has_interface else None

    @property
    def device(self) -> str:
        """The canonical string of the device where it lives: the parameter device, or this replica's for a mirror."""
        return str(self._group.variable_device)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self._readable()
        if _gpu.is_on_gpu(array):
            raise TypeError(
                f"Variable {self.name!r} is on a GPU and does not become a NumPy array by itself; call numpy()"
            )
        in_place = in_replica_of(self._group)
        if copy is False and not in_place:
            raise ValueError(
                f"Variable {self.name!r} is read without a copy, copy=False, in a replica context only; "
                "call value() there"
            )
        array = array.astype(dtype or array.dtype, copy=bool(copy) or not in_place)
        return array.view() if array is self._block.view else array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # It names memory, and keeps only the variable alive: a snapshot's would be gone before it is read.
        if self._interface is None or self._block.torn or not in_replica_of(self._group):
            raise AttributeError(
                f"Variable {self.name!r} has an __array_interface__ on the CPU in a replica context only; call numpy()"
            )
        return self._interface.copy()

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
                f"Variable {self.name!r} is exported as a copy, because who takes it could write to it; without a "
                "copy, and read-only, pass value() in a replica context"
            )
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError(f"Variable {self.name!r} is on {self.device}; call numpy() for a copy in host memory")
        del max_version  # what is writable needs no flag of the newer ones
        self._check_readable()
        return self._block.view.copy().__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._block.view.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        array = self._block.view
        if not _gpu.is_on_gpu(array) or not in_replica_of(self._group):  # as `__array_interface__`
            raise AttributeError(
                f"Variable {self.name!r} has a __cuda_array_interface__ on a GPU, in a replica context; call value()"
            )
        # Who takes it works on the stream that is current, with which the strategy's is ordered: nobody has to wait.
        return {**array.__cuda_array_interface__, "stream": None}

    @property
    def __cupy_get_ndarray__(self) -> Callable[[], Array]:
        if not _gpu.is_on_gpu(self._block.view):
            raise AttributeError(f"Variable {self.name!r} is not on a GPU; use it as a NumPy array")
        return self.value
