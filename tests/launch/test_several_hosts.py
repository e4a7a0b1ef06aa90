"""MultiWorkerMirroredStrategy on several hosts: emulated ones, and any division of the ranks."""

import ast
import pathlib
import re
import socket
import textwrap

import pytest

slow = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
SHAPES = {
    "2 + 2": (0, 1, 0, 1),
    "1 + 2": (0, 1, 1),
    "2 + 1 + 1": (0, 1, 2, 0),
    "1 + 2 + 1": (0, 1, 1, 2),
    "2 + 2 + 2": (0, 1, 2, 2, 1, 0),  # the last ranks are in the reverse order of the hosts
}
BY_MPI = ("2 + 2", "2 + 1 + 1")
"""Divisions that MPICH makes itself."""


def on_hosts(quick, *others):
    return pytest.mark.parametrize(
        "shape", [quick, *(pytest.param(shape, marks=slow) for shape in others)]
    )


def on_each(text):
    """A program with these lines."""
    begin = "import tempfile\nimport numpy as np\nfrom several_hosts import *\n"
    return begin + textwrap.dedent(text) + "\nreport(found)\n"


def run(launch, shape, program, **variables):
    """Runs a program on several hosts; returns each rank's `found` at its end, and its host."""
    program = program if program.endswith(".py") else on_each(program)
    hosts, env = SHAPES[shape], {"HPCSTRAT_OUTPUT": "all", **variables}
    division = "".join(map(str, hosts))
    if shape in BY_MPI:
        if launch.open_mpi:
            pytest.skip("only MPICH can pose as several hosts")
        division, env = "", env | {"MPIR_CVAR_NUM_CLIQUES": str(len({*hosts}))}
    result = launch(program, len(hosts), division, env=env)
    assert (result.status, result.err, result.leftovers) == (0, "", [])
    return [ast.literal_eval(line) for line in result.out.splitlines()], hosts


@on_hosts("1 + 2", "2 + 1 + 1", "2 + 2 + 2")
def test_updates_as_on_one_host(launch, shape):
    found, hosts = run(
        launch, shape, "updates_on_hosts.py", HPCSTRAT_CHECK=int(len(SHAPES[shape]) < 4)
    )
    assert len(found) == len(hosts) and found[0] and all(one == found[0] for one in found)


MANY_MEGABYTES = """
    size = 33_554_176
    with strategy.scope():
        v, optimizer = hs.Variable(np.zeros(size, np.float16)), hs.optimizers.SGD(1.0, momentum=1.0)
    gradient, totals = np.full(size, rank + 1, np.float16), []
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    strategy.run(lambda: totals.append(hs.get_replica_context().all_reduce("SUM", gradient)))
    found = bool((v.numpy() == -3 * 6).all()), bool((totals[0] == 6).all())
"""


@pytest.mark.slow
def test_a_message_of_many_megabytes(launch):
    """Of a size at which the hosts' slices differ, which has hung."""
    assert run(launch, "1 + 2", MANY_MEGABYTES)[0] == [(True, True)] * 3


@on_hosts("1 + 2", "1 + 2 + 1", "2 + 2 + 2")
def test_reductions(launch, shape):
    """Of all dtypes, in short messages and large ones: near the exact values, the same bits on all ranks."""
    found, hosts = run(
        launch,
        shape,
        """
    import functools, zlib
    import ml_dtypes
    from hpcstrat._transports.reduction import REDUCTIONS

    found = []

    def sum_up(arrays):
        return functools.reduce(np.add, arrays)

    def values(dtype, size, r):
        return (1 + 9 * np.random.default_rng([size, r]).random(size)).astype(dtype)

    def step(size):
        for op, reduction in REDUCTIONS.items():
            mine = [values(dtype, size, rank) for dtype in reduction.dtypes]
            results = hs.get_replica_context().all_reduce(op, mine)
            for dtype, result in zip(reduction.dtypes, results, strict=True):
                parts = [values(dtype, size, r).real.astype(float) for r in range(N)]
                exact = getattr(np, op.name.lower())(parts, axis=0)
                assert np.allclose(result.real.astype(float), exact, rtol=0.01), (op, dtype)
                found.append(zlib.crc32(result.tobytes()))

    for size in (1, 60_000):
        strategy.run(step, args=(size,))

    # Within each host in rank order, then in the order of the hosts' first ranks.
    parts = [values("float32", 60_000, r) for r in range(N)]
    ranks_of = [[r for r in range(N) if hosts[r] == host] for host in dict.fromkeys(hosts)]
    exact = sum_up([sum_up([parts[r] for r in ranks]) for ranks in ranks_of])
    total = strategy.run(lambda: hs.get_replica_context().all_reduce("SUM", parts[rank]))
    found.append(strategy.experimental_local_results(total)[mine.index(rank)].tobytes() == exact.tobytes())
    """,
    )
    assert len(found) == len(hosts) and all(one == found[0] for one in found)
    assert found[0][-1] is True


@on_hosts("1 + 2", "2 + 2")
def test_results_devices_and_datasets_of_each_host(launch, shape):
    """The second host's elements end first; its replicas get empty batches, nothing is lost."""
    found, hosts = run(
        launch,
        shape,
        """
    value = strategy.run(lambda: 10 * hs.get_replica_context().replica_id_in_sync_group)
    results = strategy.experimental_local_results(value), int(strategy.reduce("SUM", value, axis=None))

    resolver = strategy.cluster_resolver
    cluster = resolver.cluster_spec().as_dict(), resolver.task_type, resolver.task_id
    devices = strategy.extended.worker_devices

    contexts, of_pipelines, of_one = [], [], []

    def dataset_fn(context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        dataset = hs.data.Dataset.range(24).shard(context.num_input_pipelines, context.input_pipeline_id)
        dataset = dataset.shuffle(24) if context.input_pipeline_id == 0 else dataset.take(5)
        return dataset.batch(2)

    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        strategy.run(lambda x: of_pipelines.append(x.tolist()), args=(batch,))
    for batch in strategy.experimental_distribute_dataset(hs.data.Dataset.range(11).batch(7)):
        strategy.run(lambda x: of_one.append(x.tolist()), args=(batch,))
    found = results, cluster, devices, contexts, of_pipelines, of_one
    """,
    )
    n, everyone = len(hosts), range(len(hosts))
    results, clusters, devices, contexts, of_pipelines, of_one = zip(*found, strict=True)
    for rank, host in enumerate(hosts):
        assert results[rank] == (
            tuple(10 * other for other in everyone if hosts[other] == host),
            10 * sum(everyone),
        )
        names = tuple(f"/job:worker/replica:0/task:{other}/device:CPU:0" for other in hosts)
        assert devices[rank] == names
        assert clusters[rank] == ({"worker": [socket.gethostname()] * 2}, "worker", host)
        assert contexts[rank] == [(2, host, n)]
    assert len({len(batches) for batches in of_pipelines}) == 1
    for host, elements in ((0, range(0, 24, 2)), (1, range(1, 11, 2))):
        given = [
            x
            for rank in everyone
            if hosts[rank] == host
            for batch in of_pipelines[rank]
            for x in batch
        ]
        assert sorted(given) == list(elements)
    for step, size in enumerate((7, 4)):
        begin, expected = 7 * step, []
        for rank in range(n):
            share = size // n + (rank < size % n)
            expected.append(list(range(begin, begin + share)))
            begin += share
        assert [batches[step] for batches in of_one] == expected


ERRORS = {
    "elements without dimensions": (
        "list(strategy.distribute_datasets_from_function("
        "lambda context: hs.data.Dataset.range(1 + 3 * context.input_pipeline_id)))",
        "one worker's elements end before another's",
    ),
    "pipelines that differ": (
        "list(strategy.distribute_datasets_from_function("
        "lambda context: hs.data.Dataset.range(3 + hs.rank()).batch(1)))",
        "every rank must make the same dataset",
    ),
    "central": ("hs.CentralStorageStrategy()", "has one worker, but the 3 ranks run on 2 hosts"),
    "mirrored": ("hs.MirroredStrategy()", "or use MultiWorkerMirroredStrategy"),
}


def test_errors_on_two_hosts(launch):
    """All ranks raise each of them, and continue."""
    program = f"""
    found = []
    for wrong in {[body for body, _ in ERRORS.values()]}:
        try:
            eval(wrong)
            found.append("nothing")
        except Exception as error:
            found.append(str(error))
        assert not hs.any_rank(False)
    """
    for said in run(launch, "1 + 2", program)[0]:
        for (name, (_, message)), text in zip(ERRORS.items(), said, strict=True):
            assert re.search(message, text), name


@on_hosts("1 + 2", "2 + 2")
def test_each_host_resumes_its_own_pipeline(launch, shape):
    """The hosts have other elements, and other numbers of them, before and within a pass."""
    found, hosts = run(
        launch,
        shape,
        """
    def dataset_fn(context):
        dataset = hs.data.Dataset.range(14).shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.take(7 - 3 * context.input_pipeline_id).shuffle(7, seed=1).batch(1)

    def make():
        return strategy.distribute_datasets_from_function(dataset_fn)

    def rows_of(steps):
        return [strategy.gather(step, axis=0).tolist() for step in steps]

    path = hs.broadcast_object(tempfile.mkdtemp()) + "/saved"
    batches = make()
    both = rows_of(batches), rows_of(batches)
    found = []
    for taken in (None, 0, 2, len(both[0]) - 1, len(both[0])):
        batches = make()
        iterator = None if taken is None else iter(batches)
        before = rows_of(next(iterator) for _ in range(taken or 0))
        hs.checkpoint.Checkpoint(batches=batches).save(path)
        batches = make()
        hs.checkpoint.Checkpoint(batches=batches).restore(path)
        found.append(before + rows_of(batches) == both[0] and rows_of(batches) == both[1])
    """,
    )
    assert all(all(one) and len(one) > 3 for one in found) and len(found) == len(hosts)


@slow
def test_hosts_of_different_sizes_clip_alike(launch):
    """With eight rows NumPy's sum is in another order than with seven."""
    program = """
    rng = np.random.default_rng(rank)
    with strategy.scope():
        v, optimizer = hs.Variable(np.zeros(7001)), hs.optimizers.SGD(1.0, global_clipnorm=1.0)
    found = []
    for _ in range(100):
        strategy.run(lambda: optimizer.apply_gradients([(rng.standard_normal(7001), v)]))
        found.append(float(v.numpy().sum()))
    """
    division = "0" * 8 + "1" * 7
    result = launch(on_each(program), 15, division, env={"HPCSTRAT_OUTPUT": "all"})
    assert (result.status, result.err) == (0, "")
    found = result.out.splitlines()
    assert len(found) == 15 and len({*found}) == 1


def test_one_host_without_memory_stops_all_once(launch):
    """All ranks raise; later calls then work, though one host has grown and the other has shrunk."""
    program = """
    memory = Memory()

    def total(size):
        totals = []
        strategy.run(lambda: totals.append(hs.get_replica_context().all_reduce("SUM", np.full(size, 1.0 + rank))))
        return {*totals[0].tolist()}

    found = [total(10_000)]
    memory.is_full = hosts[rank] == 1 and hs.local_rank() == 0
    try:
        total(50_000)
    except MemoryError as error:
        found.append("planted" in str(error))
    memory.is_full = False
    found += [total(10_000), total(50_000)]
    """
    assert run(launch, "1 + 2", program)[0] == [[{6.0}, True, {6.0}, {6.0}]] * 3


@pytest.mark.parametrize("action", [pytest.param("default", marks=slow), "error"])
def test_hosts_that_cannot_connect_to_rank_0(launch, action):
    """The job goes on without a watchdog, and says so; if that is an error, all ranks raise it."""
    if launch.open_mpi:
        pytest.skip("only MPICH can pose as several hosts")
    program = f"""
    import warnings
    import hpcstrat as hs
    from hpcstrat._watchdog import channels

    channels.addresses = lambda port: [("127.0.0.1", 1)]
    warnings.filterwarnings("{action}", "hpcstrat: not all ranks can reach rank 0")
    try:
        hs.barrier()
    except UserWarning as error:
        print(f"rank {{hs.rank()}} raises")
    else:
        print(f"rank {{hs.rank()}} goes on")
    """
    env = {"MPIR_CVAR_NUM_CLIQUES": "2", "HPCSTRAT_OUTPUT": "all"}
    result = launch(program, 3, env=env)
    does = "goes on" if action == "default" else "raises"
    assert result.status == 0
    assert sorted(result.out.splitlines()) == [f"rank {rank} {does}" for rank in range(3)]
    warned = re.findall(r"program_\w+\.py:\d+: UserWarning: hpcstrat: not all ranks.*", result.err)
    assert len(warned) == 3 * (action == "default") and "HPCSTRAT_" not in result.err
