"""Arrays in files (h5py, zarr, netCDF4), whose rows are read when they are needed."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core.arrays import as_array, is_stored
from hpcstrat.data import _elements


@final
class StoredArray:
    """An array that is not in memory, with the NumPy attributes that a source of rows needs.

    Args:
        source: an array for which `is_stored` is true; it is indexed only by slices, which all
            libraries support.

    Attributes:
        shape: its shape.
        dtype: the dtype of the arrays that are read, which can differ from that of the file.

    Raises:
        TypeError: reading does not return an array of numbers, booleans or strings, or returns a
            masked array.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.shape: tuple[int, ...] = tuple(source.shape)
        try:
            empty = source[0:0]
        except TypeError as error:
            raise TypeError(_elements.describe_non_numeric(source)) from error
        self.dtype: np.dtype[Any] = as_array("Dataset", empty, on_gpu=False).dtype
        if self.dtype == object:
            raise TypeError(_elements.describe_non_numeric(source))

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Consecutive rows, in one read."""
        return self._read((rows.start, rows.stop))

    def take(self, rows: npt.NDArray[np.int64], axis: int) -> npt.NDArray[Any]:
        """Rows in any order; each row is read once, and neighbours are read together."""
        assert axis == 0
        wanted, places = np.unique(rows, return_inverse=True)
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        parts = [
            self._read((int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0)) for run in runs
        ]
        return np.concatenate(parts).take(places, 0)

    def elements(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Single elements, by their positions in the flattened array, with one read each."""
        places = zip(
            *[axis.tolist() for axis in np.unravel_index(positions, self.shape)], strict=True
        )
        parts = [self._read(*[(i, i + 1) for i in place]).reshape(1) for place in places]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def _read(self, *bounds: tuple[int, int]) -> npt.NDArray[Any]:
        slices = tuple([slice(*bound) for bound in bounds])
        array = as_array(
            "Dataset", self._source[slices[0] if len(slices) == 1 else slices], on_gpu=False
        )
        expected = *[stop - start for start, stop in bounds], *self.shape[len(bounds) :]
        if array.shape != expected:
            raise ValueError(
                f"Dataset.from_tensor_slices: a {type(self._source).__name__} of shape "
                f"{self.shape} returned an array of shape {array.shape} for the indices {slices}; "
                "it must not change while the dataset is used"
            )
        return array


def as_rows(value: Any) -> Any:
    """`value` as an array whose rows are elements: as `as_leaf`, but a stored array stays put."""
    return StoredArray(value) if is_stored(value) else _elements.as_leaf(value)
