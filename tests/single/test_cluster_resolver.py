import os
import pickle
import subprocess
import sys

import pytest
from internals import expand_nodes, expand_tasks

from hpcstrat.cluster_resolver import (
    ClusterResolver,
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionResolver,
)

# The cases below with a cluster are recorded from TensorFlow 2.15.1.
FOUR = ("t02n13,t02n41,t02n43,t02n44", "1(x4)")
TWO = ("n[1-2]", "2(x2)")
# rank, tasks, (nodes, tasks of each), CUDA_VISIBLE_DEVICES, arguments, then TensorFlow's results
SLURM = {
    "the first of four": (
        *(0, 4, FOUR, "0", {}),
        {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888", "t02n44:8888"]},
        *(("worker", 0), 1, "grpc://t02n13:8888", "grpc://t02n13:8888"),
    ),
    "the last of four": (
        *(3, 4, FOUR, "0,1", {}),
        {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888", "t02n44:8888"]},
        *(("worker", 3), 2, "grpc://t02n44:8888", "grpc://t02n13:8888"),
    ),
    "jobs": (
        *(3, 4, FOUR, None),
        {
            "jobs": {"ps": 1, "worker": 3},
            "tasks_per_node": 1,
            "gpus_per_node": 1,
            "gpus_per_task": 1,
        },
        {"ps": ["t02n13:8888"], "worker": ["t02n41:8888", "t02n43:8888", "t02n44:8888"]},
        *(("worker", 2), 1, "grpc://t02n44:8888", "grpc://t02n41:8888"),
    ),
    "tasks of unequal nodes": (
        *(1, 5, (FOUR[0], "2,1(x3)"), None),
        {
            "jobs": {"worker": 4, "ps": 1},
            "gpus_per_node": 2,
            "gpus_per_task": 1,
            "auto_set_gpu": False,
        },
        {
            "ps": ["t02n13:8888"],
            "worker": ["t02n13:8889", "t02n41:8888", "t02n43:8888", "t02n44:8888"],
        },
        *(("worker", 0), 1, "grpc://t02n13:8889", "grpc://t02n13:8889"),
    ),
    "ports and no protocol": (
        *(6, 7, ("n[1-4]", "2(x3),1"), "0,1,2,3", {"port_base": 5000, "rpc_layer": None}),
        {"worker": ["n1:5000", "n1:5001", "n2:5000", "n2:5001", "n3:5000", "n3:5001", "n4:5000"]},
        *(("worker", 6), 2, "n4:5000", "n1:5000"),
    ),
    "nodes of three names": (
        *(4, 9, ("n[1-2],m5,o[3-4,6,7-9]", "1(x9)"), "0", {}),
        {
            "worker": [
                f"{node}:8888" for node in ("m5", "n1", "n2", "o3", "o4", "o6", "o7", "o8", "o9")
            ]
        },
        *(("worker", 4), 1, "grpc://o4:8888", "grpc://m5:8888"),
    ),
    "more GPUs than tasks": (
        *(4, 8, ("n[9-10]", "4(x2)"), "0,1,2,3,4,5,6,7", {}),
        {"worker": [f"{node}:{port}" for node in ("n10", "n9") for port in range(8888, 8892)]},
        *(("worker", 4), 2, "grpc://n9:8888", "grpc://n10:8888"),
    ),
    "nodes out of order": (
        *(2, 4, ("b,a", "1,3"), None, {"gpus_per_node": 4}),
        {"worker": ["a:8888", "a:8889", "a:8890", "b:8888"]},
        *(("worker", 2), 1, "grpc://a:8890", "grpc://a:8888"),
    ),
    "tasks of each node": (
        *(
            0,
            4,
            TWO,
            None,
            {"tasks_per_node": {"n1": 1, "n2": 3}, "gpus_per_node": 6, "gpus_per_task": 2},
        ),
        {"worker": ["n1:8888", "n2:8888", "n2:8889", "n2:8890"]},
        *(("worker", 0), 2, "grpc://n1:8888", "grpc://n1:8888"),
    ),
    "three jobs": (
        *(3, 4, TWO, None, {"jobs": {"evaluator": 1, "chief": 1, "worker": 2}, "gpus_per_node": 2}),
        {"chief": ["n1:8888"], "evaluator": ["n1:8889"], "worker": ["n2:8888", "n2:8889"]},
        *(("worker", 1), 1, "grpc://n2:8889", "grpc://n2:8888"),
    ),
    "one task": (
        *(0, 1, ("localhost", "1"), None, {"gpus_per_node": 8, "rpc_layer": "grpc+verbs"}),
        {"worker": ["localhost:8888"]},
        *(("worker", 0), 8, "grpc+verbs://localhost:8888", "grpc+verbs://localhost:8888"),
    ),
}
WORKERS = '{"cluster": {"worker": ["a:1", "b:2"]}'
OVERRIDES = {"task_type": "worker", "task_id": 0, "rpc_layer": "http", "environment": "google"}
# the variable, then TensorFlow's cluster, task, protocol, master(), master("worker", 1, "x")
TF_CONFIG = {
    "not set": (None, {}, (None, None), None, "", ""),
    "empty": ("{}", {}, (None, None), None, "", ""),
    "the first worker": (
        WORKERS + ', "task": {"type": "worker", "index": 0}}',
        *({"worker": ["a:1", "b:2"]}, ("worker", 0), None, "a:1", "x://b:2"),
    ),
    "the only worker": (
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}',
        *({"worker": ["a:1"]}, ("worker", 0), None, "", ""),
    ),
    "a server": (
        '{"cluster": {"ps": ["a:1", "b:2"], "worker": ["c:3", "d:4", "e:5"]},'
        ' "task": {"type": "ps", "index": "1"}, "rpc_layer": "grpc"}',
        {"ps": ["a:1", "b:2"], "worker": ["c:3", "d:4", "e:5"]},
        *(("ps", 1), "grpc", "grpc://b:2", "x://d:4"),
    ),
    "a session's master": (
        '{"cluster": {"worker": {"1": "b:2", "3": "d:4"}}, "task": {"type": "worker", "index": 3},'
        ' "session_master": "sessionmaster:2222", "rpc_layer": "grpc"}',
        {"worker": {1: "b:2", 3: "d:4"}},
        *(("worker", 3), "grpc", "sessionmaster:2222", "sessionmaster:2222"),
    ),
    "a sparse job": (
        '{"cluster": {"worker": {"1": "b:2"}}, "task": {"type": "worker", "index": 1}}',
        *({"worker": {1: "b:2"}}, ("worker", 1), None, "b:2", "x://b:2"),
    ),
}
SPECS = {  # the argument, then TensorFlow's as_dict(), repr() and job_tasks() of each job
    "two jobs": (
        {"worker": ["a:1", "b:2"], "ps": ("c:3",)},
        {"worker": ["a:1", "b:2"], "ps": ["c:3"]},
        "ClusterSpec({'ps': ['c:3'], 'worker': ['a:1', 'b:2']})",
        [["a:1", "b:2"], ["c:3"]],
    ),
    "numbered tasks": (
        {"w": {"2": "a", "0": "b"}},
        {"w": {0: "b", 2: "a"}},
        "ClusterSpec({'w': {0: 'b', 2: 'a'}})",
        [["b", None, "a"]],
    ),
    # TensorFlow's job_tasks fails here.
    "no tasks": ({"w": []}, {"w": {}}, "ClusterSpec({'w': {}})", [[]]),
    "no jobs": ({}, {}, "ClusterSpec({})", []),
}
NODES = [  # recorded from scontrol of Slurm 22.05, and from TensorFlow where it accepts them
    ("t02n13,t02n41,t02n43,t02n44", "t02n13 t02n41 t02n43 t02n44"),
    ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
    ("n[08-11]", "n08 n09 n10 n11"),
    ("n[098-101]", "n098 n099 n100 n101"),
    ("n[8-011]", "n8 n9 n10 n11"),
    ("n[001]", "n001"),
    ("[1-3]", "1 2 3"),
    ("n[1-2],", "n1 n2"),
    ("p[0-2,05-07]n[2,3]", "p0n2 p0n3 p1n2 p1n3 p2n2 p2n3 p05n2 p05n3 p06n2 p06n3 p07n2 p07n3"),
    ("a[1-2]b[01-02]c[7,9]", "a1b01c7 a1b01c9 a2b01c7 a2b01c9 a1b02c7 a1b02c9 a2b02c7 a2b02c9"),
    ("x[1-2]y3z[4-5],q[1]", "x1y3z4 x1y3z5 x2y3z4 x2y3z5 q1"),
    # recorded from neither:
    ("cpu[01-12]-ib0", " ".join(f"cpu{number:02}-ib0" for number in range(1, 13))),
    ("n[1-2]x[3-4]y,z", "n1x3y n1x4y n2x3y n2x4y z"),
    ("", ""),
]


@pytest.fixture
def step(monkeypatch):
    """Sets what srun sets: the rank, the number of tasks, the nodes, tasks per node, and GPUs."""

    def describe(rank, tasks, nodes, tasks_of_each, gpus=None):
        for name in list(os.environ):
            if name.startswith("SLURM_") or name == "CUDA_VISIBLE_DEVICES":
                monkeypatch.delenv(name)
        values = {"PROCID": rank, "STEP_NUM_TASKS": tasks, "STEP_NODELIST": nodes}
        values["STEP_TASKS_PER_NODE"] = tasks_of_each
        for name, value in values.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))
        if gpus is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)

    return describe


@pytest.fixture
def tf_config(monkeypatch):
    def describe(text):
        monkeypatch.delenv("TF_CONFIG", raising=False)
        if text is not None:
            monkeypatch.setenv("TF_CONFIG", text)

    return describe


# ---- ClusterSpec


@pytest.mark.parametrize(("cluster", "expected", "text", "tasks"), SPECS.values(), ids=SPECS)
def test_a_spec_is_tensorflows(cluster, expected, text, tasks):
    spec = ClusterSpec(cluster)
    assert (spec.as_dict(), repr(spec), bool(spec), spec.jobs) == (
        expected,
        text,
        bool(cluster),
        list(cluster),
    )
    assert [spec.job_tasks(job) for job in spec.jobs] == tasks
    assert [spec.num_tasks(job) for job in spec.jobs] == [len(cluster[job]) for job in spec.jobs]
    assert [spec.task_indices(job) for job in spec.jobs] == [
        sorted(map(int, _numbers(cluster[j]))) for j in spec.jobs
    ]
    copy = ClusterSpec(spec)
    assert copy == spec
    assert copy.jobs == sorted(spec.jobs)


def _numbers(tasks):
    return tasks if isinstance(tasks, dict) else range(len(tasks))


def test_a_spec_equals_as_tensorflows_does():
    spec = ClusterSpec({"worker": ["a:1"]})
    assert spec == {"worker": {0: "a:1"}}
    assert spec != {"worker": ["a:1"]}
    assert spec != ClusterSpec({})
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec)


def test_the_address_of_a_task():
    spec = ClusterSpec({"worker": ["a:1", "b:2"], "ps": {3: "c:3"}})
    assert (spec.task_address("worker", 1), spec.task_address("ps", 3)) == ("b:2", "c:3")
    with pytest.raises(ValueError, match="No task with index 2 in job 'worker'; there are 0, 1"):
        spec.task_address("worker", 2)
    for ask in (
        spec.num_tasks,
        spec.task_indices,
        spec.job_tasks,
        lambda job: spec.task_address(job, 0),
    ):
        with pytest.raises(
            ValueError, match="No such job in cluster: 'x'; there are 'worker', 'ps'"
        ):
            ask("x")


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (None, TypeError, "the cluster is None; pass a dict"),
        ([1], TypeError, "the cluster is .1."),
        ({"w": "a:1"}, TypeError, "the tasks of job 'w' are 'a:1'"),
        ({"w": [1]}, TypeError, "an address in job 'w' is 1"),
        ({1: ["a"]}, TypeError, "the name of a job is 1"),
        ({"w": {"x": "a"}}, ValueError, "a task of job 'w' has the number 'x'"),
        ({"w": {-1: "a"}}, ValueError, "has the number -1; it must be 0, 1"),
    ],
    ids=[
        "None",
        "a list",
        "one address",
        "a number for an address",
        "a number for a job",
        "no number",
        "a number below 0",
    ],
)
def test_what_is_no_spec_is_an_error(cluster, error, message):
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


# ---- SimpleClusterResolver, UnionResolver


def test_a_simple_resolver_gives_what_it_was_given():
    spec = ClusterSpec({"worker": ["a:1", "b:2"], "ps": {3: "c:3"}})
    resolver = SimpleClusterResolver(spec, "m:1", "worker", 1, "e", {"GPU": 8}, "grpc")
    assert isinstance(resolver, ClusterResolver)
    assert resolver.cluster_spec() is spec
    masters = [
        resolver.master(),
        resolver.master("ps", 3),
        resolver.master("ps", 3, "x"),
        resolver.master("ps"),
    ]
    assert masters == ["grpc://m:1", "grpc://c:3", "x://c:3", "grpc://m:1"]
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert (resolver.environment, resolver.num_accelerators("ps", 3)) == ("e", {"GPU": 8})
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 3, None
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("ps", 3, "m:1")


def test_a_simple_resolver_that_was_given_little():
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}))
    assert (resolver.master(), resolver.master("worker", 0)) == ("", "a:1")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.environment, resolver.num_accelerators()) == ("", {})
    with pytest.raises(ValueError, match="No such job in cluster: 'q'"):
        resolver.master("q", 0)
    with pytest.raises(TypeError, match="cluster_spec is {}; pass a ClusterSpec"):
        SimpleClusterResolver({})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="master is 1"):
        SimpleClusterResolver(resolver.cluster_spec(), master=1)  # pyright: ignore[reportArgumentType]


A = SimpleClusterResolver(
    ClusterSpec({"worker": ["a:1"], "ps": ["p:1"]}),
    "ma",
    "worker",
    1,
    "e",
    {"GPU": 8},
    rpc_layer="grpc",
)
B = SimpleClusterResolver(ClusterSpec({"worker": ["b:1"], "chief": {2: "p:1"}}), "mb", "ps", 2)
C = SimpleClusterResolver(ClusterSpec({"worker": {5: "z:1"}}))


@pytest.mark.parametrize(
    ("resolvers", "cluster", "facts", "masters"),
    [
        (
            *((A, B), {"worker": ["a:1", "b:1"], "ps": ["p:1"], "chief": {2: "p:1"}}),
            *(("worker", 1, "grpc", "e", {"GPU": 8}), ("grpc://ma", "a:1", "t://ma")),
        ),
        (
            *((B, A), {"worker": ["b:1", "a:1"], "chief": {2: "p:1"}, "ps": ["p:1"]}),
            *(("ps", 2, None, "", {}), ("mb", "b:1", "t://mb")),
        ),
        (
            *((A, C), {"worker": {0: "a:1", 5: "z:1"}, "ps": ["p:1"]}),
            *(("worker", 1, "grpc", "e", {"GPU": 8}), ("grpc://ma", "a:1", "t://ma")),
        ),
    ],
    ids=["A and B", "B and A", "A and C"],
)
def test_a_union_is_tensorflows(resolvers, cluster, facts, masters):
    union = UnionResolver(*resolvers)
    assert union.cluster_spec().as_dict() == cluster
    assert (
        union.task_type,
        union.task_id,
        union.rpc_layer,
        union.environment,
        union.num_accelerators(),
    ) == facts
    assert (union.master(), union.master("worker", 0), union.master(rpc_layer="t")) == masters


def test_a_union_whose_task_is_given():
    union = UnionResolver(A, B, task_type="x", task_id=0, rpc_layer="q")
    # TensorFlow's task_id is 1.
    assert (union.task_type, union.task_id, union.rpc_layer) == ("x", 0, "q")
    assert (union.master("worker", 0), union.master()) == ("q://a:1", "grpc://ma")


def test_resolvers_can_be_pickled(tf_config):
    tf_config(TF_CONFIG["a server"][0])
    for resolver in TFConfigClusterResolver(), MPIClusterResolver(), UnionResolver(A):
        copied = pickle.loads(pickle.dumps(resolver))
        assert (copied.task_type, copied.task_id) == (resolver.task_type, resolver.task_id)


def test_what_is_no_union_is_an_error():
    with pytest.raises(KeyError, match="two resolvers give task 0 of job 'worker'"):
        UnionResolver(A, B, C).cluster_spec()
    with pytest.raises(ValueError, match="at least one"):
        UnionResolver()
    with pytest.raises(TypeError, match="1 is not a ClusterResolver"):
        UnionResolver(1)  # pyright: ignore[reportArgumentType]


# ---- TFConfigClusterResolver


@pytest.mark.parametrize(
    ("text", "cluster", "task", "rpc_layer", "master", "other"), TF_CONFIG.values(), ids=TF_CONFIG
)
def test_tf_config_is_read_as_by_tensorflow(
    tf_config, text, cluster, task, rpc_layer, master, other
):
    tf_config(text)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == cluster
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (
        *task,
        rpc_layer,
        None,
    )
    assert (resolver.master(), resolver.master("worker", 1, "x")) == (master, other)
    overridden = TFConfigClusterResolver(**OVERRIDES)
    assert overridden.cluster_spec().as_dict() == cluster
    assert (overridden.task_type, overridden.task_id) == ("worker", 0)
    assert (overridden.rpc_layer, overridden.environment) == ("http", "google")


@pytest.mark.parametrize(
    ("text", "master"),
    [
        (WORKERS + ', "rpc_layer": "grpc"}', "http://a:1"),
        (WORKERS + ', "task": {"type": "worker", "index": 7}}', "http://a:1"),
        (TF_CONFIG["a server"][0], "http://c:3"),
        (TF_CONFIG["the only worker"][0], ""),
    ],
    ids=["no task", "no such task", "a server", "the only worker"],
)
def test_arguments_come_before_tf_config(tf_config, text, master):
    tf_config(text)
    assert TFConfigClusterResolver(**OVERRIDES).master() == master


def test_a_task_can_be_set(tf_config):
    tf_config(TF_CONFIG["a server"][0])
    resolver = TFConfigClusterResolver()
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "x"
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 2, "x://e:5")


def test_the_accelerators_are_those_that_this_process_sees(tf_config, monkeypatch):
    tf_config(WORKERS + ', "task": {"type": "worker", "index": 0}}')
    resolver = TFConfigClusterResolver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolver.num_accelerators() == {}  # as in TensorFlow, on a host without GPUs
    assert resolver.num_accelerators()["GPU"] == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert resolver.num_accelerators() == resolver.num_accelerators("worker", 0) == {"GPU": 2}
    assert resolver.num_accelerators("worker", 1) == {}


@pytest.mark.parametrize(
    ("text", "ask", "message"),
    [
        ('{"cluster"', "cluster_spec", "TF_CONFIG is not JSON"),
        ("[1]", "cluster_spec", "TF_CONFIG must be an object"),
        (WORKERS + "}", "master", "TF_CONFIG does not say which task this is"),
        (
            WORKERS + ', "task": {"type": "worker", "index": 7}}',
            "master",
            "No task with index 7 in job 'worker'",
        ),
        (
            WORKERS + ', "task": {"type": "worker", "index": "x"}}',
            "master",
            '"index" of its "task" is \'x\'',
        ),
        (WORKERS + ', "task": 3}', "master", 'TF_CONFIG: its "task" is 3'),
        ("[" * 100_000, "cluster_spec", "TF_CONFIG is not JSON"),
        ("9" * 5000, "cluster_spec", "TF_CONFIG is not JSON"),
        *(
            (
                WORKERS + f', "task": {{"type": "worker", "index": {index}}}}}',
                "master",
                '"index" of its "task" is ',
            )
            for index in ("1e400", "NaN", "1.5", "true", "-1", "9" * 4000, '"\u0661"', "[0]")
        ),
        ('{"cluster": 3}', "cluster_spec", 'TF_CONFIG: its "cluster" is not like'),
        (
            '{"cluster": {"worker": 3}}',
            "cluster_spec",
            'TF_CONFIG: its "cluster" is not like .*worker',
        ),
        (
            '{"cluster": {"worker": [3]}}',
            "cluster_spec",
            'TF_CONFIG: its "cluster" is not like .*worker',
        ),
        (
            '{"cluster": {"worker": {"9999999999": "n1:1"}}}',
            "cluster_spec",
            "TF_CONFIG: .*'9999999999'",
        ),
        (
            '{"session_master": 3}',
            "master",
            'TF_CONFIG: its "session_master" is 3; it must be a string',
        ),
        (
            WORKERS + ', "task": {"type": "worker", "index": 0}, "rpc_layer": 3}',
            "master",
            '"rpc_layer" is 3',
        ),
    ],
    ids=[
        *(
            "no JSON",
            "a list",
            "no task",
            "no such task",
            "no number",
            "a number for a task",
            "brackets",
            "digits",
        ),
        *(
            "an infinite index",
            "an index that is nan",
            "an index of fractions",
            "an index that is true",
        ),
        *(
            "a negative index",
            "a huge index",
            "an Arabic index",
            "a list for an index",
            "a number for a cluster",
        ),
        *(
            "a number for a job",
            "a number for an address",
            "a huge number of a task",
            "a number for a master",
        ),
        "a number for a protocol",
    ],
)
def test_a_wrong_tf_config_is_an_error(tf_config, text, ask, message):
    tf_config(text)
    with pytest.raises(ValueError, match=message) as caught:
        getattr(TFConfigClusterResolver(), ask)()
    assert len(str(caught.value)) < 600


# ---- SlurmClusterResolver


@pytest.mark.parametrize(
    (
        "rank",
        "tasks",
        "nodes",
        "gpus",
        "arguments",
        "cluster",
        "task",
        "accelerators",
        "master",
        "first",
    ),
    SLURM.values(),
    ids=SLURM,
)
def test_a_step_of_slurm_is_read_as_by_tensorflow(
    step, rank, tasks, nodes, gpus, arguments, cluster, task, accelerators, master, first
):
    step(rank, tasks, *nodes, gpus)
    resolver = SlurmClusterResolver(**arguments)
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == task
    assert resolver.cluster_spec().as_dict() == cluster
    assert resolver.num_accelerators() == {"GPU": accelerators}
    assert (resolver.master(), resolver.master("worker", 0)) == (master, first)
    assert resolver.master("worker", 0, "x") == f"x://{first.split('//')[-1]}"
    assert (resolver.environment, resolver.rpc_layer) == ("", arguments.get("rpc_layer", "grpc"))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == gpus


def test_the_task_of_a_step_can_be_set(step):
    step(0, 4, *FOUR, "0")
    resolver = SlurmClusterResolver(jobs={"ps": 1, "worker": 3})
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "test"
    assert resolver.master() == "test://t02n43:8888"
    assert resolver.master("ps", 0) == "test://t02n13:8888"
    assert resolver.get_task_info() == ("worker", 1)
    resolver.task_type = None
    assert resolver.master() == ""


@pytest.mark.parametrize(
    ("gpus", "arguments", "expected"),
    [("", {}, 0), ("3", {}, 1), ("0,1,2,3", {}, 2), ("-1", {}, 0), (None, {"gpus_per_node": 0}, 0)],
    ids=["none", "one", "four", "none, by -1", "none, by an argument"],
)
def test_gpus_of_a_step_where_tensorflow_fails(step, gpus, arguments, expected):
    step(0, 4, *TWO, gpus)
    assert SlurmClusterResolver(**arguments).num_accelerators() == {"GPU": expected}


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        ({"SLURM_PROCID": None}, {}, "SLURM_PROCID is not set, so this is not a Slurm step"),
        ({"SLURM_STEP_NUM_TASKS": None}, {}, "SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_STEP_NODELIST": None}, {"tasks_per_node": 2}, "SLURM_STEP_NODELIST is not set"),
        ({"SLURM_STEP_TASKS_PER_NODE": None}, {}, "SLURM_STEP_TASKS_PER_NODE is not set"),
        ({"SLURM_PROCID": "x"}, {}, "SLURM_PROCID is 'x'; it must be a number"),
        ({"SLURM_PROCID": "5"}, {}, "SLURM_PROCID is 5, and there are 4 tasks"),
        ({"SLURM_PROCID": "9" * 5000}, {}, "SLURM_PROCID is '999.*; it must be a number"),
        (
            {"SLURM_STEP_NUM_TASKS": "9" * 12},
            {},
            "SLURM_STEP_NUM_TASKS is '999.*; it must be a number",
        ),
        (
            {"SLURM_STEP_NODELIST": "n[1-"},
            {},
            "SLURM_STEP_NODELIST: 'n\\[1-' is not a Slurm node list",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x)"},
            {},
            "SLURM_STEP_TASKS_PER_NODE: '2\\(x\\)' is not a list of numbers",
        ),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4"},
            {},
            "names 2 nodes \\(n1, n2\\), and .* tasks of 1 \\(4\\)",
        ),
        ({}, {"jobs": {"worker": 5}}, "the jobs have 5 tasks .* and the nodes run 4 .*--ntasks=5"),
        ({}, {"jobs": {}, "tasks_per_node": {}}, "the nodes run 0"),
        ({}, {"gpus_per_node": 1, "gpus_per_task": 1}, "a node runs 2 tasks of 1 GPUs, but has 1"),
        ({}, {"gpus_per_node": 1}, "a node runs 2 tasks of 1 GPUs, but has 1"),
    ],
    ids=[
        *(
            "no rank",
            "no number of tasks",
            "no nodes",
            "no tasks of each node",
            "a rank that is no number",
        ),
        *(
            "a rank too large",
            "a rank of many digits",
            "a huge number of tasks",
            "half a list of nodes",
            "half a list of tasks",
            "tasks of fewer nodes",
            "too many tasks",
        ),
        *("no tasks", "too few GPUs", "too few GPUs of one each"),
    ],
)
def test_a_wrong_step_is_an_error(step, monkeypatch, variables, arguments, message):
    step(0, 4, *TWO, "0,1")
    for name, value in variables.items():
        monkeypatch.delenv(name)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(("nodes", "expected"), NODES, ids=[nodes or "none" for nodes, _ in NODES])
def test_a_list_of_nodes_is_slurms(nodes, expected):
    assert expand_nodes(nodes) == expected.split()


@pytest.mark.parametrize(
    "nodes", ["n[1-3", "n]1", "n[a-b]", "n[3-1]", "n[]", "n[1,,2]", "n[-3]", "n[1[2]]", "a b"]
)
def test_what_is_no_list_of_nodes_is_an_error(nodes):
    with pytest.raises(ValueError, match="is not a Slurm node list"):
        expand_nodes(nodes)


HUGE_NODES = [
    "n[1-99999999999]",
    "n[1-9999][1-9999][1-9999]",
    ",".join(["n[1-99999]"] * 20),
    f"n[{'9' * 5000}]",
]


@pytest.mark.parametrize(
    "nodes", [*HUGE_NODES, f"n[{','.join(['1-99999'] * 20)}]"], ids=lambda nodes: nodes[:30]
)
def test_a_list_of_more_nodes_than_there_are_takes_no_memory(nodes):
    with pytest.raises(ValueError, match=r"is not a Slurm node list: .*1048576 nodes"):
        expand_nodes(nodes)


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [("2", [2]), ("3(x2),2,1", [3, 3, 2, 1]), ("2(x3),1", [2, 2, 2, 1]), ("0", [0])],
    ids=str,
)
def test_a_list_of_tasks_is_slurms(tasks, expected):
    assert expand_tasks(tasks) == expected


@pytest.mark.parametrize(
    "tasks",
    ["", "a", "2(x)", "2(x3)1", "2,", "-1", "1(x99999999999)", "9" * 12, "1(x999999),1(x999999)"],
    ids=repr,
)
def test_what_is_no_list_of_tasks_is_an_error(tasks):
    with pytest.raises(ValueError, match="is not a list of numbers of tasks"):
        expand_tasks(tasks)


# ---- all


def test_only_the_resolver_of_mpi_starts_mpi():
    program = """
import sys
from hpcstrat.cluster_resolver import *
MPIClusterResolver()
SlurmClusterResolver().num_accelerators(), TFConfigClusterResolver().num_accelerators()
assert not {"mpi4py.MPI", "cupy"} & sys.modules.keys()
assert MPIClusterResolver().cluster_spec().num_tasks("worker") == 1
"""
    variables = {
        "PROCID": "0",
        "STEP_NUM_TASKS": "1",
        "STEP_NODELIST": "n1",
        "STEP_TASKS_PER_NODE": "1",
    }
    environment = os.environ | {f"SLURM_{name}": value for name, value in variables.items()}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


def test_mpis_resolver_in_a_world_of_one():
    import socket

    resolver = MPIClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": [socket.gethostname()]}
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 0, "")
    assert (resolver.master(), resolver.master(rpc_layer="x")) == (
        socket.gethostname(),
        f"x://{socket.gethostname()}",
    )
    assert resolver.num_accelerators() == {"GPU": 0}
    with pytest.raises(ValueError, match="No task with index 1"):
        resolver.num_accelerators("worker", 1)
    resolver.task_id = 1
    assert resolver.task_id == 1
