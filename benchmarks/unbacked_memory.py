"""Arrays whose elements are neither stored nor computed: a thousand ranks' arrays of any size."""

import contextlib
from unittest import mock

import numpy as np

from hpcstrat._memory import host_limits
from hpcstrat._memory.shared_file import SharedFile
from hpcstrat._storage.base import Storage
from hpcstrat._update.host_update import HostUpdate

LARGE = 1 << 18  # arrays of more bytes than this have no pages
SMALL = 1 << 10  # except for parts of up to this many bytes, such as records


class Unbacked(np.ndarray):
    """An array that has a shape, a dtype and an address, and no pages.

    What is written to it is dropped, and it is never read.
    """

    def __setitem__(self, where, value):
        if self.nbytes <= SMALL:
            super().__setitem__(where, value)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        if out is not None:
            return out[0]
        shape = np.broadcast_shapes(*[np.shape(one) for one in inputs])
        return np.empty(shape, kwargs.get("dtype") or inputs[0].dtype).view(Unbacked)

    def copy(self, order="C"):
        return np.empty_like(self)


@contextlib.contextmanager
def unbacked_memory():
    """In this block the library's larger arrays are `Unbacked`, and updates are left out."""
    make_empty, make_zeros, make_file = np.empty, np.zeros, SharedFile.__init__

    def empty(shape, dtype=float, *args, **kwargs):
        array = make_empty(shape, dtype, *args, **kwargs)
        return array.view(Unbacked) if array.nbytes > LARGE else array

    def zeros(shape, dtype=float, *args, **kwargs):
        array = make_zeros(shape, dtype, *args, **kwargs)
        return array.view(Unbacked) if array.nbytes > LARGE else array

    def unbacked(self, *args):
        make_file(self, *args)
        self.array = self.array.view(Unbacked)

    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (np, "empty", empty),
            (np, "zeros", zeros),
            (SharedFile, "__init__", unbacked),
            (SharedFile, "commit", lambda *_: None),
            (host_limits, "available_memory", lambda: 1 << 60),
            (Storage, "write", lambda *_: None),
            (HostUpdate, "run", lambda *_, **__: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield
