"""Arrays in files, such as those of h5py, zarr and netCDF4, whose rows are read when they are needed."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core.arrays import as_array, is_stored
from hpcstrat.data import _elements


@final
class StoredArray:
    """An array that is not in memory, with those of NumPy's attributes that a source of rows needs.

    Args:
        source: an array for which `is_stored`; it is indexed by slices alone, which all libraries
            support.

    Attributes:
        shape: its shape.
        dtype: the dtype of what is read, which can differ from that of the file.

    Raises:
        TypeError: what is read is not an array of numbers, booleans or strings, or is masked.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.shape: tuple[int, ...] = tuple(source.shape)
        try:
            empty = source[0:0]
        except TypeError as error:
            raise TypeError(_elements.no_numbers(source)) from error
        self.dtype: np.dtype[Any] = as_array("Dataset", empty, on_gpu=False).dtype
        if self.dtype == object:
            raise TypeError(_elements.no_numbers(source))

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Consecutive rows, in one read."""
        return self._read((rows.start, rows.stop))

    def take(self, rows: npt.NDArray[np.int64], axis: int) -> npt.NDArray[Any]:
        """Rows in any order; each is read once, and neighbours together."""
        assert axis == 0
        wanted, places = np.unique(rows, return_inverse=True)
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        found = [
            self._read((int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0)) for run in runs
        ]
        return np.concatenate(found).take(places, 0)

    def elements(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Single elements, by their positions in the flattened array, each read by itself."""
        places = zip(
            *[axis.tolist() for axis in np.unravel_index(positions, self.shape)], strict=True
        )
        found = [self._read(*[(i, i + 1) for i in place]).reshape(1) for place in places]
        return np.concatenate([np.empty(0, self.dtype), *found])

    def _read(self, *bounds: tuple[int, int]) -> npt.NDArray[Any]:
        slices = tuple([slice(*bound) for bound in bounds])
        found = as_array(
            "Dataset", self._source[slices[0] if len(slices) == 1 else slices], on_gpu=False
        )
        expected = *[stop - start for start, stop in bounds], *self.shape[len(bounds) :]
        if found.shape != expected:
            raise ValueError(
                f"Dataset.from_tensor_slices: a {type(self._source).__name__} of shape "
                f"{self.shape} gave an array of shape {found.shape} for the indices {slices}; it "
                "must not change while the dataset is used"
            )
        return found


def as_rows(value: Any) -> Any:
    """`value` as an array whose rows are elements: as `as_leaf`, but one that is not in memory stays where it is."""
    return StoredArray(value) if is_stored(value) else _elements.as_leaf(value)
