"""Writes checkpoint files without a program."""

import os

from internals import Header, extents_of, places_of, replacing, write_pieces, writer_to


class Contents:
    """What a file holds: arrays, whose bytes `parts` returns by name, and metadata."""

    def __init__(self, entries, metadata, parts, step=None, ranks=1):
        self.places = places_of(entries)
        self.extents = list(extents_of(self.places, ranks))
        self.stops = [extent.place.stop for extent in self.extents]
        self.header = Header(entries, metadata, self.stops, step)
        self.parts = parts

    def pieces(self):
        for name, place in self.places.items():
            start = self.header.size + place.start
            for part in self.parts(name):
                yield start, part.data
                start += part.size

    def write_to(self, file):
        """As one rank does."""
        os.ftruncate(file, self.header.nbytes)
        write = writer_to(file)
        write(
            self.header.sealed(write_pieces(write, self.pieces(), self.header.size, self.stops)), 0
        )


def write_file(path, contents, keep=None):
    """Writes `Contents` in place of an existing file."""
    with replacing(path, keep) as file:
        contents.write_to(file.fileno())
