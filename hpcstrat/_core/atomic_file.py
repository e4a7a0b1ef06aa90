"""Replaces a file atomically: whatever kills the program, the old file or the new one is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO

from hpcstrat._core.call_name import current_call

_NUMBER = re.compile(r"\.([1-9][0-9]*)")
_PARTIAL = re.compile(r"\.partial-([0-9a-f]{8})")


@contextlib.contextmanager
def replacing(path: str, keep: int | None) -> Iterator[BinaryIO]:
    """An empty, unbuffered file to write to, which replaces `path` once it is on disk.

    Until then its name is `path.partial-` and eight random digits. An exception inside leaves only
    the previous file. Owner and permissions are those of the previous file.

    Removes such files of killed programs; and that of a program that writes to `path` at the same
    time, which then gets an error.

    Args:
        path: the file; symbolic links are followed.
        keep: the number of files to keep: `path` and previous files, `path.1`, `path.2` ...; older
            files are removed. `None` keeps no previous file, and removes none. Directories with
            such names stay.

    Raises:
        OSError: the file system's error, or that of `check_replaceable`; or another program writes
            to the same file.
    """
    path = follow_link(path)
    before = check_replaceable(path, keep)
    for digits in _match_names(path, _PARTIAL):
        left = f"{path}.partial-{digits}"
        with contextlib.suppress(OSError):  # it is gone, or belongs to another user
            if stat.S_ISREG(os.lstat(left).st_mode):
                os.unlink(left)
    # Next to the previous file: a rename is atomic only within one file system.
    partial = f"{path}.partial-{secrets.token_hex(4)}"
    # Private until it has the previous file's owner and permissions: the contents may be secret.
    mode = 0o666 if before is None else 0o600
    try:
        with open(
            partial, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, mode)
        ) as file:
            if before is not None:  # if the system refuses, the file stays private
                with contextlib.suppress(OSError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                with contextlib.suppress(OSError):
                    os.fchmod(file.fileno(), before.st_mode & 0o777)
            yield file
            # Before the rename: after a power cut the name must not lead to a file whose blocks
            # never reached the disk.
            os.fsync(file.fileno())
        if not os.path.exists(partial):
            what = "another program, which saves to it too, has removed the new file"
            raise OSError(errno.EBUSY, what, partial)
        if keep is not None and keep > 1 and os.path.exists(path):
            _make_way(path, keep)
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    # After the rename, so that there is never one file fewer than `keep`.
    for number in find_numbers(path):
        if keep is not None and number >= keep:
            # A directory is not ours.
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(f"{path}.{number}")
    _sync_folder(os.path.dirname(path) or ".")


def check_replaceable(path: str, keep: int | None) -> os.stat_result | None:
    """Makes missing folders; returns the file's status, `None` if there is no file.

    Args:
        path: the file; symbolic links are followed.
        keep: as in `replacing`.

    Raises:
        OSError: a folder cannot be made; the file is a folder, a device or a FIFO, which a rename
            would replace; or a previous file's name is that of a folder.
    """
    path = follow_link(path)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(
            errno.ENOTDIR, f"{error.filename} is a file and not a folder"
        ) from error
    for number in find_numbers(path):
        if keep is not None and number < keep and os.path.isdir(f"{path}.{number}"):
            raise IsADirectoryError(
                errno.EISDIR,
                f"{path}.{number} is a directory, and keep={keep} needs this name; rename it",
            )
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return status


@contextlib.contextmanager
def explaining(path: str, consequence: str) -> Iterator[None]:
    """A block whose OSErrors have the call and the consequence in their messages."""
    try:
        yield
    except OSError as error:
        text = f"{current_call()} of {path}: {error.strerror or error}; {consequence}"
        # OSError picks the subclass by `errno`, so the class is the same.
        raise (OSError(text) if error.errno is None else OSError(error.errno, text)) from None


def follow_link(path: str) -> str:
    """The path, or the target of a symbolic link: a rename would replace the link itself."""
    return os.path.realpath(path) if os.path.islink(path) else path


def find_numbers(path: str) -> list[int]:
    """The numbers of the files `path.1`, `path.2` ... that exist, in order."""
    return sorted(map(int, _match_names(path, _NUMBER)))


def _match_names(path: str, rest: re.Pattern[str]) -> list[str]:
    """The pattern's group, for each file in the folder whose name is `path` plus a `rest`."""
    try:
        names = os.listdir(os.path.dirname(path) or ".")
    except OSError:
        return []
    base = os.path.basename(path)
    matches = [rest.fullmatch(name[len(base) :]) for name in names if name.startswith(base)]
    return [match[1] for match in matches if match]


def _make_way(path: str, keep: int) -> None:
    """Renames `path.1` to `path.2` and so on, and links `path` as `path.1`.

    A link, not a rename: `path` must exist at every moment, also between this and the rename of the
    new file. A file system without hard links has no `path` in between.
    """
    newest = f"{path}.1"
    with contextlib.suppress(FileNotFoundError):
        if os.path.samefile(path, newest):  # a program was killed after this and before its rename
            return
    for number in range(keep - 1, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}.{number - 1}", f"{path}.{number}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(newest)
    try:
        os.link(path, newest)
    except FileExistsError:  # another program has just made it
        pass
    except OSError:
        os.replace(path, newest)


def _sync_folder(folder: str) -> None:
    """Writes a folder's names to disk; without it a power cut may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync folders
            raise
    finally:
        os.close(descriptor)
