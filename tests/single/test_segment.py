import os

import numpy as np
import pytest

from hpcstrat._communicators import segment
from hpcstrat._communicators.segment import available_memory, physical_memory, private_segment

MIB = 1 << 20


def backed(made):
    return os.fstat(made._file).st_blocks * 512


def test_memory_appears_and_goes():
    made = private_segment()
    assert made.size >= 1 << 30 and made.array.size == made.size and made.array.dtype == np.uint8
    assert backed(made) == 0
    made.commit(MIB, 5 * MIB)
    assert backed(made) == 4 * MIB
    made.array[MIB : 5 * MIB] = 7
    made.release(2 * MIB, 4 * MIB)
    assert backed(made) == 2 * MIB
    assert (made.array[MIB : 2 * MIB] == 7).all() and (made.array[4 * MIB : 5 * MIB] == 7).all()
    made.commit(2 * MIB, 3 * MIB)
    assert not made.array[2 * MIB : 3 * MIB].any()


def test_pages_that_others_share_stay():
    made = private_segment()
    made.commit(0, 3 * 4096)
    made.array[: 3 * 4096] = 5
    made.release(100, 2 * 4096 + 100)  # whole pages within: the second one only
    assert (made.array[:4096] == 5).all() and (made.array[2 * 4096 : 3 * 4096] == 5).all()
    made.release(10, 20)
    assert (made.array[:4096] == 5).all()


def test_nothing():
    made = private_segment()
    made.commit(5, 5)
    made.release(5, 5)
    assert backed(made) == 0


def test_more_than_there_is():
    made = private_segment()
    with pytest.raises(MemoryError, match="bytes are wanted beyond the|bytes are wanted and this host has"):
        made.commit(made.size, made.size + 4096)
    with pytest.raises(MemoryError, match="are wanted and this host has"):
        made.commit(0, 1 << 50)
    assert backed(made) == 0


def test_what_the_host_has_left_is_asked_for_large_ones(monkeypatch):
    made = private_segment()
    monkeypatch.setattr(segment, "available_memory", lambda: 1000)
    made.commit(0, MIB)
    with pytest.raises(MemoryError, match="67,108,864 bytes are wanted and this host has 1,000 left"):
        made.commit(0, 64 * MIB)


def test_facts_of_the_host():
    assert 0 < available_memory() <= physical_memory()


def test_nothing_is_left_behind():
    before = set(os.listdir("/dev/shm"))
    made = private_segment()
    made.commit(0, MIB)
    assert {name for name in set(os.listdir("/dev/shm")) - before if "hpcstrat" in name} == set()
