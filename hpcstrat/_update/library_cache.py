"""Libraries that the host's C compiler makes, kept in a folder for the next time.

The libraries are run, so no path is trusted. The folder is opened once, and must belong to this
user alone; so must each library. A library's checksum is compared before it is loaded: a file that
a power cut truncated would end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from typing import IO

# Floats must round as NumPy's do: no contraction to fused multiplications, no "fast math". The two
# `-fno` flags turn off only errno, and traps that are not set.
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)
_SECONDS = 10  # until a compiler that hangs is killed; other processes wait for it as long
_LOOK_SECONDS = 0.05
_CHECKSUM_BYTES = 32

_hung: set[str] = set()
"""Compilers that failed after a long time, which this process does not try again."""


def compiler() -> str | None:
    """The path of the C compiler; `None` if there is none."""
    return shutil.which(os.environ.get("CC", "").strip() or "cc")


def load_library(source: str) -> ctypes.CDLL:
    """The library of a C program, compiled if it is missing, by one process for all.

    Raises:
        OSError, RuntimeError, SubprocessError: it cannot be made, kept or loaded.
    """
    cc = compiler()
    if cc is None:
        raise FileNotFoundError("there is no C compiler")
    status = os.stat(cc)
    # An updated compiler, or another kind of machine with the same home, must not find this code.
    facts = (
        source,
        *_FLAGS,
        os.path.realpath(cc),
        str(status.st_size),
        str(status.st_mtime_ns),
        *_processor(),
    )
    name = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
    with _open_folder() as folder:
        # The path goes through the open folder, to which no other user can write. The name has to
        # be in the path: dlopen returns the library it loaded before from the same path, and
        # descriptors get the same numbers again.
        library = f"/proc/self/fd/{folder}/{name}.so"
        if not _is_whole(library):
            _compile_once(os.path.abspath(cc), source, library)
            os.fsync(folder)
        return ctypes.CDLL(library)


def _compile_once(cc: str, source: str, library: str) -> None:
    """Compiles, or waits for the process that compiles and uses its library."""
    if cc in _hung:
        raise TimeoutError(f"{cc} took too long before; this process does not try it again")
    start = time.monotonic()
    try:
        # The system frees the lock of a process that dies.
        with open(f"{library}.lock", "ab", opener=_open) as lock:
            if not _try_lock(lock):
                _wait(lock, library, start + _SECONDS)
                return
            try:
                if not _is_whole(library):
                    _compile(cc, source, library)
            finally:
                pathlib.Path(lock.name).unlink(missing_ok=True)
    except Exception:
        if time.monotonic() - start > _SECONDS / 2:
            _hung.add(cc)
        raise


def _try_lock(lock: IO[bytes]) -> bool:
    """Takes the lock if it is free; whether this process has it now."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _wait(lock: IO[bytes], library: str, until: float) -> None:
    is_over = False
    while not is_over and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        is_over = _try_lock(lock)
        if _is_whole(library):
            return
    raise TimeoutError(
        f"another process, which has locked {os.path.basename(lock.name)}, has compiled nothing"
    )


def _compile(cc: str, source: str, library: str) -> None:
    """Makes the library in a temporary folder, together with the compiler's temporary files."""
    folder = f"{library}.tmp"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    os.mkdir(folder, 0o700)
    try:
        _run([cc, *_FLAGS, "-x", "c", "-", "-o", "made", "-lm"], source, folder)
        with open(f"{folder}/made", "r+b") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(_checksum(file.read()))  # loaders of ELF files ignore what is appended
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{folder}/made", library)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str], source: str, folder: str) -> None:
    # The compiler starts other processes: they are one group, which ends with this block, or by
    # `timeout` if this process is killed. They hold neither this process's output nor its terminal.
    timeout = shutil.which("timeout")
    process = subprocess.Popen(
        [*((timeout, "-s", "KILL", str(_SECONDS + 1)) if timeout else ()), *command],
        cwd=folder,
        env=os.environ | {"TMPDIR": "."},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with process:
        try:
            process.communicate(source.encode(), _SECONDS)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _is_whole(library: str) -> bool:
    """Whether this is a complete library that this user's compiler has made."""
    with contextlib.suppress(OSError), open(library, "rb", opener=_open) as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and _is_own(status):
            content = file.read()
            return content[-_CHECKSUM_BYTES:] == _checksum(content[:-_CHECKSUM_BYTES])
    return False


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).digest()


def _open(path: str, flags: int) -> int:
    # Not blocking: opening a FIFO would wait for its other end.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


@contextlib.contextmanager
def _open_folder() -> Iterator[int]:
    """A block with the descriptor of the folder, to which no other user can write.

    Raises:
        OSError: the folder cannot be made or opened; or an error in the block, with the folder's
            name.
        RuntimeError: this user has no home.
    """
    path = (
        pathlib.Path(os.environ.get("XDG_CACHE_HOME", "").strip() or pathlib.Path.home() / ".cache")
        / "hpcstrat"
    )
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_own(os.fstat(folder)):
            raise PermissionError(
                "others own it or can write to it; remove it, or run `chmod go-w` on it"
            )
        yield folder
    except OSError as error:
        raise OSError(f"{path}: {error}") from error
    finally:
        os.close(folder)


@functools.cache
def _processor() -> tuple[str, ...]:
    """What distinguishes this processor: homes are shared, and each kind needs its own library."""
    names = ("flags", "Features", "model name", "CPU part")
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        first = file.read().partition("\n\n")[0]
        return tuple(
            line for line in first.splitlines() if line.partition("\t")[0].rstrip(": ") in names
        )
    return (platform.machine(), platform.processor(), platform.node())
