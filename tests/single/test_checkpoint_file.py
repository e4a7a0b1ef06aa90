"""The checkpoint file: readable by others, refused if damaged, never damaged by a kill."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import pickle
import re
import socket
import stat
import tempfile
import zlib
from random import Random

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import Contents, write_file
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from internals import (
    CHECKSUM_BYTES,
    PART,
    CheckpointFile,
    Entry,
    _atomic_file,
    checksum,
    extents_of,
    host_parts,
    places_of,
    write_pieces,
    writer_to,
)
from slow import slow_but

KNOWN = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
KNOWN += ["float16", "bfloat16", "float32", "float64"]
OTHERS = ["complex64", "complex128", "float8_e4m3fn"]
SMALL = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "n": np.array(7),
    "none": np.zeros((0, 3), np.int16),
}
FACTS = {"optimizer": {"kind": "SGD", "iterations": 3}}


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def write(path, arrays, metadata=FACTS, keep=None):
    entries = {name: Entry(a.dtype.name, a.dtype.itemsize, a.shape) for name, a in arrays.items()}
    contents = Contents(entries, metadata, lambda name: host_parts(arrays[name]))
    write_file(os.fspath(path), contents, keep)


def read(path):
    with CheckpointFile(os.fspath(path)) as file:
        arrays = {}
        for name, entry in file.entries.items():
            data = b"".join(part.tobytes() for part in file.parts(name))
            arrays[name] = np.frombuffer(data, dtype_of(entry.dtype)).reshape(entry.shape)
        return arrays, file.metadata


def same(a, b):
    return a.keys() == b.keys() and all(
        (a[name].dtype, a[name].shape, a[name].tobytes())
        == (b[name].dtype, b[name].shape, b[name].tobytes())
        for name in a
    )


# One character of each kind that JSON or UTF-8 may treat specially. Sampling from all characters
# would cost Hypothesis a second.
TEXTS = st.text('ab 7_./"\\\0\n\x1f\x7f\u00e9\u0301\u6f22\u2028\ufeff\uffff\U0001f600', max_size=8)


@given(
    st.dictionaries(
        TEXTS,
        st.tuples(
            st.sampled_from(KNOWN + OTHERS),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=5,
    ),
    st.dictionaries(TEXTS, st.none() | st.integers() | TEXTS | st.lists(st.integers()), max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_what_is_written_is_read_by_us_and_by_others(tmp_path_factory, kinds, facts, seed):
    path = tmp_path_factory.getbasetemp() / "round_trip"
    random = np.random.default_rng(seed)
    arrays = {}
    for name, (dtype, shape) in kinds.items():
        dtype = dtype_of(dtype)
        data = random.bytes(int(np.prod(shape)) * dtype.itemsize)
        arrays[name] = np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
    write(path, arrays, facts)
    found, found_facts = read(path)
    assert same(found, arrays) and found_facts == facts
    theirs = safetensors.numpy.load_file(path)
    expected = {
        name: a
        if a.dtype.name in KNOWN
        else a.reshape(-1).view(np.uint8).reshape(*a.shape, a.dtype.itemsize)
        for name, a in arrays.items()
    }
    assert same(theirs, expected)


def test_large_arrays_come_in_parts(tmp_path):
    arrays = {"large": np.arange(2 * PART // 8 + 5), "small": np.arange(3, dtype=np.int8)}
    write(tmp_path / "file", arrays)
    assert same(read(tmp_path / "file")[0], arrays)
    with CheckpointFile(os.fspath(tmp_path / "file")) as file:
        assert [part.size for part in file.parts("large")] == [PART, PART, 40]


def test_every_array_starts_at_a_multiple_of_its_elements(tmp_path):
    arrays = {
        f"{i}": np.ones(3, dtype)
        for i, dtype in enumerate(["int8", "float64", "int16", "complex128", "float32"])
    }
    write(tmp_path / "file", arrays)
    with CheckpointFile(os.fspath(tmp_path / "file")) as file:
        assert all(
            file._places[name].start % min(8, entry.itemsize) == 0
            for name, entry in file.entries.items()
        )


# ---- several writers


def entries_of(nbytes):
    return {name: Entry("uint8", 1, (count,)) for name, count in nbytes.items()}


@given(st.dictionaries(TEXTS, st.integers(0, 300)), st.integers(1, 8))
def test_what_several_write_is_what_one_writes(tmp_path_factory, nbytes, ranks):
    """Apart from the extents, each of which is checked by itself."""
    random = np.random.default_rng(0)
    arrays = {name: random.integers(0, 256, count, np.uint8) for name, count in nbytes.items()}
    entries, path = entries_of(nbytes), tmp_path_factory.getbasetemp() / "several"
    contents = Contents(entries, FACTS, None, ranks=ranks)
    first, checksums = contents.header.size, {}
    with open(path, "wb", buffering=0) as file:
        write_part = writer_to(file.fileno())
        for rank in reversed(range(ranks)):
            pieces = [
                (first + place.start, arrays[name][own.slice].data)
                for writer, name, own, place in contents.extents
                if writer == rank
            ]
            checksums |= write_pieces(write_part, pieces, first, contents.stops)
        os.pwrite(file.fileno(), contents.header.sealed(checksums), 0)
    assert checksums.keys() == set(range(len(contents.extents)))
    found, facts = read(path)
    assert same(found, arrays) and facts == FACTS
    assert same(safetensors.numpy.load_file(path), arrays)


@given(st.dictionaries(TEXTS, st.integers(0, 5)))
def test_arrays_follow_each_other_without_gaps(nbytes):
    places = places_of(entries_of(nbytes))
    assert {name: place.size for name, place in places.items()} == nbytes
    bytes_of = [byte for place in places.values() for byte in range(*place)]
    assert bytes_of == list(range(len(bytes_of)))


@given(
    st.integers(1, 8),
    st.dictionaries(
        TEXTS,
        st.tuples(st.sampled_from([0, 1]) | st.integers(0, 50), st.sampled_from(["all", "root"])),
    ),
    st.randoms(use_true_random=False),
)
@example(5, {"a": (1, "all"), "c": (1, "root"), "d": (2, "all")}, Random(0))
@example(8, {"a": (3, "root"), "c": (0, "root"), "d": (0, "all")}, Random(1))
def test_ranks_share_all_bytes_and_none_is_of_two(size, arrays, random):
    """Against lists of all bytes: of arrays that all ranks have, or the root alone."""
    root = random.randrange(size)
    places = places_of(entries_of({name: count for name, (count, _) in arrays.items()}))
    only_on_root = {name for name, (_, kind) in arrays.items() if kind == "root"}
    extents = list(extents_of(places, size, root, only_on_root))
    whole = [(name, byte) for name, place in places.items() for byte in range(place.size)]
    assert [(e.name, byte) for e in extents for byte in range(*e.own)] == whole
    assert [byte for e in extents for byte in range(*e.place)] == list(range(len(whole)))
    assert all(e.own and e.own.size == e.place.size for e in extents)
    common = [(name, byte) for name, byte in whole if arrays[name][1] == "all"]
    for rank in range(size):
        found = {(e.name, byte) for e in extents if e.rank == rank for byte in range(*e.own)}
        expected = set(common[len(common) * rank // size : len(common) * (rank + 1) // size])
        if rank == root:
            expected |= {pair for pair in whole if pair[0] in only_on_root}
        assert found == expected


def test_the_checksum_sees_what_is_old_lost_or_in_another_place():
    whole = np.random.default_rng(0).integers(0, 256, 3 * CHECKSUM_BYTES + 999, np.uint8)
    page = 4096

    def changed(change):
        data = whole.copy()
        change(data, data[: len(data) // page * page].reshape(-1, page))
        return checksum(data)

    def swap(a, b):
        return lambda _, pages: pages.__setitem__([a, b], pages[[b, a]])

    changes = [
        lambda data, _: data.__setitem__(5, data[5] ^ 1),
        lambda data, _: data.__setitem__(-1, data[-1] ^ 128),
        lambda data, _: data.__setitem__(CHECKSUM_BYTES - 1, data[CHECKSUM_BYTES - 1] ^ 2),
        lambda _, pages: pages.__setitem__(7, 0),
        lambda _, pages: pages.__setitem__(7, pages[9]),
        *[swap(0, 2**k) for k in range(9)],
        lambda data, _: data.__setitem__(slice(None), np.roll(data, page)),
        # The highest bit of a word in two pages, which a sum of these words would not notice.
        lambda _, pages: pages.__setitem__(([0, 2], 7), pages[[0, 2], 7] ^ 128),
    ]
    assert len({checksum(whole), *map(changed, changes)}) == len(changes) + 1


@given(st.integers(0, 3 * CHECKSUM_BYTES), st.integers(1, 3))
def test_the_checksum_does_not_depend_on_the_parts(size, count):
    data = np.resize(np.arange(251, dtype=np.uint8), size)
    value = 0
    for start in range(0, size, count * CHECKSUM_BYTES):
        value = checksum(data[start : start + count * CHECKSUM_BYTES], value)
    assert value == checksum(data)
    assert size >= CHECKSUM_BYTES or value == zlib.crc32(data.data)


# ---- damaged files


@pytest.fixture
def small(tmp_path):
    write(tmp_path / "file", SMALL)
    return tmp_path / "file"


@pytest.mark.parametrize("change", slow_but([0x01], [0x01, 0x80, 0xFF]), ids=hex)
def test_a_change_of_any_byte_is_found(small, change):
    whole = small.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= change
        small.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(os.fspath(small))):
            CheckpointFile(os.fspath(small))
    small.write_bytes(whole)
    assert same(read(small)[0], SMALL)


def test_any_other_length_is_found(small):
    whole = small.read_bytes()
    for length in range(len(whole)):
        small.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is cut off: it has|is not a checkpoint"):
            CheckpointFile(os.fspath(small))
    small.write_bytes(whole + b"\0")
    with pytest.raises(
        ValueError,
        match=f"after its end: it has {len(whole) + 1} bytes and should have {len(whole)}",
    ):
        CheckpointFile(os.fspath(small))


def test_a_file_that_is_something_else_is_refused(tmp_path):
    path = tmp_path / "file"
    safetensors.numpy.save_file(SMALL, path)
    for content in (b"", b"text\n" * 100, pickle.dumps(SMALL), path.read_bytes(), bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match="is not a checkpoint of hpcstrat: it does not start like one"
        ):
            CheckpointFile(os.fspath(path))


def test_messages_name_what_else_is_there(small):
    write(small, SMALL, keep=3)
    write(small, SMALL, keep=3)
    small.write_bytes(small.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is cut off.*there is \S*file\.1, \S*file\.2"):
        CheckpointFile(os.fspath(small))
    small.unlink()
    with pytest.raises(FileNotFoundError, match=r"no such file; there is \S*file\.1, \S*file\.2"):
        CheckpointFile(os.fspath(small))


def sealed(header, data=b"", length=None, version=1):
    """A file of version 1 with this header and a matching checksum."""
    begin = '{"__metadata__":{"hpcstrat":"%d","bytes":"%020d","crc32":"%s"'
    size = 8 + len(begin % (version, 0, "0" * 8)) + len(header) + len(data)
    length = size - 8 - len(data) if length is None else length

    def filled(checksum):
        return (
            length.to_bytes(8, "little")
            + (begin % (version, size, checksum)).encode()
            + header.encode()
            + data
        )

    return filled(f"{zlib.crc32(filled('0' * 8)):08x}")


def header_of(arrays, dtypes="{}", metadata="{}"):
    return f',"dtypes":{json.dumps(dtypes)},"objects":{json.dumps(metadata)}}}{"".join("," + one for one in arrays)}}}'


def array(name="w", dtype="U8", shape=(4,), offsets=(0, 4)):
    return f'"{name}":{json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})}'


def sealed_now(extents, checksums, data=b"1234", length=None):
    """A file of version 2, of one array, with a matching checksum of the header."""
    rest = f',"checksums":{json.dumps(checksums)},"extents":{json.dumps(extents)}'
    rest += header_of([array()])
    begin = '{"__metadata__":{"hpcstrat":"2","bytes":"%020d","crc32":"%s"'
    size = len(begin % (0, "0" * 8)) + len(rest)
    length = size if length is None else length

    def filled(crc):
        text = (begin % (8 + size + len(data), crc)).encode() + rest.encode()
        return length.to_bytes(8, "little") + text

    crc = zlib.crc32(filled("0" * 8) + (data if length > size else b""))
    return filled(f"{crc:08x}") + data


def crcs(*parts):
    return "".join(f"{zlib.crc32(part):08x}" for part in parts)


def test_a_file_by_hand_is_read(tmp_path):
    """Of both versions."""
    for content in (
        sealed(header_of([array()]), b"1234"),
        sealed_now("[4]", crcs(b"1234")),
        sealed_now("[1,4]", crcs(b"1", b"234")),
    ):
        (tmp_path / "file").write_bytes(content)
        assert read(tmp_path / "file")[0]["w"].tobytes() == b"1234"


@pytest.mark.parametrize("change", slow_but([0x01], [0x01, 0x80, 0xFF]), ids=hex)
def test_a_change_of_any_byte_of_the_previous_version_is_found(tmp_path, change):
    whole = sealed(header_of([array()]), b"1234")
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= change
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(os.fspath(tmp_path))):
            CheckpointFile(os.fspath(tmp_path / "file"))


def test_what_is_damaged_is_named(small):
    arrays = SMALL | {"v": np.arange(PART, dtype=np.int16)}
    write(small, arrays)
    with CheckpointFile(os.fspath(small)) as file:
        places = {name: place for name, place in file._places.items() if place}
    whole = small.read_bytes()
    for name, place in places.items():
        for at in (place.start, place.stop - 1):
            damaged = bytearray(whole)
            damaged[at] ^= 1
            small.write_bytes(damaged)
            where = f"in {name}, bytes {place.start} to {place.stop} of the file: its checksum is"
            with pytest.raises(ValueError, match=f"is damaged {where}"):
                CheckpointFile(os.fspath(small))
    small.write_bytes(whole.replace(b"optimizer", b"optimiser"))
    with pytest.raises(ValueError, match="is damaged in its header: its checksum is"):
        CheckpointFile(os.fspath(small))


LIES = {
    "no facts": sealed("}", b"1234"),
    "bytes of no array": sealed(header_of([array()]), b"12345"),
    "an array behind the end": sealed(header_of([array(offsets=(0, 8))]), b"1234"),
    "an array before the begin": sealed(header_of([array(offsets=(-4, 0))]), b"1234"),
    "a shape below 0": sealed(header_of([array(shape=(-4,))]), b"1234"),
    "a shape of fractions": sealed(header_of([array(shape=(2.0, 2))]), b"1234"),
    "a shape of truths": sealed(header_of([array(shape=(True, 4))]), b"1234"),
    "an unknown dtype": sealed(header_of([array(dtype="F4")]), b"1234"),
    "a name twice": sealed(header_of([array(), array()]), b"1234"),
    "two at one place": sealed(header_of([array(), array("v")]), b"1234"),
    "half of a number": sealed(header_of([array(shape=())], dtypes='{"w":"complex64"}'), b"1"),
    "an infinite shape": sealed(header_of([array(shape=(float("inf"),))]), b"1234"),
    "a huge shape": sealed(header_of([array(shape=(10**400,))]), b"1234"),
    "an end that is no number": sealed(header_of([array(offsets=(0, float("nan")))]), b"1234"),
    "objects that are a list": sealed(header_of([], metadata="[]")),
    **{
        f"{number} iterations": sealed(
            header_of([], metadata=f'{{"optimizer":{{"iterations":{number}}}}}')
        )
        for number in ("Infinity", "-Infinity", "NaN", "1e400", "3.5")
    },
    **{
        f"step {step}": sealed(header_of([]).replace("}}", f',"step":{step}}}}}'))
        for step in (
            '"9223372036854775808"',
            '"-1"',
            '"0x1"',
            '" 1"',
            '"1_0"',
            '""',
            r'"\u0663"',
            "3",
            "null",
            "[]",
        )
    },
    "a number for an array": sealed(header_of(['"w":3'])),
    "deep lists": sealed("[" * 100_000),
    "a header behind the end": sealed(header_of([]), length=2**60),
    "half of a header": sealed(header_of([]), length=3),
    "a header behind the end, now": sealed_now("[4]", crcs(b"1234"), length=2**60),
    **{
        f"extents {extents}": sealed_now(extents, checksums)
        for extents, checksums in [
            ("[]", ""),
            ("[3]", crcs(b"123")),
            ("[5]", crcs(b"1234")),
            ("[0,4]", crcs(b"", b"1234")),
            ("[2,1,4]", crcs(b"12", b"", b"34")),
            ("[4,8]", crcs(b"1234", b"")),
            ("[4]", crcs(b"1234", b"")),
            ("[4]", ""),
            ("[4]", "x" * 8),
            ('["4"]', crcs(b"1234")),
            ("4", crcs(b"1234")),
            ("[-1]", crcs(b"1234")),
        ]
    },
}


def test_the_number_of_the_step_is_read(tmp_path):
    (tmp_path / "file").write_bytes(sealed(header_of([]).replace("}}", ',"step":"12"}}')))
    with CheckpointFile(os.fspath(tmp_path / "file")) as file:
        assert file.step == 12


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_refused(tmp_path, lie):
    (tmp_path / "file").write_bytes(LIES[lie])
    with pytest.raises(ValueError, match="is not a checkpoint of hpcstrat"):
        CheckpointFile(os.fspath(tmp_path / "file"))


def test_a_newer_format_is_told(tmp_path):
    (tmp_path / "file").write_bytes(sealed(header_of([]), version=3))
    with pytest.raises(
        ValueError, match="has format 3, but this version of hpcstrat reads formats 1 to 2"
    ):
        CheckpointFile(os.fspath(tmp_path / "file"))


# ---- replacing the previous file


def numbered(i):
    return {"i": np.array(i)}


def states(folder):
    """The state in each complete file."""
    return {path.name: int(read(path)[0]["i"]) for path in folder.iterdir()}


def test_the_last_ones_are_kept(tmp_path):
    path = tmp_path / "some" / "folder" / "file"
    for i in range(5):
        write(path, numbered(i), keep=3)
    assert states(path.parent) == {"file": 4, "file.1": 3, "file.2": 2}
    write(path, numbered(5))
    assert states(path.parent) == {"file": 5, "file.1": 3, "file.2": 2}
    write(path, numbered(6), keep=2)
    assert states(path.parent) == {"file": 6, "file.1": 5}
    (path.parent / "file.10").write_bytes(path.read_bytes())
    (path.parent / "other.7").write_bytes(path.read_bytes())
    write(path, numbered(7), keep=1)
    assert states(path.parent) == {"file": 7, "other.7": 6}


def without_hard_links(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)


def test_without_hard_links_older_files_are_copied(tmp_path, monkeypatch):
    without_hard_links(monkeypatch)
    for i in range(4):
        write(tmp_path / "file", numbered(i), keep=3)
    assert states(tmp_path) == {"file": 3, "file.1": 2, "file.2": 1}


def test_an_error_while_writing_leaves_what_was_there(tmp_path):
    write(tmp_path / "file", numbered(0), keep=2)
    write(tmp_path / "file", numbered(1), keep=2)

    def parts(name):
        yield np.zeros(4, np.uint8)
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        contents = Contents({"i": Entry("int64", 8, ())}, {}, parts)
        write_file(os.fspath(tmp_path / "file"), contents, 2)
    assert states(tmp_path) == {"file": 1, "file.1": 0}


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "file", numbered(0))
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    path = tmp_path / "link"
    path.symlink_to("there/file")
    for i in range(3):
        write(path, numbered(i), keep=2)
    assert path.is_symlink()
    assert states(tmp_path / "there") == {"file": 2, "file.1": 1}
    assert int(read(path)[0]["i"]) == 2
    path.unlink()
    path.symlink_to("link")
    with pytest.raises(OSError, match="symbolic links"):
        write(path, numbered(0))
    assert path.is_symlink()


def test_what_is_no_regular_file_is_neither_replaced_nor_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(tmp_path / "socket"))
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("fifo", "socket", "link", "null"):
        before = (tmp_path / name).stat()
        with pytest.raises(OSError, match="it is not a regular file"):
            write(tmp_path / name, numbered(0), keep=2)
        assert (tmp_path / name).stat().st_ino == before.st_ino
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link", "null", "socket"]
    for name in ("fifo", "link", "null"):
        with pytest.raises(
            ValueError, match="is not a checkpoint of hpcstrat: it is not a regular file"
        ):
            CheckpointFile(os.fspath(tmp_path / name))


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666], ids=oct)
def test_the_mode_stays(tmp_path, monkeypatch, mode, links):
    if not links:
        without_hard_links(monkeypatch)
    path, umask = tmp_path / "file", os.umask(0o027)
    try:
        write(path, numbered(0))
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(mode)
        for i in (1, 2):
            write(path, numbered(i), keep=3)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()] == 3 * [mode]


@pytest.fixture(params=["locks", "no locks"])
def locks(request, monkeypatch):
    """Whether the file system has locks: some on clusters have none."""
    if request.param == "locks":
        return True

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    return False


def test_of_two_programs_that_write_one_file_the_last_one_stays(tmp_path, locks):
    path = tmp_path / "file"
    write(path, numbered(0))
    found = (
        contextlib.nullcontext()
        if locks
        else pytest.raises(OSError, match="another program is writing to it")
    )
    with found, _atomic_file.replacing(os.fspath(path), None) as file:
        file.write(b"first, a long text")
        write(path, numbered(1))
        assert states_of_whole(tmp_path)["file"] == 1
        file.write(b", and its end")
    if locks:
        assert path.read_bytes() == b"first, a long text, and its end"
    else:
        assert states(tmp_path) == {"file": 1}
    assert os.listdir(tmp_path) == ["file"]


def test_what_killed_programs_left_goes_and_nothing_else(tmp_path, locks):
    left = [tmp_path / f"file.partial-{k:08x}" for k in range(3)]
    others = [
        tmp_path / name
        for name in (
            "file.partial",
            "file.partial-1",
            "file.partial-readme",
            "other.partial-0000000f",
        )
    ]
    for path in left + others:
        path.write_bytes(b"x")
    for path in left[1:]:
        path.unlink()
    left[1].symlink_to(others[0])
    os.mkfifo(left[2])
    write(tmp_path / "file", numbered(0))
    assert {path.name for path in tmp_path.iterdir()} == {
        "file",
        *(path.name for path in others + left[1:]),
    }
    assert all(path.read_bytes() == b"x" for path in others)


class Killed(BaseException):
    pass


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """A folder on a disk, or in memory, whose files outlive the ranks as well."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield pathlib.Path(path)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_kill_at_any_call_leaves_a_whole_file(folder, monkeypatch, links):
    """System calls do nothing after the n-th: the files are then as a kill would leave them."""
    path = folder / "file"
    for i in range(3):
        write(path, numbered(i), keep=3)
    calls = 0
    limit = None

    def dying(function):
        def call(*arguments, **keywords):
            nonlocal calls
            calls += 1
            if limit is not None and calls > limit:
                raise Killed
            return function(*arguments, **keywords)

        return call

    for name in ("replace", "link", "unlink", "fsync", "stat"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    if not links:
        monkeypatch.setattr(os, "link", dying(lambda *_: (_ for _ in ()).throw(PermissionError())))
    write(path, numbered(3), keep=3)
    needed, newest = calls, 3
    for death in range(needed):
        calls, limit = 0, death
        with pytest.raises(Killed):
            write(path, numbered(newest + 1), keep=3)
        limit = None
        found = {
            name: state for name, state in states_of_whole(folder).items() if "partial" not in name
        }
        assert found["file"] in (newest, newest + 1)
        assert len(found) >= 3 or found["file"] == newest  # at most the oldest is gone
        newest = found["file"] + 1
        write(path, numbered(newest), keep=3)
        again = states(folder)
        assert again["file"] == newest
        assert set(again) <= {"file", "file.1", "file.2"}
        assert not links or len(set(again.values())) == len(again)  # no state is kept twice
    assert needed >= 8


def states_of_whole(folder):
    found = {}
    for path in folder.iterdir():
        with contextlib.suppress(ValueError):
            found[path.name] = int(read(path)[0]["i"])
    return found


def test_the_file_is_synced_before_its_rename_and_the_folder_after(monkeypatch, tmp_path):
    """Otherwise a power cut may leave an empty file, or the older one after `save` returned."""
    done, path = [], tmp_path / "file"
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        synced = os.readlink(f"/proc/self/fd/{descriptor}")
        done.append("sync of the folder" if synced == str(tmp_path) else "sync of the file")
        fsync(descriptor)

    def note_rename(source, target):
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    write(path, numbered(1), keep=1)
    assert done == ["sync of the file", "rename", "sync of the folder"]
