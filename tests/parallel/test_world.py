"""Ranks, hosts, and calls that need no strategy."""

import errno
import os

import numpy as np
import pytest
from internals import launchers, worlds
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD


def test_the_world_is_mpis():
    world, launcher = worlds.start(), launchers.find()
    assert worlds.start() is world
    assert (world.rank, world.size) == (hs.rank(), hs.size()) == (COMM.rank, COMM.size)
    assert launcher is None or (launcher.rank, launcher.size) == (COMM.rank, COMM.size)
    assert hs.is_lead() == (COMM.rank == 0)
    assert len(set(COMM.allgather(world.seed))) == 1
    # Private duplicates.
    assert world.comm is not None and world.host_comm is not None
    assert MPI.Comm.Compare(world.comm, COMM) == MPI.CONGRUENT
    host = COMM.Split_type(MPI.COMM_TYPE_SHARED)
    of_host = (host.rank, host.size)
    host.Free()
    assert (world.host_comm.rank, world.host_comm.size) == of_host
    assert (world.local_rank, world.local_size) == (hs.local_rank(), hs.local_size()) == of_host
    # In order of first appearance.
    assert set(COMM.allgather(world.hosts)) == {world.hosts}
    assert list(dict.fromkeys(world.hosts)) == list(range(max(world.hosts) + 1))
    mine = [rank for rank in range(world.size) if world.hosts[rank] == world.hosts[world.rank]]
    assert (mine.index(world.rank), len(mine)) == of_host


def test_nothing_of_mpichs_is_left_to_be_left_behind():
    worlds.start()
    COMM.Barrier()
    with open("/proc/self/maps") as maps:
        segments = [line.split()[5:] for line in maps if " /dev/shm/mpich_shm_" in line]
    assert all(deleted or not os.path.exists(path) for path, *deleted in segments)


def test_the_lead_alone_runs_what_all_get_the_result_or_the_error_of():
    ran = []

    def compute(base, *, power):
        ran.append(COMM.rank)
        return {"values": np.arange(3) ** power + base}

    assert hs.any_rank(flag=COMM.rank == 0) is True
    assert hs.broadcast_object(obj=COMM.rank) == 0
    found = hs.on_lead(compute, 10 + COMM.rank, power=2)
    assert ran == [0] * (COMM.rank == 0)
    assert found["values"].tolist() == [10, 11, 14]
    with pytest.raises(TypeError, match="on_lead"):
        hs.on_lead(lambda: lambda: None)
    # A program that asks for `errno` does the same on all ranks.
    with pytest.raises(FileExistsError, match=r"^\[Errno 17\] File exists: '/'") as caught:
        hs.on_lead(os.mkdir, "/")
    assert caught.value.errno == errno.EEXIST
    if COMM.size > 1:  # with one rank it is an ordinary call
        with pytest.raises(hs.ReplicaMismatchError, match="barrier"):
            hs.on_lead(hs.barrier)
    assert hs.on_lead(fn=lambda: 7) == 7


def test_a_bar_for_one_rank():
    numbers = [3, 1, 2]
    bar = hs.progress(numbers, disable=True)
    assert list(bar) == numbers and (bar is numbers) == (COMM.rank > 0)
