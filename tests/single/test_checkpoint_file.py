"""The checkpoint file: readable by others, refused if damaged, never damaged by a kill."""

import contextlib
import json
import os
import pickle
import re
import socket
import stat
import zlib

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from internals import CHECKSUM_BYTES, CheckpointFile, Entry, checksum

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


def write(path, arrays, metadata=FACTS, keep=None, step=None):
    entries = {name: Entry(a.dtype.name, a.dtype.itemsize, a.shape) for name, a in arrays.items()}
    write_checkpoint(
        os.fspath(path),
        entries,
        metadata,
        lambda name: [arrays[name].reshape(-1).view(np.uint8)],
        keep,
        step,
    )


def read(path):
    with CheckpointFile(os.fspath(path)) as file:
        arrays = {}
        for name, entry in file.entries.items():
            data = b"".join(part.tobytes() for part in file.parts(name))
            assert file._places[name].start % min(8, entry.itemsize) == 0
            arrays[name] = np.frombuffer(data, dtype_of(entry.dtype)).reshape(entry.shape)
        return arrays, file.metadata, file.step


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
    st.none() | st.integers(0, 2**59),
    st.integers(0, 2**32 - 1),
)
def test_what_is_written_is_read_by_us_and_by_others(tmp_path_factory, kinds, facts, step, seed):
    path = tmp_path_factory.getbasetemp() / "round_trip"
    random = np.random.default_rng(seed)
    arrays = {}
    for name, (dtype, shape) in kinds.items():
        dtype = dtype_of(dtype)
        data = random.bytes(int(np.prod(shape)) * dtype.itemsize)
        arrays[name] = np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
    write(path, arrays, facts, step=step)
    found, *others = read(path)
    assert same(found, arrays) and others == [facts, step]
    theirs = safetensors.numpy.load_file(path)
    expected = {
        name: a
        if a.dtype.name in KNOWN
        else a.reshape(-1).view(np.uint8).reshape(*a.shape, a.dtype.itemsize)
        for name, a in arrays.items()
    }
    assert same(theirs, expected)


def test_the_checksum_sees_what_is_old_lost_or_in_another_place():
    page, pages = 4096, (3 * CHECKSUM_BYTES + 999) // 4096
    whole = np.random.default_rng(0).integers(0, 256, 3 * CHECKSUM_BYTES + 999, np.uint8)
    changed = [whole]
    for place in (-1, CHECKSUM_BYTES - 1):
        changed.append(whole.copy())
        changed[-1][place] ^= 128
    orders = [{7: 9}, *({0: 2**k, 2**k: 0} for k in range(9))]  # a page twice, or two exchanged
    for order in orders:
        made, parts = whole.copy(), whole[: pages * page].reshape(-1, page)
        made[: pages * page].reshape(-1, page)[[*order]] = parts[[*order.values()]]
        changed.append(made)
    changed.append(np.roll(whole, page))
    # The highest bit of a word in two pages, which a sum of these words would not notice.
    changed.append(whole.copy())
    changed[-1][[7, 2 * page + 7]] ^= 128
    assert len({*map(checksum, changed)}) == len(changed)


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


def test_a_change_of_any_byte_and_any_other_length_are_found(small):
    whole = small.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= (0x01, 0x80, 0xFF)[place % 3]
        small.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(os.fspath(small))):
            CheckpointFile(os.fspath(small))
        small.write_bytes(whole[:place])
        with pytest.raises(ValueError, match="is cut off: it has|is not a checkpoint"):
            CheckpointFile(os.fspath(small))
    small.write_bytes(whole + b"\0")
    facts = f"after its end: it has {len(whole) + 1} bytes and should have {len(whole)}"
    with pytest.raises(ValueError, match=facts):
        CheckpointFile(os.fspath(small))
    small.write_bytes(whole)
    assert same(read(small)[0], SMALL)


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


def sealed(rest, data=b"1234", length=None, version=1):
    """A file whose header ends with `rest`, and has a matching checksum."""
    begin = '{"__metadata__":{"hpcstrat":"%d","bytes":"%020d","crc32":"%s"'
    size = len(begin % (version, 0, "0" * 8)) + len(rest)
    length = size if length is None else length

    def filled(crc):
        text = begin % (version, 8 + size + len(data), crc) + rest
        return length.to_bytes(8, "little") + text.encode() + data

    return filled(f"{zlib.crc32(filled('0' * 8)[: 8 + length]):08x}")


def header_of(*arrays, dtypes="{}", metadata="{}", checksums=None, step=""):
    checksums = f"{zlib.crc32(b'1234'):08x}" * len(arrays) if checksums is None else checksums
    own = (
        f',"checksums":"{checksums}","dtypes":{json.dumps(dtypes)},"objects":{json.dumps(metadata)}'
    )
    return own + step + "}" + "".join("," + one for one in arrays) + "}"


def array(name="w", dtype="U8", shape=(4,), offsets=(0, 4)):
    return f'"{name}":{json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})}'


def test_what_is_damaged_is_named(small):
    arrays = SMALL | {"v": np.arange(1 << 22, dtype=np.int16)}
    write(small, arrays)
    with CheckpointFile(os.fspath(small)) as file:
        places = {name: place for name, place in file._places.items() if place}
    whole = small.read_bytes()
    for name, place in places.items():
        damaged = bytearray(whole)
        damaged[place.stop - 1] ^= 1
        small.write_bytes(damaged)
        where = f"in {name}, bytes {place.start} to {place.stop} of the file: its checksum is"
        with pytest.raises(ValueError, match=f"is damaged {where}"):
            CheckpointFile(os.fspath(small))
    small.write_bytes(whole.replace(b"optimizer", b"optimiser"))
    with pytest.raises(ValueError, match="is damaged in its header: its checksum is"):
        CheckpointFile(os.fspath(small))


CRC = f"{zlib.crc32(b'1234'):08x}"
# Headers, each with a reason of its own: all else in the file is right.
LIES: dict[str, tuple[str, str]] = {
    "no facts": ("}}", "KeyError"),
    "an array behind the end": (header_of(array(offsets=(0, 8))), "not where"),
    "a shape of fractions": (header_of(array(shape=(2.0, 2))), "2.0 is not an integer"),
    "an unknown dtype": (header_of(array(dtype="F4")), "KeyError"),
    "a name twice": (header_of(array(), array()), "a name occurs twice"),
    "two at one place": (header_of(array(), array("v")), "not where"),
    "half of a number": (header_of(array(shape=()), dtypes='{"w":"complex64"}'), "IndexError"),
    "a huge shape": (header_of(array(shape=(10**400,))), "has shape"),
    "a shape of 66 axes": (header_of(array(shape=(4, *[1] * 65))), "has shape"),
    "objects that are a list": (header_of(array(), metadata="[]"), "have no names"),
    "deep lists": ("[" * 100_000, "Error"),
    "no checksum": (header_of(array(), checksums=""), "0.0 checksums of 1"),
    "two checksums": (header_of(array(), checksums=2 * CRC), "2.0 checksums of 1"),
    "a wrong checksum": (header_of(array(), checksums="0" * 8), "damaged in w"),
    "a number for checksums": (header_of(array()).replace(f'"{CRC}"', "12345678"), "TypeError"),
}
for number in ("Infinity", "NaN", "1e400", "3.5"):
    facts = f'{{"optimizer":{{"iterations":{number}}}}}'
    LIES[f"{number} iterations"] = header_of(array(), metadata=facts), "is not an integer"
for step in ('"9223372036854775808"', '"-1"', '" 1"', '"1_0"', '""', r'"\u0663"', "3"):
    LIES[f"step {step}"] = header_of(array(), step=f',"step":{step}'), "its step is|TypeError"


def check_refused(path, content, reason):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        CheckpointFile(os.fspath(path))
    assert re.search("file is (not a checkpoint of hpcstrat|damaged in)", str(caught.value))


def test_a_file_that_lies_is_refused(tmp_path):
    for header, reason in LIES.values():
        check_refused(tmp_path / "file", sealed(header), reason)
    (tmp_path / "file").write_bytes(sealed(header_of(array(), step=',"step":"12"')))
    arrays, facts, step = read(tmp_path / "file")
    assert (arrays["w"].tobytes(), facts, step) == (b"1234", {}, 12)
    right = header_of(array())
    check_refused(tmp_path / "file", sealed(right, b"12345"), "its arrays end")
    check_refused(tmp_path / "file", sealed(right, length=2**60), "would have 1152")
    check_refused(tmp_path / "file", sealed(right, length=3), "damaged in its header")
    (tmp_path / "file").write_bytes(sealed(right, version=2))
    said = "has format 2, but this version of hpcstrat reads format 1;"
    with pytest.raises(ValueError, match=said):
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


@pytest.fixture
def links(request, monkeypatch):
    """Whether the file system has hard links."""

    def refuse(*_):
        raise PermissionError("no hard links here")

    if not request.param:
        monkeypatch.setattr(os, "link", refuse)
    return request.param


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
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "folder", numbered(0))
    for name in ("fifo", "socket", "link", "null"):
        before = (tmp_path / name).stat()
        with pytest.raises(OSError, match="it is not a regular file"):
            write(tmp_path / name, numbered(0), keep=2)
        assert (tmp_path / name).stat().st_ino == before.st_ino
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder", "link", "null", "socket"]
    for name in ("fifo", "link", "null"):
        with pytest.raises(
            ValueError, match="is not a checkpoint of hpcstrat: it is not a regular file"
        ):
            CheckpointFile(os.fspath(tmp_path / name))


def test_what_killed_programs_left_goes_and_nothing_else(tmp_path):
    left = [tmp_path / f"file.partial-{k:08x}" for k in range(3)]
    names = ("file.partial", "file.partial-1", "file.partial-readme", "other.partial-0000000f")
    others = [tmp_path / name for name in names]
    for path in [left[0], *others]:
        path.write_bytes(b"x")
    left[1].symlink_to(others[0])
    os.mkfifo(left[2])
    write(tmp_path / "file", numbered(0))
    assert {*tmp_path.iterdir()} == {tmp_path / "file", *left[1:], *others}
    assert all(path.read_bytes() == b"x" for path in others)


CALLS = ["chmod", "fchmod", "fchown", "fsync", "link", "listdir", "lstat", "makedirs", "mkdir"]
CALLS += ["open", "pwrite", "rename", "replace", "stat", "unlink"]


@contextlib.contextmanager
def watched(before):
    """A block in which `before(n)` is called before the n-th call of the system, n = 1, 2 ..."""
    count, is_busy = 0, False

    def counting(function):
        def call(*arguments, **keywords):
            nonlocal count, is_busy
            if not is_busy:
                count, is_busy = count + 1, True
                try:
                    before(count)
                finally:
                    is_busy = False
            return function(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counting(getattr(os, name)))
        yield


def calls_of_a_write(path, keep):
    """The number of calls of the system in a write in place of a file and previous ones."""
    for i in range(3):
        write(path, numbered(i), keep=keep)
    counted = []
    with watched(counted.append):
        write(path, numbered(3), keep=keep)
    assert len(counted) >= 15
    return len(counted)


@pytest.mark.parametrize(("links", "mode"), [(True, 0o640), (False, 0o600)], indirect=["links"])
def test_the_mode_stays_and_is_that_of_what_lies_beside(tmp_path, mode, links):
    path, umask = tmp_path / "file", os.umask(0o027)

    def look(_):
        for one in tmp_path.iterdir():
            assert not stat.S_IMODE(one.stat().st_mode) & ~mode, one

    try:
        write(path, numbered(0))
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(mode)
        os.umask(0)
        for i in (1, 2):
            with watched(look):
                write(path, numbered(i), keep=3)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()] == 3 * [mode]


class Killed(BaseException):
    pass


def raising(error, at):
    """Raises in place of the call with this number, and, if it is a kill, of all later ones."""

    def before(number):
        if number == at or (number > at and error is Killed):
            raise error

    return before


@pytest.mark.parametrize("links", [True, False], indirect=True)
@pytest.mark.parametrize("error", [Killed, PermissionError])
def test_a_kill_or_an_error_at_any_call_leaves_a_whole_file(tmp_path, links, error):
    path, newest = tmp_path / "file", 5
    names = [path, *map(path.with_suffix, (".1", ".2", ".3"))]

    for at in range(1, calls_of_a_write(path, keep=3) + 1):
        for older in (2, 1, 0):
            write(path, numbered(newest - older), keep=3)
        has_failed = True
        with contextlib.suppress(Killed, OSError), watched(raising(error, at)):
            write(path, numbered(newest + 1), keep=3)
            has_failed = False  # nor has it done without
        whole = [int(read(one)[0]["i"]) for one in names if one.exists()]
        assert path.exists() or not links  # without links there may be `file.1` alone
        assert error is Killed or not [*tmp_path.glob("*partial*")]
        assert whole[0] in (newest, newest + 1)[not has_failed :]
        assert whole == sorted(whole, reverse=True)
        assert len(whole) >= 3 or whole[0] == newest  # at most the oldest is gone
        newest = whole[0] + 1
        write(path, numbered(newest), keep=3)
        again = states(tmp_path)
        assert again["file"] == newest and {*again} <= {"file", "file.1", "file.2"}
        assert not links or len({*again.values()}) == len(again)  # no state is kept twice


@pytest.mark.parametrize("links", [True, False], indirect=True)
def test_of_two_programs_one_gets_an_error_or_the_last_one_wins(tmp_path, links):
    """The second one writes its whole file before any call of the first."""
    path, found = tmp_path / "file", []

    for at in range(1, calls_of_a_write(path, keep=2) + 1):
        write(path, numbered(0), keep=2)
        expected = {1, 2}
        try:
            with watched(lambda n, at=at: n == at and write(path, numbered(2), keep=2)):
                write(path, numbered(1), keep=2)
        except OSError as error:
            removed = "another program, which saves to it too, has removed the new file"
            assert removed in str(error) or isinstance(error, FileNotFoundError)
            expected = {2}
        now = states(tmp_path)  # which are all whole
        assert {*now} <= {"file", "file.1"} and ("file" in now or not links)
        assert now.get("file", now.get("file.1")) in expected
        found.append((expected, now))
    both = [({1, 2}, {"file": 1, "file.1": 2}), ({2}, {"file": 2, "file.1": 0})]
    assert min(map(found.count, both)) > 5  # mostly, the previous file is kept, too


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
