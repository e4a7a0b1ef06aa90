"""MultiWorkerMirroredStrategy on two hosts: those that MPICH poses as, and any division of the ranks into two."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# `sys.argv[1]` is the division: for each rank its host; empty where MPI says.
START = """
    import dataclasses, sys, warnings
    import numpy as np
    import hpcstrat as hs
    from hpcstrat import _world

    warnings.filterwarnings("ignore", "iterating over .* have no elements")  # of short batches, meant
    division = tuple(int(host) for host in sys.argv[1])
    if division:
        world = _world.start()
        host_comm = world.comm.Split(division[world.rank])
        local = dict(hosts=division, host_comm=host_comm, local_rank=host_comm.rank, local_size=host_comm.size)
        _world._world = dataclasses.replace(world, **local)
    strategy = hs.MultiWorkerMirroredStrategy()
    N, rank = strategy.num_replicas_in_sync, hs.rank()
    hosts = _world.start().hosts
    mine = [other for other in range(N) if hosts[other] == hosts[rank]]
"""
REPORT = """
    for r in range(N):  # each rank in its turn
        if r == rank:
            print(repr(found), flush=True)
        hs.barrier()
"""


@pytest.fixture(params=["2 + 2", "3 + 1", "1 + 2"])
def two_hosts(launch, request):
    """Runs a program on two hosts; returns what each rank's `found` is at its end, and each rank's host."""
    poses, hosts = {"2 + 2": (not launch.open_mpi, (0, 1, 0, 1)), "3 + 1": (False, (0, 0, 0, 1))}.get(
        request.param, (False, (0, 1, 1))
    )
    if request.param == "2 + 2" and not poses:
        pytest.skip("only MPICH can pose as several hosts")

    def run(program):
        division = "" if poses else "".join(map(str, hosts))
        env = {"HPCSTRAT_OUTPUT": "all"} | ({"MPIR_CVAR_NUM_CLIQUES": "2"} if poses else {})
        result = launch(START + program + REPORT, len(hosts), division, env=env)
        assert (result.status, result.stderr, result.leftovers) == (0, "", [])
        return [ast.literal_eval(line) for line in result.stdout.splitlines()], hosts

    return run


def test_sums_and_updates(two_hosts):
    """Small messages and large ones, which go inside the hosts first. Whole numbers, so that sums are exact."""
    found, hosts = two_hosts(
        """
    def step(size):
        context = hs.get_replica_context()
        own = np.arange(size) % 101 + context.replica_id_in_sync_group
        sums = context.all_reduce("SUM", own.astype(np.float64))
        means = context.all_reduce("MEAN", [own, own.astype(np.float32)])
        largest = context.all_reduce("MAX", own)
        optimizer.apply_gradients([(own.astype(np.float32), v)])
        assert (sums == N * (np.arange(size) % 101) + N * (N - 1) / 2).all()
        assert (means[0] == np.arange(size) % 101 + (N - 1) / 2).all() and means[0].dtype == np.float64
        assert np.allclose(means[1], means[0])
        assert (largest == np.arange(size) % 101 + N - 1).all()

    found = []
    for size in (5, 60_000):
        with strategy.scope():
            v, optimizer = hs.Variable(np.zeros(size, np.float32)), hs.optimizers.SGD(1.0)
        for _ in range(2):
            strategy.run(step, args=(size,))
        assert (v.numpy() == -2 * (N * (np.arange(size) % 101) + N * (N - 1) / 2)).all()
        found.append(float(v.numpy().sum()))
    """
    )
    assert len(found) == len(hosts) and all(one == found[0] for one in found)


def test_local_results_are_this_hosts(two_hosts):
    found, hosts = two_hosts(
        """
    value = strategy.run(lambda: 10 * hs.get_replica_context().replica_id_in_sync_group)
    found = strategy.experimental_local_results(value), int(strategy.reduce("SUM", value, axis=None))
    """
    )
    everyone = range(len(hosts))
    for rank, (results, total) in enumerate(found):
        assert results == tuple(10 * other for other in everyone if hosts[other] == hosts[rank])
        assert total == 10 * sum(everyone)


def test_each_host_has_its_pipeline(two_hosts):
    """The second host's elements end first; its replicas then get empty batches, and nothing is lost."""
    found, hosts = two_hosts(
        """
    contexts, found = [], []

    def dataset_fn(context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        dataset = hs.data.Dataset.range(24).shard(context.num_input_pipelines, context.input_pipeline_id)
        dataset = dataset.shuffle(24) if context.input_pipeline_id == 0 else dataset.take(5)
        return dataset.batch(2)

    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        strategy.run(lambda x: found.append(x.tolist()), args=(batch,))
    found = contexts, found
    """
    )
    steps = {len(batches) for _, batches in found}
    assert len(steps) == 1
    for rank, (contexts, _) in enumerate(found):
        assert contexts == [(2, hosts[rank], len(hosts))]
    for host, elements in ((0, range(0, 24, 2)), (1, range(1, 11, 2))):
        given = [
            x for rank, (_, batches) in enumerate(found) if hosts[rank] == host for batch in batches for x in batch
        ]
        assert sorted(given) == list(elements)


def test_one_dataset_for_all_hosts(two_hosts):
    found, hosts = two_hosts(
        """
    found = []
    for batch in strategy.experimental_distribute_dataset(hs.data.Dataset.range(11).batch(7)):
        strategy.run(lambda x: found.append(x.tolist()), args=(batch,))
    """
    )
    n = len(hosts)
    for step, size in enumerate((7, 4)):
        begin, expected = 7 * step, []
        for rank in range(n):
            share = 7 // n + (rank < 7 % n)
            expected.append(list(range(begin, min(begin + share, 7 * step + size))))
            begin = min(begin + share, 7 * step + size)
        assert [batches[step] for batches in found] == expected


def test_workers_and_devices(two_hosts):
    found, hosts = two_hosts(
        """
    spec = strategy.cluster_resolver.cluster_spec().as_dict()
    found = strategy.extended.worker_devices, len(spec["worker"]), strategy.cluster_resolver.task_id
    """
    )
    for rank, (devices, count, task) in enumerate(found):
        assert devices == tuple(f"/job:worker/replica:0/task:{host}/device:CPU:0" for host in hosts)
        assert (count, task) == (2, hosts[rank])


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "dataset = lambda context: hs.data.Dataset.range(3 + context.input_pipeline_id)\n"
            "    list(strategy.distribute_datasets_from_function(dataset))",
            "one worker's elements end before another's",
        ),
        (
            "dataset = lambda context: hs.data.Dataset.range(3 + hs.rank()).batch(1)\n"
            "    list(strategy.distribute_datasets_from_function(dataset))",
            "every rank must make the same dataset",
        ),
        ("hs.CentralStorageStrategy()", "has one worker, and the 4 ranks run on 2 hosts"),
        ("hs.MirroredStrategy()", "or take MultiWorkerMirroredStrategy"),
        ("hs.MultiWorkerMirroredStrategy('four')", "cluster_resolver is 'four'; pass one of"),
        (
            "hs.MultiWorkerMirroredStrategy(hs.cluster_resolver.SimpleClusterResolver("
            "hs.cluster_resolver.ClusterSpec({'worker': ['a:1', 'b:1', 'c:1']})))",
            "knows 3 tasks .* and the 4 ranks run on 2 hosts",
        ),
    ],
    ids=["elements without dimensions", "pipelines that differ", "central", "mirrored", "no resolver", "resolver"],
)
def test_errors_on_two_hosts(launch, body, message):
    result = launch(START + f"    {body}\n", 4, "0011", env={"HPCSTRAT_OUTPUT": "all"})
    assert result.status != 0
    assert re.search(message, result.stderr)
    assert result.leftovers == []


@pytest.mark.slow
def test_train_on_two_hosts(launch):
    if launch.open_mpi:
        pytest.skip("only MPICH can pose as several hosts")
    program, options = ROOT / "examples" / "train.py", ["--epochs", "2", "--strategy"]
    alone = launch(program, 1, *options, "central")
    many = launch(program, 3, *options, "multi_worker", env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert (many.status, many.leftovers) == (0, [])
    numbers = [[float(number) for number in re.findall(r"\d\.\d+", result.stdout)] for result in (alone, many)]
    assert len(numbers[0]) == 5
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-4)


def test_one_host_without_memory_stops_all_once(launch):
    """All ranks raise; the same call then works, though the other host has grown meanwhile."""
    program = """
    transport = strategy._group.communicator._host
    commit, missing = transport.segment.commit, [hosts[rank] == 1 and transport.rank == 0]

    def commit_later(start, stop):
        if missing.pop():
            missing.append(False)
            raise MemoryError("planted")
        missing.append(False)
        commit(start, stop)

    transport.segment.commit = commit_later

    def step():
        return hs.get_replica_context().all_reduce("SUM", np.full(50_000, 1.0 + rank))

    found = []
    try:
        strategy.run(step)
    except MemoryError as error:
        found.append("planted" in str(error))
    strategy.run(lambda value: found.extend(set(value.tolist())), args=(strategy.run(step),))
    """
    result = launch(START + program + REPORT, 4, "0011", env={"HPCSTRAT_OUTPUT": "all"})
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert [ast.literal_eval(line) for line in result.stdout.splitlines()] == [[True, 10.0]] * 4


READY = """
    from hpcstrat.optimizers.base import state_of_optimizer

    with strategy.scope():
        variables = [hs.Variable(np.zeros(400_000, np.float32)) for _ in range(3)]
        optimizer = hs.optimizers.SGD(1.0)
        buffers = optimizer.gradient_buffers(variables)
    (plan,) = state_of_optimizer(optimizer).plans.values()
    begun = []

    def step(applies=True):
        for i in (2, 1):
            buffers[i][...] = (rank + 1) * (i + 1)
            buffers.ready(buffers[i])
        begun.append(len(plan.marks.begun))
        buffers[0][...] = rank + 1
        if applies:
            optimizer.apply_gradients(zip(buffers, variables))

    for _ in range(3):
        strategy.run(step)
    for i, v in enumerate(variables):
        assert (v.numpy() == -3 * (i + 1) * N * (N + 1) / 2).all()
    found = begun
"""


def test_marked_gradients_are_summed_while_the_program_goes_on(two_hosts):
    found, _ = two_hosts(READY)
    assert all(begun == [2, 2, 2] for begun in found)


def test_marked_gradients_at_the_end_of_the_program(launch):
    """What is under way ends before MPI does."""
    program = START + READY + "    strategy.run(step, args=(False,))\n    print(rank)\n"
    result = launch(program, 4, "0011", env={"HPCSTRAT_OUTPUT": "all"})
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert sorted(result.stdout.split()) == ["0", "1", "2", "3"]


def test_marked_gradients_where_one_thread_only_may_call_mpi(launch):
    """Marks are compared, and sums begin in `apply_gradients`."""
    program = "    import mpi4py\n    mpi4py.rc.thread_level = 'serialized'\n" + START + READY + REPORT
    result = launch(program, 3, "011", env={"HPCSTRAT_OUTPUT": "all"})
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert [ast.literal_eval(line) for line in result.stdout.splitlines()] == [[0, 0, 0]] * 3
