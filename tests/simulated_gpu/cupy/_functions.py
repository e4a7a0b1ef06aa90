"""CuPy's functions on arrays, computed by NumPy: those used by the package, tests and docs."""

import functools

import numpy as np

from ._arrays import ndarray
from ._launch import (
    from_dlpack,
    from_host,
    imported,
    is_exported,
    launch,
    launch_and_wait,
    operand,
    to_current_device,
)
from ._streams import current_queue, state

__all__ = ["from_dlpack"]

# ---- elementwise

_ONE = (
    "absolute negative positive exp expm1 exp2 log log1p log2 log10 sqrt square cbrt reciprocal "
    "sign floor ceil trunc rint sin cos tan arcsin arccos arctan sinh cosh tanh isfinite isinf "
    "isnan logical_not invert conjugate signbit"
).split()
_TWO = (
    "add subtract multiply divide true_divide floor_divide remainder power float_power maximum "
    "minimum fmax fmin hypot arctan2 copysign logaddexp equal not_equal less less_equal greater "
    "greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor "
    "left_shift right_shift divmod"
).split()


class ufunc:
    def __init__(self, name):
        self.__name__ = f"cupy_{name}"
        self._name = name
        self._numpy = getattr(np, name)

    def __call__(self, *args, out=None, dtype=None, casting="same_kind", **refused):
        if refused:
            raise TypeError(f"the simulated GPU: cupy.{self._name} does not take {sorted(refused)}")
        nin = self._numpy.nin
        if not nin <= len(args) <= nin + 1:
            raise TypeError(f"Wrong number of arguments for '{self.__name__}'")
        args, (out, *_) = args[:nin], (*args[nin:], out)
        if out is not None and not isinstance(out, ndarray):
            raise TypeError(f"output arguments must be cupy.ndarray, not {type(out)}")
        args = [operand(one) for one in args]
        arrays = [one for one in args if isinstance(one, ndarray)]
        options = {"dtype": dtype} if dtype is not None else {}
        # Numbers are passed as they are, so that dtypes are promoted as in NumPy.
        numbers = [None if isinstance(one, ndarray) else one for one in args]

        def compute(*hosts, **kwargs):
            given = iter(hosts)
            values = [next(given) if one is None else one for one in numbers]
            return self._numpy(*values, casting=casting, **options, **kwargs)

        return launch(compute, *arrays, out=out)

    def __repr__(self):
        return f"<ufunc '{self.__name__}'>"

    def __getattr__(self, name):
        raise AttributeError(f"the simulated GPU does not have {self._name}.{name}")


class _Add(ufunc):
    def reduce(self, array, axis=0, dtype=None, out=None, keepdims=False):
        return array.sum(axis, dtype, out, keepdims)

    def accumulate(self, array, axis=0, dtype=None, out=None):
        return array.cumsum(axis, dtype, out)

    def at(self, a, indices, b):
        """CuPy's, for an array of integers as indices."""
        if not isinstance(indices, ndarray) or indices.dtype.kind not in "iu":
            raise TypeError("the simulated GPU: cupy.add.at takes an array of integers")
        value = b if isinstance(b, ndarray) else asarray(b, a.dtype)
        launch(
            lambda places, host, out: np.add.at(out, places, host),
            indices,
            value,
            out=a,
            reads_out=True,
        )

    def reduceat(self, array, indices, axis=0, dtype=None, out=None):
        """CuPy's: the difference of two sums from the start."""
        if out is not None or dtype is not None:
            raise TypeError("the simulated GPU: cupy.add.reduceat does not take dtype or out")

        def compute(host, starts):
            sums = np.cumsum(host, axis=axis, dtype=host.dtype)
            ends = np.append(starts[1:], host.shape[axis])
            last = np.take(sums, ends - 1, axis)
            first = np.take(sums, np.maximum(starts, 1) - 1, axis)
            form = [1] * host.ndim
            form[axis] = len(starts)
            return last - first * (starts > 0).reshape(form).astype(host.dtype)

        return launch(compute, array, asarray(indices))


ufuncs = {name: ufunc(name) for name in _ONE + _TWO} | {"add": _Add("add")}
ufuncs |= {
    "abs": ufuncs["absolute"],
    "mod": ufuncs["remainder"],
    "conj": ufuncs["conjugate"],
    "pow": ufuncs["power"],
}


def _typed(argument, value):
    """Raises what Cython raises for an argument of a typed function."""
    if not isinstance(value, ndarray):
        expected = "cupy._core.core._ndarray_base"
        raise TypeError(
            f"Argument '{argument}' has incorrect type (expected {expected}, got "
            f"{type(value).__name__})"
        )
    return value


def _check_no_capture():
    if current_queue().captured is not None:
        raise NotImplementedError(
            "calling cuBLAS API during stream capture is currently unsupported"
        )


def _check_product(a, b):
    """As in CuPy kernels multiply whole numbers, and vectors to a number; empty sums are 0."""
    _typed("a", a), _typed("b", b)
    is_number = a.ndim > 0 < b.ndim and a.size == a.shape[-1] and b.size == b.shape[0]
    is_whole = np.result_type(a.dtype, b.dtype).kind in "biu"
    if a.size and b.size and not is_number and not is_whole:
        _check_no_capture()


def matmul(a, b, out=None, **refused):
    """CuPy's, which accepts only CuPy arrays."""
    _check_product(a, b)
    if refused:
        raise TypeError(f"the simulated GPU: cupy.matmul does not take {sorted(refused)}")
    return launch(np.matmul, _typed("a", a), _typed("b", b), out=out)


def dot(a, b, out=None):
    _check_product(a, b)
    return launch(np.dot, _typed("a", a), _typed("b", b), out=out)


def outer(a, b):
    return launch(np.outer, _typed("a", a), _typed("b", b))


# ---- reductions, without `initial` and `where`


def _reduction(name, *options):
    numpys = getattr(np, name)

    def method(self, axis=None, *args, **kwargs):
        taken = dict(zip(options, args, strict=False)) | kwargs
        if unknown := taken.keys() - set(options):
            raise TypeError(f"{name}() got an unexpected keyword argument '{sorted(unknown)[0]}'")
        out = taken.pop("out", None)
        if out is not None:
            _typed("out", out)
        return launch(
            lambda host, **given: numpys(host, axis=axis, **taken, **given), self, out=out
        )

    def function(a, axis=None, *args, **kwargs):
        return getattr(a, name)(axis, *args, **kwargs)

    method.__name__ = function.__name__ = name
    setattr(ndarray, name, method)
    return function


reductions = {
    **{name: _reduction(name, "dtype", "out", "keepdims") for name in ("sum", "prod", "mean")},
    **{name: _reduction(name, "out", "keepdims") for name in ("max", "min", "any", "all")},
    **{name: _reduction(name, "dtype", "out", "ddof", "keepdims") for name in ("std", "var")},
    "cumsum": _reduction("cumsum", "dtype", "out"),
    **{name: _reduction(name, "out", "keepdims") for name in ("argmax", "argmin")},
}


# ---- making arrays


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def _filled(shape, value, dtype, order="C"):
    made = ndarray(shape, dtype, order=order)
    made.fill(value)
    return made


def zeros(shape, dtype=float, order="C"):
    return _filled(shape, 0, dtype, order)


def ones(shape, dtype=float, order="C"):
    return _filled(shape, 1, dtype, order)


def full(shape, fill_value, dtype=None, order="C"):
    if dtype is None:
        dtype = fill_value.dtype if isinstance(fill_value, ndarray) else np.array(fill_value).dtype
    return _filled(shape, fill_value, dtype, order)


def _form(a, dtype, shape):
    _typed("a", a)
    return a.shape if shape is None else shape, a.dtype if dtype is None else dtype


def empty_like(a, dtype=None, order="K", subok=None, shape=None):
    return empty(*_form(a, dtype, shape))


def zeros_like(a, dtype=None, order="K", subok=None, shape=None):
    return zeros(*_form(a, dtype, shape))


def ones_like(a, dtype=None, order="K", subok=None, shape=None):
    return ones(*_form(a, dtype, shape))


def full_like(a, fill_value, dtype=None, order="K", subok=None, shape=None):
    shape, dtype = _form(a, dtype, shape)
    return _filled(shape, fill_value, dtype)


def arange(start, stop=None, step=1, dtype=None):
    first, last = (0, start) if stop is None else (start, stop)
    made = np.arange(first, last, step, dtype)
    return launch(lambda: made)


def eye(N, M=None, k=0, dtype=float, order="C"):
    made = np.eye(N, M, k, dtype)
    return launch(lambda: made)


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    if not isinstance(obj, ndarray) and is_exported(obj):
        obj = imported(obj)
    if isinstance(obj, ndarray):
        order = order or "K"
        if obj.size and obj.data.device_id != state().device:
            made = to_current_device(obj, order)
            made = made if dtype is None else made.astype(dtype, copy=False)
        else:
            made = obj.astype(obj.dtype if dtype is None else dtype, order=order, copy=bool(copy))
    elif isinstance(obj, (list, tuple)) and _has_arrays(obj):
        made = stack([array(one) for one in obj])
        made = made if dtype is None else made.astype(dtype, copy=False)
    else:
        made = from_host(obj, dtype, order or "K")
        if blocking:
            current_queue().synchronize()
    return made.reshape((1,) * (ndmin - made.ndim) + made.shape) if made.ndim < ndmin else made


def _has_arrays(sequence):
    return any(
        _has_arrays(one) if isinstance(one, (list, tuple)) else isinstance(one, ndarray)
        for one in sequence
    )


def asarray(a, dtype=None, order=None, *, blocking=False):
    return array(a, dtype, copy=False, order=order, blocking=blocking)


def ascontiguousarray(a, dtype=None):
    made = _typed("a", a).astype(a.dtype if dtype is None else dtype, order="C", copy=False)
    return made if made.ndim else made.reshape(1)


def asfortranarray(a, dtype=None):
    made = _typed("a", a).astype(a.dtype if dtype is None else dtype, order="F", copy=False)
    return made if made.ndim else made.reshape(1)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    return (
        a.get(stream, order, out, blocking)
        if isinstance(a, ndarray)
        else np.asarray(a, order=order)
    )


def copyto(dst, src, casting="same_kind"):
    dst[...] = src


# ---- shapes


def broadcast_to(array, shape, subok=False):
    array = array if isinstance(array, ndarray) else asarray(array)
    return array.view_of(
        np.lib.stride_tricks.as_strided(array.host, *_broadcast(array.host, shape))
    )


def _broadcast(host, shape):
    to = np.broadcast_to(host, shape)
    return to.shape, to.strides


def _of_one(name, how=launch):
    numpys = getattr(np, name)

    def function(a, *args, **kwargs):
        return how(lambda host: numpys(host, *args, **kwargs), _typed("a", a))

    return function


repeat, roll, sort = map(_of_one, ("repeat", "roll", "sort"))
nonzero, flatnonzero = (_of_one(name, launch_and_wait) for name in ("nonzero", "flatnonzero"))


def _by_method(name):
    return lambda a, *args, **kwargs: getattr(a, name)(*args, **kwargs)


reshape, transpose, ravel, clip = map(_by_method, ("reshape", "transpose", "ravel", "clip"))


def _of_several(numpys, arrays, axis, out=None):
    return launch(lambda *hosts, **given: numpys(hosts, axis=axis, **given), *arrays, out=out)


def concatenate(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    if dtype is not None:
        raise TypeError("the simulated GPU: cupy.concatenate does not take dtype")
    return _of_several(np.concatenate, [operand(one) for one in tup], axis, out)


def stack(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    return _of_several(np.stack, [_typed("a", one) for one in tup], axis, out)


def diff(a, n=1, axis=-1, prepend=None, append=None):
    ends = {
        name: value
        for name, value in (("prepend", prepend), ("append", append))
        if value is not None
    }
    return launch(lambda host: np.diff(host, n, axis, **ends), a)


def where(condition, x=None, y=None):
    if x is None and y is None:
        return nonzero(condition)
    args = [operand(one) for one in (condition, x, y)]
    numbers = [None if isinstance(one, ndarray) else one for one in args]  # no array: it may go

    def compute(*hosts):
        given = iter(hosts)
        return np.where(*[next(given) if one is None else one for one in numbers])

    return launch(compute, *[one for one in args if isinstance(one, ndarray)])


def argsort(a, axis=-1, kind=None):
    if kind not in (None, "stable"):
        raise ValueError(f"kind is not supported: {kind}")
    return launch(lambda host: np.argsort(host, axis, kind="stable"), _typed("a", a))


def take(a, indices, axis=None, out=None, mode=None):
    return launch(
        lambda host, places: np.take(host, places, axis), _typed("a", a), asarray(indices)
    )


def may_share_memory(a, b, max_work=None):
    return bool(np.may_share_memory(a.host, b.host))


def shares_memory(a, b, max_work=None):
    return bool(np.shares_memory(a.host, b.host))


def array_equal(a1, a2, equal_nan=False):
    return launch(
        lambda x, y: np.array_equal(x, y, equal_nan=equal_nan), _typed("a1", a1), _typed("a2", a2)
    )


def allclose(a, b, rtol=1e-05, atol=1e-08, equal_nan=False):
    return launch(
        lambda x, y: np.allclose(x, y, rtol, atol, equal_nan), _typed("a", a), _typed("b", b)
    )


# ---- methods


def _copy(self, order="C"):
    if self.size and self.data.device_id != state().device:
        return to_current_device(self, order)
    return launch(lambda host: np.array(host, order=order), self)


def _astype(self, dtype, order="K", casting=None, subok=None, copy=True):
    if casting is not None:
        raise TypeError("casting is not supported yet")
    dtype = np.dtype(dtype)
    is_in_order = {"C": self.flags.c_contiguous, "F": self.flags.f_contiguous}.get(order, True)
    if not copy and dtype == self.dtype and is_in_order:
        return self
    return launch(lambda host: np.array(host, dtype, order=order), self)


def _fill(self, value):
    if isinstance(value, ndarray):
        if value.ndim:
            raise ValueError("non-scalar cupy.ndarray cannot be used for fill")
        _write(self, value)
        return
    if (isinstance(value, np.ndarray) and value.ndim) or isinstance(value, (list, tuple)):
        raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
    number = value[()] if isinstance(value, np.ndarray) else value

    def compute(out):
        out[...] = number

    launch(compute, out=self)


def _write(target, value, key=Ellipsis, indices=()):
    def compute(host, *places, out):
        out[_filled_in(key, places)] = host

    launch(compute, value, *indices, out=target)


def _key(key):
    """A key with `_Place` for each array in it, and the arrays."""
    indices = []

    def taken(one):
        if isinstance(one, (slice, int, np.integer)) or one is None or one is Ellipsis:
            return one
        if isinstance(one, (list, np.ndarray, ndarray, bool, np.bool_)) or is_exported(one):
            if isinstance(one, list) and not one:
                one = np.empty(0, np.intp)
            indices.append(asarray(one))
            return _Place
        raise IndexError(f"Unsupported index {one!r}")

    keys = tuple(map(taken, key)) if isinstance(key, tuple) else (taken(key),)
    return keys, indices


class _Place:
    """Marks the place of an array in a key."""


def _filled_in(key, places):
    if key is Ellipsis:
        return key
    given = iter(places)
    return tuple(next(given) if one is _Place else one for one in key)


def _getitem(self, key):
    keys, indices = _key(key)
    if not indices:
        if Ellipsis not in keys:
            keys = (*keys, Ellipsis)  # so that NumPy returns an array, never a number
        return self.view_of(self.host[keys])
    how = launch_and_wait if any(one.dtype.kind == "b" for one in indices) else launch
    return how(lambda host, *places: host[_filled_in(keys, places)], self, *indices)


def _setitem(self, key, value):
    keys, indices = _key(key)
    if not isinstance(value, ndarray) and is_exported(value):
        value = imported(value)
    if not indices:
        view = _getitem(self, key)
        if isinstance(value, ndarray):
            _write(view, value)
        else:
            view.fill(value)
        return
    _write(self, value if isinstance(value, ndarray) else asarray(value), keys, indices)


def _is_above(other):
    """Whether another operand implements the operation."""
    return getattr(other, "__array_ufunc__", ()) is None or (
        not isinstance(other, (ndarray, np.ndarray, np.generic))
        and not hasattr(other, "__array_ufunc__")
        and getattr(other, "__array_priority__", 0) > ndarray.__array_priority__
    )


def _operators():
    pairs = (
        "add:add sub:subtract mul:multiply truediv:true_divide pow:power floordiv:floor_divide "
        "mod:remainder and:bitwise_and or:bitwise_or xor:bitwise_xor lshift:left_shift "
        "rshift:right_shift divmod:divmod lt:less le:less_equal gt:greater ge:greater_equal "
        "eq:equal ne:not_equal"
    )

    def make(function):
        def forward(self, other):
            return NotImplemented if _is_above(other) else function(self, other)

        def reflected(self, other):
            return NotImplemented if _is_above(other) else function(other, self)

        def in_place(self, other):
            return NotImplemented if _is_above(other) else function(self, other, out=self)

        return forward, reflected, in_place

    for pair in pairs.split():
        name, meant = pair.split(":")
        forward, reflected, in_place = make(ufuncs[meant])
        setattr(ndarray, f"__{name}__", forward)
        if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(ndarray, f"__r{name}__", reflected)
            if name != "divmod":
                setattr(ndarray, f"__i{name}__", in_place)
    forward, reflected, _ = make(np.matmul)  # NumPy's, which calls back `__array_ufunc__`
    ndarray.__matmul__ = forward
    ndarray.__rmatmul__ = reflected
    for name in ("negative", "positive", "absolute", "invert"):
        one = ufuncs[name]
        short = name if name == "invert" else name[:3]
        setattr(ndarray, f"__{short}__", lambda self, one=one: one(self))


_operators()
for _name, _method in {
    "copy": _copy,
    "astype": _astype,
    "fill": _fill,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "dot": lambda self, b, out=None: dot(self, b, out),
    "clip": lambda self, min=None, max=None, out=None: launch(
        lambda host, **given: np.clip(host, min, max, **given), self, out=out
    ),
    "repeat": lambda self, repeats, axis=None: repeat(self, repeats, axis),
    "take": lambda self, indices, axis=None, out=None: take(self, indices, axis, out),
    "argsort": lambda self, axis=-1, kind=None: argsort(self, axis, kind),
    "nonzero": lambda self: nonzero(self),
    "flatten": lambda self, order="C": self.copy(order=order).reshape(-1, order=order),
    "conj": lambda self: ufuncs["conjugate"](self) if self.dtype.kind == "c" else self,
    "round": lambda self, decimals=0: launch(lambda host: np.round(host, decimals), self),
}.items():
    setattr(ndarray, _name, _method)

# ---- NumPy's functions with CuPy's arrays


def dispatched_ufunc(numpys, method, inputs, kwargs):
    """See `ndarray.__array_ufunc__`: of all that has `__cuda_array_interface__`."""
    import cupy

    out = kwargs.pop("out", None)
    if out is not None:
        if len(out) != 1:
            raise ValueError("The 'out' parameter must have exactly one array value")
        kwargs["out"] = out[0]
    try:
        function = getattr(cupy, numpys.__name__)
    except AttributeError:
        raise AttributeError(
            f"the simulated GPU does not have numpy.{numpys.__name__} of its arrays"
        ) from None
    for one in inputs:
        if not isinstance(
            one, (ndarray, np.ndarray, bool, int, float, complex, np.generic)
        ) and not is_exported(one):
            return NotImplemented
    if method == "__call__":
        return function(*inputs, **kwargs)
    return getattr(function, method)(*inputs, **kwargs)


def dispatched_function(numpys, args, kwargs):
    """See `ndarray.__array_function__`: CuPy's function of the same name."""
    import cupy

    home = functools.reduce(getattr, numpys.__module__.split(".")[1:], cupy)
    return getattr(home, numpys.__name__)(*args, **kwargs)


def size(a, axis=None):
    return a.size if axis is None else a.shape[axis]


def shape(a):
    return a.shape


def ndim(a):
    return a.ndim
