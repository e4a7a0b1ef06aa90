"""Checkpoint: objects that are saved to a file and restored from it."""

from __future__ import annotations

import os
from typing import Any, final

from hpcstrat._agreement.collective import collective
from hpcstrat._agreement.records import signature_of
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.timeline import CHECKPOINT, span
from hpcstrat._transports.connection import connect
from hpcstrat.checkpoint._objects import CheckpointObjects
from hpcstrat.checkpoint._restoring import Restored, restore_from
from hpcstrat.checkpoint._saving import check_keep, check_path, finish_background, save_to


@final
class Checkpoint:
    """Objects that are saved to a file and restored from it.

    `Checkpoint(model=[w, b], optimizer=optimizer)` holds the values of variables; an optimizer's
    number of steps, and the slots of its variables, which must be among the objects too; the totals
    of a metric; and the position of a dataset or an iterator: which elements come next, in which
    order. A dataset's position is that of the current iteration: after `restore`, the next
    `for batch in dataset:` yields the rest. Arguments of constructors, such as a learning rate, are
    not saved.

    Args:
        **objects: variables, optimizers, metrics, datasets, distributed datasets, their iterators,
            and nests of them. Their names and their paths in nests are the names in the file, so
            restore with the same names.

    Raises:
        TypeError: an object cannot be saved.
        ValueError: two objects have the same name.
    """

    @names_call("Checkpoint")
    def __init__(self, **objects: Any) -> None:
        self._objects = objects
        CheckpointObjects(objects)

    @span(CHECKPOINT, "save")
    @collective(communicator_of=lambda _: connect())
    def save(
        self, path: str | os.PathLike[str], keep: int | None = None, blocking: bool = True
    ) -> str:
        """Writes the objects to a file and replaces the previous file.

        Collective: all ranks call this.

        The parameter rank writes, next to `path`, and then renames the file, so a kill at any
        moment leaves the previous file whole; when this returns, the new file is on disk.
        Permissions stay. Arrays are not copied in memory. Variables made outside every scope may
        differ between ranks; those of the parameter rank are saved.

        With `blocking=False` this returns as soon as the parameter rank has copied the arrays; a
        thread writes the file while the program continues. The copy takes as much memory again,
        which is kept for the next save. The next `save`, `restore` or `sync` of any checkpoint
        waits for the file, and raises the error of its writing; so does the end of the program,
        with a non-zero status.

        Args:
            path: the file; symbolic links are followed, and missing folders are made, as in
                TensorFlow.
            keep: the number of files to keep: `path`, always the newest, and the previous files,
                `path.1`, `path.2` ...; older files are removed. `None` keeps no previous file, and
                removes none.
            blocking: whether to wait until the file is on disk.

        Returns:
            `path`, as text.

        Raises:
            OSError: the file system refuses, or `path` is a folder, a device or a FIFO; all ranks
                raise. The previous file is whole. Or it refused the previous save, in the
                background; this save has not started.
            MemoryError: there is no memory for the copy that `blocking=False` makes.
            RuntimeError: called inside a replica function, or in the scope of another strategy; or
                the system refuses the thread of `blocking=False`.
            TypeError: an object cannot be saved, or `path` is not a path.
            ValueError: an optimizer's variable is not among the objects, the objects belong to
                strategies whose parameter ranks differ, or `keep` is not positive.
            ReplicaMismatchError: the ranks save different things.

        Examples:
            >>> import os, tempfile
            >>> step = hs.Variable(0)
            >>> checkpoint = hs.checkpoint.Checkpoint(step=step)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for number in 1, 2, 3:
            ...         _ = step.assign(number)
            ...         path = checkpoint.save(f"{folder}/model", keep=2)
            ...     print(sorted(os.listdir(folder)))  # of steps 3 and 2
            ['model', 'model.1']
        """
        path = check_path(path)
        save_to(path, objects_of(self), check_keep(keep), blocking)
        return path

    @collective(communicator_of=lambda _: connect())
    def sync(self) -> None:
        """Waits until the file of `save(blocking=False)` is on disk.

        Collective: all ranks call this.

        Raises:
            OSError: the file system refused; all ranks raise. The previous file is whole.

        Examples:
            >>> import os, tempfile
            >>> w = hs.Variable(1.0)
            >>> checkpoint = hs.checkpoint.Checkpoint(w=w)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = checkpoint.save(f"{folder}/model", blocking=False)
            ...     _ = w.assign(2.0)  # the file holds 1.0
            ...     checkpoint.sync()
            ...     restored = checkpoint.restore(path)
            >>> print(w.numpy())
            1.0
        """
        finish_background()
        connect().exchange(signature_of(current_call()))

    @span(CHECKPOINT, "restore")
    @collective(communicator_of=lambda _: connect())
    def restore(self, path: str | os.PathLike[str], partial: bool = False) -> Restored:
        """Sets the objects to the contents of a file. Collective: all ranks call this.

        Only the parameter rank reads. Before anything changes, it checks the whole file, and all
        ranks check that the file fits the objects. The number of ranks, the strategy and the
        devices may differ from those of the program that saved. Optimizers without slots get them.

        Args:
            path: the file.
            partial: whether to skip objects that are not in the file, and contents of the file
                without an object.

        Returns:
            The names of whatever was skipped.

        Raises:
            FileNotFoundError: there is no such file; the message names older files.
            OSError: the file cannot be read. Or the file system refused the previous save, in the
                background; this restore has not started.
            ValueError: the file is not a checkpoint, or truncated, damaged, or does not fit the
                objects; the message says where.
            MemoryError: there is not enough memory for slots.
            RuntimeError: called inside a replica function, or in the scope of another strategy.
            TypeError: an object cannot be restored, or `path` is not a path.
            ReplicaMismatchError: the ranks restore different things.

        Examples:
            >>> import tempfile
            >>> w, b = hs.Variable(1.0), hs.Variable(2.0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = hs.checkpoint.Checkpoint(w=w).save(f"{folder}/model")
            ...     _ = w.assign(5.0)
            ...     both = hs.checkpoint.Checkpoint(w=w, b=b)
            ...     print(both.restore(path, partial=True).missing, w.numpy())
            ('b',) 1.0
        """
        path = check_path(path)
        return restore_from(path, objects_of(self), partial)[0]

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"


def objects_of(checkpoint: Checkpoint) -> CheckpointObjects:
    """The objects of a checkpoint, as they are now."""
    return CheckpointObjects(checkpoint._objects)
