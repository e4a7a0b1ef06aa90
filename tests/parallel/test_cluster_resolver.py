import json
import socket

import pytest
from mpi4py import MPI

from hpcstrat.cluster_resolver import (
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

pytestmark = pytest.mark.core


def host_of_each_rank():
    """By its first rank, asked of MPI itself."""
    comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    return MPI.COMM_WORLD.allgather(comm.bcast(MPI.COMM_WORLD.rank))


def test_a_worker_is_a_host():
    firsts = host_of_each_rank()
    resolver = MPIClusterResolver()
    own = sorted(set(firsts)).index(firsts[MPI.COMM_WORLD.rank])
    assert (resolver.task_type, resolver.task_id) == ("worker", own)
    names = MPI.COMM_WORLD.allgather(socket.gethostname())
    assert resolver.cluster_spec().as_dict() == {
        "worker": [names[first] for first in sorted(set(firsts))]
    }
    assert resolver.master() == socket.gethostname()
    assert resolver.master("worker", 0, "x") == f"x://{names[0]}"
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", own)


def test_what_was_asked_once_is_not_collective():
    resolver = MPIClusterResolver()
    resolver.cluster_spec()
    if MPI.COMM_WORLD.rank == 0:
        assert resolver.num_accelerators("worker", 0).keys() == {"GPU"}
        assert MPIClusterResolver().task_id == 0
        with pytest.raises(ValueError, match="No such job in cluster: 'ps'; there are 'worker'"):
            resolver.master("ps", 0)


def test_what_is_not_asked_of_mpi_is_the_same_on_every_rank(monkeypatch):
    spec = ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]})
    assert (spec.jobs, spec.num_tasks("worker"), spec.task_indices("worker")) == (
        ["worker", "ps"],
        2,
        [0, 1],
    )
    assert spec.job_tasks("worker") == ["a:1", "b:2"]
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": spec.as_dict(), "task": {"type": "worker", "index": 1}})
    )
    simple = SimpleClusterResolver(spec, "b:2", "worker", 1)
    found = [
        (one.cluster_spec().as_dict(), one.master(), one.num_accelerators(), one.task_id)
        for one in (simple, UnionResolver(simple), TFConfigClusterResolver())
    ]
    assert found == [(spec.as_dict(), "b:2", {}, 1)] * 3
    assert {
        one.environment or "" for one in (simple, UnionResolver(simple), TFConfigClusterResolver())
    } == {""}
    assert MPI.COMM_WORLD.allgather(found) == [found] * MPI.COMM_WORLD.size
