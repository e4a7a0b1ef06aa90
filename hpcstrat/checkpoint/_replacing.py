"""Putting a new file in the place of an old one, which is whole at every moment, whatever kills the program."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from typing import BinaryIO

_NUMBER = re.compile(r"\.([1-9][0-9]*)")


@contextlib.contextmanager
def replacing(path: str, keep: int | None) -> Iterator[BinaryIO]:
    """An empty file to write to, unbuffered, which takes the place of `path` once all is written and on disk.

    It lies beside `path` meanwhile, as `path.partial`; one that a killed program left there is overwritten. An
    exception inside leaves what was there before, and nothing else.

    Args:
        path: of the file.
        keep: how many files are kept: `path`, and the ones before as `path.1`, `path.2` ... Older ones are removed.
            `None` keeps no file before, and touches none.

    Raises:
        OSError: what the file system says; or another program is writing to the same file.
    """
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"{error.filename} is a file and not a folder") from error
    if os.path.isdir(path):  # else found only when all is written
        raise IsADirectoryError(errno.EISDIR, "it is a directory", path)
    partial = f"{path}.partial"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)  # and not truncated: should another program be writing to it, its file stays its own
    with open(partial, "xb", buffering=0) as file:
        try:
            yield file
            os.fsync(file.fileno())
            if not _is_at(partial, file):
                raise OSError(errno.EBUSY, "another program is writing to it", partial)
            if keep is not None and keep > 1 and os.path.exists(path):
                _make_way(path, keep)
            os.replace(partial, path)
        except BaseException:
            if _is_at(partial, file):
                os.unlink(partial)
            raise
    if keep is not None:
        for number in numbered(path):
            if number >= keep:
                os.unlink(f"{path}.{number}")
    _sync_folder(folder)


def numbered(path: str) -> list[int]:
    """The numbers of the files `path.1`, `path.2` ... that are there, in order."""
    try:
        names = os.listdir(os.path.dirname(path) or ".")
    except OSError:
        return []
    base = os.path.basename(path)
    matches = [_NUMBER.fullmatch(name[len(base) :]) for name in names if name.startswith(base)]
    return sorted(int(match[1]) for match in matches if match)


def _make_way(path: str, keep: int) -> None:
    """Makes `path` be `path.1` too, and each older file one older. `path` itself stays where it is."""
    newest = f"{path}.1"
    if os.path.exists(newest) and os.path.samefile(path, newest):  # a program was killed right after this function
        return
    for number in range(keep - 1, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.{number - 1}", f"{path}.{number}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(newest)
    try:
        os.link(path, newest)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, f"{newest}.partial")
        os.replace(f"{newest}.partial", newest)


def _is_at(path: str, file: BinaryIO) -> bool:
    """Whether this path is the open file's, and not another file's or none."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    return False


def _sync_folder(folder: str) -> None:
    """Brings the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does so by itself
            raise
    finally:
        os.close(descriptor)
