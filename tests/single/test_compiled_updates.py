"""Updates as loops in C, and everything that can stop the compiler from working."""

import errno
import functools
import itertools
import os
import stat

import numpy as np
import pytest
from internals import compiled, library_cache, reduce_chunk, sums_of_squares
from package_kernels import DTYPES, optimizers_of
from slow import slow_but

from hpcstrat import ReduceOp, optimizers

REAL = [dtype for dtype in DTYPES if dtype.kind != "c"]
LOOPS = [(dtype, name) for dtype in REAL for name in optimizers_of(dtype)]
# The compiler runs once per loop. These cover all operations per dtype, numbers of slots, options.
QUICK_LOOPS = [(dtype, name) for dtype, name in LOOPS if name in ("Adam", "choices")]
QUICK_LOOPS += [
    (np.dtype(np.float32), name)
    for name in (
        "SGD",
        "RMSprop, centered, with momentum",
        "Ftrl",
        "clipped values",
        "averages that overwrite",
        "norms",
    )
]
has_compiler = pytest.mark.skipif(compiled.compiler() is None, reason="there is no C compiler")
RULE = optimizers.SGD(0.5).update_rule(0.5, 1)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Each test starts with nothing compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    compiled._loops.clear()
    yield tmp_path / "cache" / "hpcstrat"
    compiled._loops.clear()


def libraries(folder):
    return sorted(path.name for path in folder.glob("*.so")) if folder.exists() else []


@has_compiler
@pytest.mark.parametrize(("dtype", "name"), slow_but(QUICK_LOOPS, LOOPS), ids=str)
def test_a_loop_gives_the_bits_of_the_operations(dtype, name):
    optimizer, random = optimizers_of(dtype)[name], np.random.default_rng(7)
    sizes = (1, 5000, 31, 4096, 8)
    with np.errstate(all="ignore"):
        for step, messages in itertools.product((1, 5), (1, 2, 3)):
            rule = optimizer.update_rule(0.1, step)
            first, norms, sums = rule, rule.norms, []
            if norms is not None:
                first = norms.rule_of(0, ())
                rule = norms.rule_of(1, [0.5] * norms.most)
            loop = compiled.loop(rule, dtype)
            assert loop is not None
            rows, expected = [], []
            for size in sizes:
                arrays = [
                    random.standard_normal(size).astype(dtype)
                    for _ in range(1 + len(optimizer.all_slots) + messages)
                ]
                arrays[1:-messages] = [abs(array) for array in arrays[1:-messages]]
                count = len(arrays) - messages
                value, *slots = (array.copy() for array in arrays[:count])
                gradient = np.empty_like(value)
                reduce_chunk(gradient, arrays[count:], ReduceOp.SUM)
                if norms is not None:
                    sums.append(sums_of_squares(first.apply(value, gradient, slots, gradient)))
                rule.apply(value, gradient, slots, np.empty_like(value))
                rows.append(arrays)
                expected.append([value, *slots, *(array.copy() for array in arrays[count:])])
            if norms is not None:
                loop_of_first = compiled.loop(first, dtype)
                assert loop_of_first is not None
                found = np.zeros(len(sums[0]))
                call = loop_of_first(np.array(first.kernel_constants), found)
                call(*compiled.table(rows, messages))
                assert found.tolist() == functools.reduce(np.add, sums).tolist()
            call = loop(np.array(rule.kernel_constants), np.empty(0))
            call(*compiled.table(rows, messages))
            for found, wanted in zip(rows, expected, strict=True):
                assert [array.tobytes() for array in found] == [array.tobytes() for array in wanted]


@has_compiler
def test_it_is_compiled_once(home, monkeypatch):
    assert compiled.loop(RULE, np.dtype(np.float32)) is not None
    (name,) = libraries(home)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    compiled._loops.clear()
    monkeypatch.setattr(library_cache, "_compile", None)  # is not called again
    assert compiled.loop(RULE, np.dtype(np.float32)) is not None
    assert libraries(home) == [name]


@has_compiler
def test_another_processor_gets_a_loop_of_its_own(home, monkeypatch):
    assert compiled.loop(RULE, np.dtype(np.float32)) is not None
    compiled._loops.clear()
    monkeypatch.setattr(library_cache, "_processor", lambda: ("another",))
    assert compiled.loop(RULE, np.dtype(np.float32)) is not None
    assert len(libraries(home)) == 2


def compiler_that(text):
    def make(folder, monkeypatch):
        path = folder / "cc"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", os.fspath(path))

    return make


def open_to_all(folder, monkeypatch):
    (folder / "cache" / "hpcstrat").mkdir(parents=True)
    (folder / "cache" / "hpcstrat").chmod(0o777)


def a_link(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    (folder / "cache").mkdir()
    (folder / "cache" / "hpcstrat").symlink_to(folder / "elsewhere")


def somebody_elses(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)


def a_full_disk(folder, monkeypatch):
    def fsync(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)


def no_place(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(folder / "file"))


def no_home(folder, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(library_cache.pathlib.Path, "home", home)


OBSTACLES = {
    "no home": no_home,
    "no compiler": lambda folder, monkeypatch: monkeypatch.setenv("CC", "no-such-compiler"),
    "a compiler that fails": compiler_that("exit 1"),
    "a compiler that does nothing": compiler_that("exit 0"),
    "a compiler that writes something else": compiler_that(
        'while [ "$1" != -o ]; do shift; done; echo x >"$2"'
    ),
    "a full disk": a_full_disk,
    "a folder that all can write to": open_to_all,
    "a folder that is a link": a_link,
    "a folder of somebody else": somebody_elses,
    "no place for a folder": no_place,
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_without_a_loop_there_is_none(tmp_path, monkeypatch, home, obstacle):
    OBSTACLES[obstacle](tmp_path, monkeypatch)
    assert compiled.loop(RULE, np.dtype(np.float32)) is None


@has_compiler
def test_a_loop_that_gives_other_bits_is_not_taken(monkeypatch):
    monkeypatch.setattr(compiled, "_LOOP", compiled._LOOP.replace("KERNEL ", "KERNEL value += 1; "))
    assert compiled.loop(RULE, np.dtype(np.float32)) is None


@has_compiler
def test_a_failed_compilation_leaves_nothing(home, monkeypatch):
    monkeypatch.setattr(compiled, "_LOOP", "this is no C")
    assert compiled.loop(RULE, np.dtype(np.float32)) is None
    assert list(home.iterdir()) == []


def test_what_has_no_kernel_has_no_loop():
    assert compiled.loop(RULE._replace(kernel=None), np.dtype(np.float32)) is None
    assert compiled.loop(RULE, np.dtype(np.complex64)) is None
