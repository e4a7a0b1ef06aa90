"""Kernels as loops in C, which the host's compiler makes while the program runs.

NumPy's calls pass over a chunk a dozen times, from cache, and take four times as long as memory
does. The loop computes the same bits, which is tested on a few numbers when it is loaded. Where
none can be made, kernels are run by NumPy.

One rank of a host compiles, in an update that all ranks make, and leaves the library in a folder
that they know:

    use       first rank of the host        other ranks
    first     compiles, and loads it
    second                                  load it: the first use is over on all
    third     removes it
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import operator
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._process import reports, worlds
from hpcstrat._transports.reduction import CHUNK, reduce_chunk
from hpcstrat._update.formula import Kernel

FEWEST = 100_000
"""The fewest elements of an update worth compiling at once: it takes 0.2 seconds."""
FEWEST_UPDATES = 1_000
"""Updates by the same few messages after which smaller ones are compiled, too. These gain
microseconds in each step; with messages that are new in each step they would lose more."""
USES = 3
"""`prepare` is called before so many uses of a kernel by the same updates."""
SECONDS = 10
"""After which a compiler that hangs is killed: the other ranks wait meanwhile."""

LANES = 16
"""Sums of squares that are kept in parallel; see `loop.c`."""

Call: TypeAlias = "Callable[[ctypes.c_void_p, int, int], object]"
"""Is called with the fields of a `Table`."""

# Floats must round as NumPy's do: no contraction to fused multiplications, no "fast math". The two
# `-fno` flags turn off only errno, and traps that are not set. Files that a compiler adds at the
# start may change how the whole process rounds.
_FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-trapping-math", "-shared", "-fPIC", "-nostartfiles", "-x", "c", "-"),
)
_TYPES = {"float32": "float", "float64": "double"}
_loops: dict[tuple[Kernel, np.dtype[Any]], Loops | None] = {}
_left: dict[tuple[Kernel, np.dtype[Any]], pathlib.Path] = {}
"""The libraries that this rank has left for others."""
_broken: set[str | None] = set()
"""Compilers that have failed, which this process does not try again: one may take seconds."""


class Loops(NamedTuple):
    """A kernel's loops. Each is bound to an array of float64 before it is called.

    Attributes:
        update: applies the kernel, whose numbers are in the array.
        squares: writes the sum of the squares of the summed messages' elements, of each row.
    """

    update: Callable[[Array], Call]
    squares: Callable[[Array], Call]


class Table(NamedTuple):
    """The arrays that a loop goes through.

    Attributes:
        rows: points to a row for each run; see `loop.c`.
        runs: how many rows there are.
        messages: how many messages.
    """

    rows: ctypes.c_void_p
    runs: int
    messages: int


def table(runs: Sequence[Sequence[Array]], messages: int) -> Table:
    """The table of runs: of each its arrays, last those in each message."""
    rows = [[arrays[0].size, *(array.ctypes.data for array in arrays)] for arrays in runs]
    return Table(np.array(rows, np.int64).ctypes.data_as(ctypes.c_void_p), len(rows), messages)


def compiler() -> str | None:
    """The path of the C compiler; `None` if there is none."""
    return shutil.which(_command())


def _command() -> str:
    return os.environ.get("CC", "").strip() or "cc"


def loops(kernel: Kernel, dtype: np.dtype[Any]) -> Loops | None:
    """The loops of a kernel for variables of this dtype; `None` if `prepare` has made none."""
    return _loops.get((kernel, dtype))


def prepare(kernel: Kernel, dtype: np.dtype[Any], use: int, is_shared: bool) -> None:
    """Makes or loads loops, as in the table above. Any error means that there are none.

    Args:
        kernel: the kernel.
        dtype: the dtype.
        use: how many uses of the kernel this is, counted from 1.
        is_shared: whether all ranks of this host make this update; else this rank compiles.
    """
    key = kernel, dtype
    if dtype.name not in _TYPES:
        return
    local = worlds.local()
    is_first = not is_shared or local is None or local[0] == 0
    if is_first and use == 1 and (key not in _loops or (is_shared and key not in _left)):
        try:
            if compiler() not in _broken:
                _loops[key] = _make(kernel, dtype, is_shared)
        except Exception as error:  # perhaps on one rank only: it must not interrupt the update
            _broken.add(compiler())
            _say(
                f"no C loop can be made ({type(error).__name__}: {error}). A C compiler is found "
                "by CC or as cc, and its library is loaded from TMPDIR"
            )
        if is_shared:  # an empty file, if there is no library: the other ranks need not say so, too
            with contextlib.suppress(OSError):
                _leave(key).touch()
    elif is_first and use == USES and key in _left:
        with contextlib.suppress(OSError):  # the folder has others, or both are gone
            _left[key].unlink()
            _left[key].parent.rmdir()
    elif not is_first and use > 1 and key not in _loops:
        _loops[key] = None
        with contextlib.suppress(Exception):  # the first rank has said why
            path = _path(key)
            if not path.exists():
                _say(f"no C loop is in {path.parent}. All ranks of a host need the same TMPDIR")
            _loops[key] = _load(path, kernel, dtype)


@functools.cache  # not once for every dtype
def _say(why: str) -> None:
    reports.say(
        f"hpcstrat: NumPy makes the updates, which takes several times as long, because {why}; "
        "HPCSTRAT_COMPILE=0 makes no loops, and silences this"
    )


def _make(kernel: Kernel, dtype: np.dtype[Any], is_shared: bool) -> Loops:
    with tempfile.TemporaryDirectory(prefix="hpcstrat-") as folder:
        made = pathlib.Path(folder, "loop.so")
        _compile(source(kernel, dtype.name), made)
        if is_shared:
            made = made.replace(_leave((kernel, dtype)))
        return _load(made, kernel, dtype)


def _leave(key: tuple[Kernel, np.dtype[Any]]) -> pathlib.Path:
    """The path for a library that this rank leaves for others, and until then for itself."""
    path = _path(key)
    path.parent.mkdir(0o700, exist_ok=True)
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    _left[key] = path
    return path


def _path(key: tuple[Kernel, np.dtype[Any]]) -> pathlib.Path:
    """Where the library of a kernel is for all ranks of this host: nobody else can guess it."""
    world, (kernel, dtype) = worlds.start(), key
    folder = f"hpcstrat-{world.seed:016x}-{world.hosts[world.rank]}"
    name = hashlib.blake2b(source(kernel, dtype.name).encode(), digest_size=16).hexdigest()
    return pathlib.Path(tempfile.gettempdir(), folder, f"{name}.so")


def _compile(text: str, made: pathlib.Path) -> None:
    cc = compiler()
    if cc is None:
        raise FileNotFoundError(f"there is no {_command()}")
    # `timeout` ends a compiler that hangs, even if this process is killed. The compiler starts
    # other processes: they are a group of their own, and Ctrl-C is for the program.
    process = subprocess.Popen(
        ["timeout", "-s", "KILL", str(SECONDS), os.path.abspath(cc), *_FLAGS, "-o", made.name],
        cwd=made.parent,
        env=os.environ | {"TMPDIR": "."},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            _, errors = process.communicate(text.encode())
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == -signal.SIGKILL:
        raise TimeoutError(f"{cc} was killed, or took more than {SECONDS} seconds")
    if process.returncode:
        said = errors.decode(errors="replace").strip().splitlines()
        raise OSError(f"{cc} ended with status {process.returncode}: {' '.join(said[:3])}")


def source(kernel: Kernel, dtype: str) -> str:
    """The C code of a kernel's loop.

    For SGD with momentum, for example, of float32, there are these definitions:

        TYPE     float
        COLUMNS  3
        NUMBERS  const number number_0 = given[0];
                 const number number_1 = given[1];
        OPEN     number *restrict const all_value = (number *)row[1] + start;
                 number *restrict const all_slot_0 = (number *)row[2] + start;
        LOAD     number value = all_value[i];
                 number slot_0 = all_slot_0[i];
        BODY     see `formula.py`
        STORE    all_value[i] = value;
                 all_slot_0[i] = slot_0;
    """
    arrays, numbers = kernel.arrays, range(kernel.numbers)
    opened = "number *restrict const all_{} = (number *)row[{}] + start;"
    definitions = {
        "TYPE": [_TYPES[dtype]],
        "COLUMNS": [str(1 + len(arrays))],
        "CHUNK": [str(CHUNK)],
        "LANES": [str(LANES)],
        "NUMBERS": [f"const number number_{i} = given[{i}];" for i in numbers],
        "OPEN": [opened.format(name, column) for column, name in enumerate(arrays, 1)],
        "LOAD": [f"number {name} = all_{name}[i];" for name in arrays],
        "BODY": kernel.body.splitlines(),
        "STORE": [f"all_{name}[i] = {name};" for name in arrays],
    }
    lines = [f"#define {name} {' '.join(texts)}" for name, texts in definitions.items()]
    whole = pathlib.Path(__file__).with_name("loop.c").read_text()
    before, after = whole.split("// KERNEL")
    return before + "\n".join(lines) + "\n// KERNEL" + after


def _load(path: pathlib.Path, kernel: Kernel, dtype: np.dtype[Any]) -> Loops:
    library = ctypes.CDLL(str(path))
    loops = Loops(*[functools.partial(_bind, one) for one in (library.update, library.squares)])
    if not _matches_numpy(loops, kernel, dtype):
        raise OSError(f"{compiler()}: its loop for {kernel.name} computes other values than NumPy")
    return loops


def _bind(function: Any, array: Array) -> Call:
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = (pointer, pointer, count, count), None
    # A pointer keeps its array. Finding the address in each step would cost as much as NumPy's
    # operations on a small update.
    return functools.partial(function, array.ctypes.data_as(pointer))


def sum_of_squares(array: Array) -> float:
    """The sum of the squares of a flat array of a chunk, in float64, in the order of `loop.c`."""
    squares = np.abs(array).astype(np.float64)
    squares *= squares
    whole = squares.size // LANES * LANES
    lanes = np.zeros(LANES)
    lanes += np.add.reduce(squares[:whole].reshape(-1, LANES), axis=0)
    lanes[: squares.size - whole] += squares[whole:]
    # Not `sum`, which compensates rounding errors from Python 3.12 on.
    return functools.reduce(operator.add, lanes.tolist())


def _matches_numpy(loops: Loops, kernel: Kernel, dtype: np.dtype[Any]) -> bool:
    """Whether the loops compute the bits of NumPy's operations, except for those of a nan."""
    random = np.random.default_rng(0)
    special = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-6, 6e4)
    arrays = random.standard_normal((1 + kernel.slots + 4, 1009))  # four messages: all that can be
    arrays[:, ::7] = random.choice(special, arrays[:, ::7].shape)
    given = [*arrays.astype(dtype)]
    numbers = random.uniform(0.1, 1, kernel.numbers)
    changed, messages = given[:-4], given[-4:]
    copies, squares = [array.copy() for array in changed], np.empty(1)
    with np.errstate(all="ignore"):
        loops.update(numbers)(*table([given], 4))
        gradient = np.empty_like(copies[0])
        reduce_chunk(gradient, messages, ReduceOp.SUM)
        kernel.run([*numbers], copies[0], gradient, copies[1:])
        numbers_only = [np.nan_to_num(array, posinf=1, neginf=1) for array in messages]
        loops.squares(squares)(*table([numbers_only], 4))
        reduce_chunk(gradient, numbers_only, ReduceOp.SUM)
    return squares[0] == sum_of_squares(gradient) and all(
        np.array_equal(one, other, equal_nan=True)
        and np.array_equal(np.signbit(one[one == 0]), np.signbit(other[other == 0]))
        for one, other in zip(changed, copies, strict=True)
    )
