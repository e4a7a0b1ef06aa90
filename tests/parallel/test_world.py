import os

from internals import _world
from mpi4py import MPI

COMM = MPI.COMM_WORLD


def test_the_world_is_mpis():
    world = _world.start()
    assert _world.start() is world
    assert (world.rank, world.size) == (COMM.rank, COMM.size)
    assert world.launcher is None or (world.launcher.rank, world.launcher.size) == (COMM.rank, COMM.size)


def test_communicators_are_private_duplicates():
    world = _world.start()
    assert world.comm is not None and world.host_comm is not None
    assert MPI.Comm.Compare(world.comm, COMM) == MPI.CONGRUENT
    assert (world.host_comm.rank, world.host_comm.size) == (world.local_rank, world.local_size)


def test_hosts_are_indices_in_order_of_first_appearance():
    world = _world.start()
    hosts = COMM.allgather(world.hosts)
    assert set(hosts) == {world.hosts}
    assert list(dict.fromkeys(world.hosts)) == list(range(max(world.hosts) + 1))
    mine = [rank for rank in range(world.size) if world.hosts[rank] == world.hosts[world.rank]]
    assert mine.index(world.rank) == world.local_rank
    assert len(mine) == world.local_size


def test_the_seed_is_shared():
    assert len(set(COMM.allgather(_world.start().seed))) == 1


def test_nothing_of_mpichs_is_left_to_be_left_behind():
    _world.start()
    COMM.Barrier()
    with open("/proc/self/maps") as maps:
        segments = [line.split()[5:] for line in maps if " /dev/shm/mpich_shm_" in line]
    assert all(deleted or not os.path.exists(path) for path, *deleted in segments)
