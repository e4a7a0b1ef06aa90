"""Writes checkpoint files without a program."""

from internals import Header, replacing, write_file


def write_checkpoint(path, entries, metadata, parts, keep=None, step=None):
    """Writes a file in place of an existing one; `parts` returns the bytes of an array by name."""
    header = Header(entries, metadata, step)
    named = ((name, part) for name in header.names for part in parts(name))
    with replacing(path, keep) as file:
        write_file(file.fileno(), header, named)
