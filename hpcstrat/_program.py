"""Helpers for programs: this rank's index, decisions of all ranks, host copies of arrays."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TypeVar, overload

import numpy as np

from hpcstrat._agreement.collective import collective
from hpcstrat._agreement.records import signature_of
from hpcstrat._core import gpu, nests
from hpcstrat._core.arrays import host_copy
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import DistributedValues
from hpcstrat._process import launchers, worlds
from hpcstrat._replicas import contexts
from hpcstrat._strategies.function import function_of
from hpcstrat._transports.connection import connect, count_ranks, find_connected
from hpcstrat._transports.host import HostCommunicator
from hpcstrat._variable.variable import Variable

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_HOUR = 3600.0  # seconds


def rank() -> int:
    """This process's index among all ranks, 0..size-1. Does not start MPI.

    Examples:
        With one rank; each of two writes its own file, `part-0.txt` and `part-1.txt`:

        >>> f"part-{hs.rank()}.txt"
        'part-0.txt'
    """
    if (world := worlds.find()) is not None:
        return world.rank
    launcher = launchers.find()
    return 0 if launcher is None else launcher.rank


def size() -> int:
    """The number of ranks. Starts MPI only if the launcher does not tell.

    Examples:
        With one rank; of two, rank 0 reads `a.txt` and `c.txt`, rank 1 reads `b.txt`:

        >>> ["a.txt", "b.txt", "c.txt"][hs.rank() :: hs.size()]
        ['a.txt', 'b.txt', 'c.txt']
    """
    return count_ranks()


def local_rank() -> int:
    """This process's index among the ranks of its host, 0..local_size-1.

    Starts MPI only if the launcher does not tell.

    Examples:
        The GPU that a rank gets by default, the first on each host for the host's first rank:

        >>> f"GPU:{hs.local_rank()}"
        'GPU:0'
    """
    return _local()[0]


def local_size() -> int:
    """The number of ranks on this host. Starts MPI only if the launcher does not tell.

    Examples:
        The cores of a host with 16, for each of its ranks:

        >>> 16 // hs.local_size()
        16
    """
    return _local()[1]


def _local() -> tuple[int, int]:
    told = worlds.local()
    if told is None:
        connect()
        world = worlds.start()
        told = world.local_rank, world.local_size
    return told


def is_lead() -> bool:
    """Whether this is rank 0. Does not start MPI.

    Examples:
        >>> if hs.is_lead():
        ...     print("written once, whatever the number of ranks")
        written once, whatever the number of ranks
    """
    return rank() == 0


@collective(communicator_of=lambda _: connect())
def on_lead(fn: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Runs `fn(*args, **kwargs)` on rank 0 alone; all ranks return its result.

    Collective: all ranks call this.

    For work that one process must do while all others wait: a download, a file, an evaluation. They
    wait an hour longer than elsewhere before they report that rank 0 is missing.

    Args:
        fn: must make no collective call, since only rank 0 runs it.
        *args: its arguments. Those of the other ranks are ignored.
        **kwargs: the same, by name.

    Returns:
        The function's result, or an equal object.

    Raises:
        Exception: the function's own exception on rank 0, raised on every rank.
        TypeError: its result cannot be pickled.

    Examples:
        One download, whose result all ranks get:

        >>> def download(url):
        ...     print("by rank 0 alone:", url)
        ...     return {"rows": 150}
        >>> hs.on_lead(download, "https://example.org/flowers.csv")
        by rank 0 alone: https://example.org/flowers.csv
        {'rows': 150}
    """
    communicator, result = _connect(), None
    if communicator.rank == 0:
        if not callable(fn):
            raise TypeError(
                f"{current_call()}: fn is {fn!r}; pass the function itself and its arguments, as "
                "in on_lead(np.save, path, array)"
            )
        with extend_timeout(_HOUR):
            result = fn(*args, **kwargs)
    return communicator.broadcast_obj(result)


@names_call("broadcast_object")
def broadcast_object(obj: Any) -> Any:
    """Rank 0's object, on every rank; the other ranks' arguments are ignored.

    Collective: all ranks call this.

    Raises:
        TypeError: the object cannot be pickled.

    Examples:
        All ranks get rank 0's choice, whatever they pass themselves:

        >>> hs.broadcast_object({"seed": 7, "host": f"of rank {hs.rank()}"})
        {'seed': 7, 'host': 'of rank 0'}
    """
    return _connect().broadcast_obj(obj)


@collective(communicator_of=lambda _: connect())
def any_rank(flag: Any) -> bool:
    """Whether `flag` is true on any rank; every rank gets the same answer.

    Collective: all ranks call this.

    Args:
        flag: a bool, 0 or 1; also an array of any library with one element of `bool`.

    Raises:
        TypeError: it is something else, such as a distributed value.
        ValueError: it is an array of several elements.

    Examples:
        A loop that all ranks leave in the same step, as soon as one of them has too large an error:

        >>> errors = [0.1, 0.2, 0.7, 0.3]
        >>> for step, error in enumerate(errors):
        ...     if hs.any_rank(error > 0.5):
        ...         break
        >>> step
        2
    """
    # Python finds nearly everything true, such as "no" and an object whose attribute was meant. A
    # distributed value raises its own error, in `bool`.
    is_bool = isinstance(flag, (bool, DistributedValues)) or "bool" in str(
        getattr(flag, "dtype", "")
    )
    if not is_bool and not (isinstance(flag, (int, np.integer)) and flag in (0, 1)):
        raise TypeError(
            f"{current_call()}: flag is {flag!r}; it must be True or False, as of `count > 0`"
        )
    return bool(_connect().highest(bool(flag)))


def _connect() -> HostCommunicator:
    """All ranks, for values on the host, which differ from step to step."""
    context = contexts.current.get()
    if context is not None and context.group.stream is not None:  # also that of a merge_call
        context.group.stream.refuse_in_graph(current_call())
    return connect()


def barrier() -> None:
    """Waits until every rank has arrived here. Collective: all ranks call this.

    Examples:
        All ranks read a value only after rank 0 has written it:

        >>> notes = []
        >>> if hs.is_lead():
        ...     notes.append("ready")  # in a program, a file
        >>> hs.barrier()
        >>> notes
        ['ready']
    """
    # Without the wrapper of other calls, whose cost would show: nothing here can fail on one rank
    # alone.
    connect().exchange(signature_of("barrier"))


def extend_timeout(seconds: float) -> AbstractContextManager[None]:
    """A context manager that delays the stall report and the time-out on every rank.

    If a rank does not arrive where others wait, they report it after `HPCSTRAT_STALL_SECONDS` (60)
    and end the job after `HPCSTRAT_TIMEOUT_SECONDS` (600). Use this around work that is known to
    take long on one rank, such as `if hs.is_lead(): evaluate()`: while that rank is inside, both
    come `seconds` later. It does not start MPI and does not communicate; before the first strategy
    or collective call it has no effect.

    Args:
        seconds: a number, not negative; `math.inf` for no limit.

    Raises:
        ValueError: `seconds` is negative or not a number.

    Examples:
        The others wait for rank 0, here for an hour more:

        >>> with hs.extend_timeout(3600):
        ...     if hs.is_lead():
        ...         print("evaluated")
        evaluated
        >>> hs.barrier()
        >>> hs.extend_timeout(-1)
        Traceback (most recent call last):
        ValueError: extend_timeout: seconds is -1; it must be a number from 0 up
    """
    try:
        number = float(seconds)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= 0:
        raise ValueError(f"extend_timeout: seconds is {seconds!r}; it must be a number from 0 up")
    # Not `connect`: the ranks may be anywhere, and this call is not collective.
    communicator = find_connected()
    if communicator is None or communicator.watchdog is None:
        return nullcontext()
    return communicator.watchdog.extend_timeout(number)


def progress(iterable: Iterable[_Item], **tqdm_arguments: Any) -> Iterable[_Item]:
    """`iterable` with a `tqdm` progress bar on rank 0; unchanged on other ranks.

    Where standard error, or that of `mpirun`, is not a terminal, it writes plain lines: at the
    start, at the end, and every 30 seconds. `file=sys.stderr` shows the bar there too, as in a
    notebook.

    Args:
        iterable: the items to iterate over.
        **tqdm_arguments: arguments of `tqdm`.

    Raises:
        TypeError: `iterable` cannot be iterated over.

    Examples:
        >>> sum(hs.progress(range(5), desc="steps"))
        10
    """
    if not hasattr(type(iterable), "__iter__") and not hasattr(type(iterable), "__getitem__"):
        raise TypeError(
            f"progress: iterable is {iterable!r}; pass something to iterate over, such as range(5)"
        )
    if not is_lead():
        return iterable
    from tqdm import tqdm  # here, because it would add 20 ms to `import hpcstrat`

    # tqdm ignores its variable where it gets an argument, and sees only the pipe of `mpirun`.
    arguments = {"disable": bool(os.environ.get("TQDM_DISABLE")), **tqdm_arguments}
    own: Any = sys.stderr
    is_on_terminal = own is not None and not own.closed and own.isatty()
    if is_on_terminal or launchers.is_on_terminal() or "file" in arguments:
        return tqdm(iterable, **arguments)

    class Rare(tqdm):  # `set_postfix` and its like would add a line in each step
        def refresh(self, *args: Any, **options: Any) -> Any:
            if time.time() - getattr(self, "last_print_t", 0) >= self.mininterval:
                return super().refresh(*args, **options)

    arguments = {"mininterval": 30.0, "maxinterval": 30.0, **arguments}
    return Rare(iterable, file=_Lines(), **arguments)


class _Lines:
    """What a bar writes to, as a file, where it is to become lines of a log."""

    def write(self, text: str) -> None:
        # Each state of the bar starts with a carriage return; other writes move the cursor.
        if text.startswith("\r") and (line := text.strip()):
            with suppress(Exception):  # the program may have closed it
                print(line, file=sys.stderr, flush=True)

    def flush(self) -> None: ...


def asnumpy(x: Any) -> Any:
    """A host copy of an array of any library, a variable or a number; of each leaf of a nest.

    Raises:
        TypeError: a leaf is an array without values, such as a sparse tensor.

    Examples:
        >>> hs.asnumpy({"weights": hs.Variable([1.0, 2.0]), "step": 3, "name": "first"})
        {'weights': array([1., 2.], dtype=float32), 'step': array(3), 'name': 'first'}
    """
    return nests.map_leaves(_asnumpy, x)


def _asnumpy(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, str):
        return leaf
    if isinstance(leaf, Variable):
        return leaf.numpy()
    return host_copy("asnumpy", leaf)


@overload
def function(fn: _Function) -> _Function: ...
@overload
def function(fn: None = None, **options: Any) -> Callable[[_Function], _Function]: ...
def function(fn: Any = None, **options: Any) -> Any:
    """Replaces `tf.function`: on GPUs a step becomes a CUDA graph, as in `jax.jit`.

    Decorate the function that `Strategy.run` runs, or one that calls `run`; its lines around `run`
    run in each call. `run` is collective then: all ranks call it.

    The replica function is captured once for each kind of call: shapes, dtypes and strides of
    arrays, type and value of numbers and strings, identity of other objects. Its Python code runs
    three times, then never: globals, attributes and closures are those of the capture, prints are
    not repeated, writes to arguments are lost. What a graph cannot have raises, with what to write
    instead. On hosts, and with `HPCSTRAT_CHECK=1`, it runs as it is.

    Results are copies. Optimizers count their steps and take the learning rate anew in each call; a
    generator of `cupy.random.default_rng` that was made before draws others. The 8 kinds of the
    last calls are kept, and with each all arrays that were there at its capture.

    Args:
        fn: the function; `@function` and `@function()` both work.
        **options: options of `tf.function`, accepted and ignored.

    Raises:
        TypeError: `fn` is not callable.
        RuntimeError: by `Strategy.run`, on all ranks: a graph cannot have what the function does;
            nothing was done. Also from CuPy, as where it reads an array on the host.

    Examples:
        >>> @hs.function(jit_compile=True)
        ... def double(x):
        ...     return 2 * x
        >>> double(21)
        42
    """
    del options
    if fn is not None and not callable(fn):
        raise TypeError(f"function: fn is {fn!r}; pass a function, as `@function` does")
    if fn is None:
        return function
    return function_of(fn) if gpu.has_cupy() else fn
