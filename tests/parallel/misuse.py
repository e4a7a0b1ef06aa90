"""Tables of wrong uses: a program, and below it its error with the facts that the message states.

A program is an expression of the names of `Env`. Where it says `odd`, it is wrong on the ranks on
which that is true: on all of them, and then on one alone, whose error all ranks raise. Facts are
separated by ` ... `.
"""

import builtins
import dataclasses
import importlib.util
from typing import Any

import numpy as np
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.checkpoint import CheckpointManager
from hpcstrat.data import Dataset

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
ONES = np.ones(3, np.float32)

SCATTER = """
v.scatter_add(rows(1.0, [0, 3] if odd else [0, 1]))
    ValueError: Variable.scatter_add of 'v': an index is not in 0..2
v.scatter_add(rows(0.0, [0.5 if odd else 0]))
    ValueError: indices are of dtype float64; pass integers
v.scatter_sub(rows(ONES if odd else np.zeros(2), [0, 1]))
    ValueError: values have shape (3,); for indices of ... it must be (2,)
scalar.scatter_add(rows(1.0, [0]))
    ValueError: the variable has shape () and no rows
v.scatter_add(here(ONES) if odd else rows(0.0, [0]))
    TypeError: sparse_delta is of type ndarray; pass IndexedSlices
b.scatter_add(rows(True, [0]))
    ValueError: it is not defined for bool; use scatter_update
own.scatter_add(rows(1.0, [0]))
    NotImplementedError: Variable.scatter_add of 'own': the variable is ON_READ
scalar.sparse_read([0])
    ValueError: sparse_read of 'scalar': the variable has shape () and no rows
"""

ACROSS = """
hs.Strategy()
    TypeError: Strategy: make a MirroredStrategy ... CentralStorageStrategy ... OneDeviceStrategy
hs.MirroredStrategy(4)
    TypeError: MirroredStrategy: 4 is not a list of devices ... `mpirun -n 4` ... one device per rank
hs.CentralStorageStrategy(['CPU:0'] * (N + 1))
    ValueError: {N+1} compute devices ... `mpirun -n {N+1}`
hs.MirroredStrategy([])
    ValueError: MirroredStrategy: 0 compute devices were named
hs.CentralStorageStrategy('CPU:0' if odd else devices)
    TypeError: the string 'CPU:0' is not a list of devices ... one device per rank ... ['CPU:0']
hs.CentralStorageStrategy(['CPU:1'] * N if odd else devices)
    ValueError: CentralStorageStrategy: there is no CPU:1
hs.CentralStorageStrategy(devices, 'GPU:77' if odd else None)
    ValueError: parameter_device is ... GPU:77, and no rank computes there
hs.CentralStorageStrategy(devices, 'here' if odd else None)
    ValueError: 'here' is not a device
within(other, lambda: within(s, list))
    RuntimeError: Strategy.scope ... scope of another strategy
s.run(5)
    TypeError: Strategy.run: fn is 5; pass the function
s.run(lambda x: 0, args=each(ONES))
    TypeError: args is of type ... it must be a tuple: args=(x,)
s.reduce('TOTAL' if odd else 'SUM', each(ONES), None)
    ValueError: Strategy.reduce: reduce_op is 'TOTAL'; it must be one
s.reduce('SUM', each(ONES), '0' if odd else 0)
    TypeError: Strategy.reduce: axis is '0'; it must be None, an int
s.reduce('MEAN', each(ONES), 1 if odd else 0)
    ValueError: axis 1 does not exist in a value of 1
s.reduce('SUM', each(np.ones((2, 2))), (0, -2) if odd else (0, 1))
    ValueError: names a dimension twice
s.reduce('SUM', each(ONES > 0 if odd else ONES), None)
    TypeError: Strategy.reduce: SUM of bool is not defined
s.reduce('MAX', each(ONES * 1j if odd else ONES), None)
    TypeError: MAX of complex64 is not defined
s.reduce('SUM', each(np.ones(3, np.longdouble) if odd else ONES), None)
    TypeError: cannot be reduced
s.reduce('SUM', each('text' if odd else ONES), None)
    TypeError: Strategy.reduce: 'text' is not an array of numbers
s.reduce('SUM', each(slices), 0)
    ValueError: IndexedSlices ... axis=None
s.reduce('MAX', each(slices), None)
    ValueError: SUM or MEAN, not by MAX
s.scatter([[1, 2], [3]])
    ValueError: Strategy.scatter: axis 0 does not exist in ... the number 1 ... np.array(value)
s.gather(each(ONES), None if odd else 0)
    TypeError: Strategy.gather: axis is None; it must be an int
s.gather(each(slices if odd else ONES), 0)
    NotImplementedError: Strategy.gather: IndexedSlices cannot be gathered
from_function('text' if odd else 1.0)
    TypeError: Strategy.experimental_distribute_values_from_function: ... 'text' is not an array of numbers
s.experimental_split_to_logical_devices(np.ones((2, 2)), [2, 1])
    ValueError: experimental_split_to_logical_devices
variable(None if odd else ONES)
    TypeError: Variable: the initial value is None; it must be an array
variable([[1], [2, 3]] if odd else ONES)
    ValueError: inhomogeneous
variable(1.0, dtype=str if odd else None)
    TypeError: Variable: dtype is ... it must be a numeric or boolean
variable(1.0, dtype='flaot32' if odd else None)
    TypeError: Variable: dtype is 'flaot32' ... data type 'flaot32' not understood ... such as 'float32'
variable(ONES, shape=(4,) if odd else (3,))
    ValueError: shape (3,), but shape=(4,)
variable(2**40 if odd else 2)
    ValueError: cannot be cast to int32 without loss
variable(of_replica(ONES))
    ValueError: one value per replica; reduce it
variable(1.0, aggregation='MOST' if odd else 'SUM')
    ValueError: Variable: aggregation is 'MOST'; it must
variable(1.0, constraint=abs)
    NotImplementedError: Variable: constraint is ... apply it after
variable(1.0, validate_shape=False)
    ValueError: Variable: validate_shape is False
own.assign(here(FIVE if odd else ONES))
    ValueError: Variable.assign of 'own': ... (5,)
v.assign(FIVE if odd else ONES * 0)
    ValueError: Variable.assign of 'v': ... (5,) and the variable (3,); nothing is broadcast
i.assign(here(ONES) if odd else [0, 0, 0])
    ValueError: 'i': a value of dtype float32 cannot be cast to ... int32
i.assign(here(np.array([0, 0, 2**31])) if odd else [0, 0, 0])
    ValueError: a value of dtype int64 cannot be cast to the variable's int32
i.assign([0, 0, -(2**31) - 1])
    ValueError: a value of dtype int64 cannot be cast to the variable's int32
v.assign('text')
    ValueError: the value is 'text'; it must be an array, a number
b.assign_add(here(np.array([True, True])))
    ValueError: 'b': booleans are neither added
v.assign(of_replica(ONES))
    ValueError: is a PerReplica ... reduce it first
within(s, lambda: foreign.assign(here(ONES)))
    RuntimeError: 'foreign': the variable belongs to another
s.extended.reduce_to('SUM', each(ONES), None)
    ValueError: StrategyExtended.reduce_to: destinations is None
s.extended.broadcast_to({'a': hs.PerReplica(1, RANK, N) if odd else 1}, 'CPU:0')
    TypeError: StrategyExtended.broadcast_to: this is one value per replica; reduce it first
s.extended.update(foreign, lambda v: 0)
    ValueError: StrategyExtended.update: ... is not a variable of this
s.extended.update(v, lambda v, x: 0, (hs.PerReplica(ONES, RANK, N),))
    ValueError: StrategyExtended.update: ... reduce it first
within(s, lambda: s.extended.colocate_vars_with(foreign).__enter__())
    ValueError: colocate_vars_with: ... not one of this
kept.all_reduce('SUM', 1)
    RuntimeError: ReplicaContext.all_reduce was called outside
s.reduce('SUM', 1)
    TypeError: Strategy.reduce() missing 1 required positional argument: 'axis'
Dataset.range(3, name='three')
    TypeError: Dataset.range() got an unexpected keyword argument 'name'
pairs.batch('8')
    TypeError: Dataset.batch: batch_size is '8'; it must be an int
s.experimental_distribute_dataset(pairs.batch)
    TypeError: Strategy.experimental_distribute_dataset: batch is a method of a Dataset; call it
hs.metrics.Mean(5)
    TypeError: Mean: name is 5; it must be a string
Manager(v, 'x')
    TypeError: CheckpointManager: checkpoint is Variable; pass a Checkpoint ... Checkpoint(w=w)
hs.on_lead(None)
    TypeError: on_lead: fn is None; pass the function itself ... on_lead(np.save, path, array)
"""

ACROSS_SEVERAL = """
hs.OneDeviceStrategy('CPU:0')
    RuntimeError: one replica, but {N} ranks run; start ... without mpirun
s.reduce('SUM', each(ONES) if not odd else [5, each(ONES)], None)
    ValueError: SUM of a value that is not distributed
s.experimental_local_results(each((lambda: 0) if odd else 0))
    TypeError: Strategy.experimental_local_results: ... cannot travel
own.sparse_read([1])
    RuntimeError: one value per replica
own.assign_add(here(ONES)) if odd else own.assign(here(ONES))
    ValueError: Variable.assign_add of 'own': ... not defined
"""

ACROSS_ONE = """
hs.OneDeviceStrategy('here')
    ValueError: OneDeviceStrategy: 'here' is not a device
"""

WITHOUT_CUPY = """
hs.CentralStorageStrategy(['GPU:0'] * N)
    RuntimeError: GPU:0 needs CuPy
"""

WITH_CUPY = """
hs.CentralStorageStrategy(['GPU:77'] * N)
    RuntimeError: CentralStorageStrategy: ... there is no GPU:77; the process of rank 0 sees
"""

# Of Python, NumPy, or the program itself, on all ranks; and what begins with no call.
NOT_OF_A_CALL = """
s.experimental_distribute_values_from_function(5 if odd else lambda context: 1.0)
    TypeError: not callable
s.experimental_distribute_values_from_function(lambda c: {}['gone'] if odd else 1.0)
    KeyError: gone
s.run(lambda b: b, args=(1, 2))
    TypeError: <lambda>() takes 1 positional argument but 2 were given
s.extended.update(v, lambda: 1)
    TypeError: <lambda>() takes 0 positional arguments but 1 was given
v.grad
    AttributeError: 'Variable' object has no attribute 'grad'
hs.Allreduce
    AttributeError: hpcstrat.Allreduce does not exist; write strategy.reduce ... all_reduce('SUM', value)
"""

INSIDE = """
s.run(lambda: 0)
    RuntimeError: Strategy.run was called inside a replica function
s.reduce('SUM', 1, None)
    RuntimeError: Strategy.reduce was called inside ... all_reduce
within(s, list)
    RuntimeError: Strategy.scope was called inside a replica function
s.experimental_distribute_dataset(Dataset.range(4).batch(2))
    RuntimeError: distribute_dataset
s.extended.update(v, lambda v: 0)
    RuntimeError: StrategyExtended.update was called inside
context().all_reduce('AVERAGE' if odd else 'SUM', 1)
    ValueError: ReplicaContext.all_reduce: reduce_op is 'AVERAGE'
context().all_reduce('SUM', True if odd else 1)
    TypeError: ReplicaContext.all_reduce: SUM of bool
context().all_reduce('SUM', hs.PerReplica(1, RANK, N) if odd else 1)
    TypeError: one value per replica
context().all_gather(slices if odd else here(ONES), 0)
    NotImplementedError: ReplicaContext.all_gather: IndexedSlices
context().broadcast(here(ONES), N if odd else 0)
    ValueError: ReplicaContext.broadcast: root is {N}; it must be the index of a replica, 0..{N-1}
context().broadcast(here(ONES), True)
    ValueError: root is True; it must be the index of a replica
context().reduce_scatter('SUM', here(ONES), 1 if odd else 0)
    ValueError: axis 1 does not exist in an array of shape (3,)
context().scan('MEAN', 1.0)
    ValueError: ReplicaContext.scan: reduce_op is MEAN ... no result for the first replica ... MAX
context().scan('SUM', 1.0, 1)
    TypeError: ReplicaContext.scan: inclusive is 1; it must be True or False
context().all_to_all([here(ONES)] * (N + odd))
    ValueError: ReplicaContext.all_to_all: values is {N+1} values; pass a list of {N}
context().neighbor_exchange(1.0, 'text' if odd else 1.0)
    TypeError: ReplicaContext.neighbor_exchange: 'text' is not an array of numbers
none.assign(here(ONES))
    ValueError: Variable.assign of 'none' in a replica context: it has no aggregation ... 'SUM'
mean.assign(here(np.ones(3, np.int32)))
    ValueError: 'mean': the mean ... float64 and does not fit int32
v.assign(here(FIVE if odd else ONES))
    ValueError: Variable.assign of 'v': ... (5,) and the variable (3,)
foreign.assign(here(ONES))
    RuntimeError: 'foreign': the variable belongs to another
v.scatter_update(rows(1.0, [0]))
    NotImplementedError: aggregation is SUM, and it needs ONLY_FIRST_REPLICA
"""

# With one rank, each process is all of them.
INSIDE_SEVERAL = """
context().all_to_all([here(ONES.astype('f8' if odd and r == 1 else 'f4')) for r in range(N)])
    ValueError: values for the replicas differ in structure or dtypes: ... float32; ... float64
outside.assign(here(ONES))
    RuntimeError: 'outside': the variable was made outside of this strategy's scope
"""

# Of a strategy `cpu` whose replicas compute on the CPU; `away` is on a GPU where `odd` is true.
ON_A_GPU = """
cpu.reduce('SUM', cpu.run(lambda: away()), None)
    TypeError: Strategy.reduce: an array is on a GPU, and this strategy's replicas compute on the CPU
cpu.reduce('SUM', cpu.run(lambda: hs.IndexedSlices(away(), np.arange(3), (5,))), None)
    TypeError: Strategy.reduce: an array is on a GPU, and this strategy's replicas compute on the CPU
cpu.run(lambda: context().all_reduce('MAX', [np.ones(2), away()]))
    TypeError: ReplicaContext.all_reduce: an array is on a GPU, and this strategy's replicas
within(cpu, lambda: hs.Variable(away()))
    TypeError: Variable: the value is on a GPU ... hs.asnumpy
within(cpu, lambda: hs.Variable(ONES, name='v')).assign(away())
    TypeError: Variable.assign of 'v': the value is on a GPU ... hs.asnumpy
"""

# One replica's value is returned as it is.
ON_A_GPU_OF_SEVERAL = """
cpu.gather(cpu.run(lambda: [np.ones(2), away()]), 0)
    TypeError: Strategy.gather: an array is on a GPU, and this strategy's replicas compute on the CPU
"""

# Programs that are right on each rank, but not if one passes or calls something else than the rest.
DIFFERENT = """
s.reduce('SUM', each(FIVE if odd else ONES), None)
    ReplicaMismatchError: (3,) ... (5,)
s.reduce('MAX' if odd else 'SUM', each(ONES), None)
    ReplicaMismatchError: Strategy.reduce(SUM ... Strategy.reduce(MAX
s.reduce('SUM', each(np.ones((2, 3 + odd))), 0)
    ReplicaMismatchError: (3,) ... (4,)
s.reduce('SUM', each(np.ones((3, 3))), int(odd))
    ReplicaMismatchError: axis=0 ... axis=1
s.reduce('SUM', each({'a': 1, 'c' if odd else 'b': 2}), None)
    ReplicaMismatchError: 'b': * ... 'c': *
s.reduce('SUM', each([ONES] * odd), None)
    ReplicaMismatchError: [] ... [*]
s.reduce('SUM', each(ONES if odd else None), None)
    ReplicaMismatchError: not distributed
s.gather(each(np.ones((2, 3 + odd))), 0)
    ReplicaMismatchError: (2, 3) ... (2, 4)
s.gather(each(ONES), 0) if odd else s.reduce('SUM', each(ONES), None)
    ReplicaMismatchError: gather
s.experimental_distribute_values_from_function(lambda context: (1.0,) * (1 + odd))
    ReplicaMismatchError: Strategy.experimental_distribute_values_from_function
variable(np.ones(3 + odd))
    ReplicaMismatchError: (3,) ... (4,)
variable(np.ones(3, np.float32 if odd else np.float64))
    ReplicaMismatchError: float64 ... float32
s.run(lambda: hs.Variable(1.0, name='one' if odd else 'other'))
    ReplicaMismatchError: 'one' ... 'other'
(v.assign_add if odd else v.assign)(here(ONES))
    ReplicaMismatchError: Variable.assign_add of 'v'
v.scatter_add(rows(1.0, [0, 1, 2] if odd else [0, 1]))
    ReplicaMismatchError: Variable.scatter_add ... 3 rows
s.extended.update(v, lambda v: v.assign(here(ONES)) if odd else hs.barrier())
    ReplicaMismatchError: barrier ... Variable.assign of 'v'
hs.any_rank(False) if odd else hs.barrier()
    ReplicaMismatchError: any_rank
place.make(hs.MirroredStrategy if odd else hs.CentralStorageStrategy)
    ReplicaMismatchError: MirroredStrategy
type(s)(None if odd else devices)
    ReplicaMismatchError: Strategy(), at ... Strategy(/job:localhost
"""

DIFFERENT_INSIDE = """
context().all_reduce('SUM', here(FIVE if odd else ONES))
    ReplicaMismatchError: (3,) ... (5,)
context().all_reduce('MIN' if odd else 'SUM', here(ONES))
    ReplicaMismatchError: ReplicaContext.all_reduce(SUM ... ReplicaContext.all_reduce(MIN
context().all_gather(here({'b' if odd else 'a': ONES}), 0)
    ReplicaMismatchError: 'a': * ... 'b': *
context().all_gather(here(ONES), 0) if odd else context().all_reduce('SUM', here(ONES))
    ReplicaMismatchError: all_gather
context().merge_call(lambda s: 0) if odd else context().all_reduce('SUM', here(ONES))
    ReplicaMismatchError: merge_call
context().merge_call(lambda s, *args: 0, (1, 2) if odd else ([1, 2],))
    ReplicaMismatchError: ReplicaContext.merge_call(
large.assign(here(np.ones((300, 100)))) if odd else v.assign(here(ONES))
    ReplicaMismatchError: 'large'
(v.scatter_add if odd else v.scatter_sub)(rows(1.0, [0]))
    ReplicaMismatchError: Variable.scatter_add ... Variable.scatter_sub
(v if odd else scalars).assign(here(ONES))
    ReplicaMismatchError: 'v' ... 'scalars'
"""

# `somewhere` is on the GPU of some ranks only.
DIFFERENT_PLACES = """
s.reduce('SUM', s.run(lambda: somewhere()), None)
    ReplicaMismatchError: on the GPU [0
s.gather(s.run(lambda: somewhere()), 0)
    ReplicaMismatchError: on the GPU [0
s.run(lambda: context().all_reduce('MAX', somewhere()))
    ReplicaMismatchError: on the GPU [0
"""

# Each refuses a masked array `x`, and takes another array.
MASKED = """
s.reduce('SUM', s.run(lambda: x), None)
s.reduce('MEAN', s.run(lambda: x), 0)
s.reduce('SUM', s.run(lambda: hs.IndexedSlices(x, np.array([0, 1]), (4,))), None)
s.gather(s.run(lambda: x), 0)
s.extended.reduce_to('SUM', s.run(lambda: x), v)
s.experimental_distribute_values_from_function(lambda context: (TWO, x))
s.run(lambda: context().all_reduce('SUM', x))
s.run(lambda: context().all_gather(x, 0))
within(s, lambda: hs.Variable(x))
s.run(lambda: two.assign_add(x))
s.run(lambda: hs.optimizers.SGD(1.0).apply_gradients([(x, two)]))
s.run(lambda: hs.optimizers.SGD(1.0).apply_gradients([(hs.IndexedSlices(x, [0, 1]), two)]))
"""

# What each rank does without the others.
MASKED_ALONE = """
s.reduce('MEAN', x, 0)
s.gather(x, 0)
s.run(lambda: hs.metrics.Mean().update_state(x))
list(Dataset.from_tensor_slices((TWO, x)))
list(Dataset.range(2).map(lambda _: x))
list(s.experimental_distribute_dataset([{'x': x}] * (2 * N)))
hs.asnumpy([TWO, x])
"""

if N > 1:
    ACROSS += ACROSS_SEVERAL
    INSIDE += INSIDE_SEVERAL
    ON_A_GPU += ON_A_GPU_OF_SEVERAL
else:
    ACROSS += ACROSS_ONE
ACROSS += SCATTER + (WITH_CUPY if importlib.util.find_spec("cupy") else WITHOUT_CUPY)
INSIDE += SCATTER


@dataclasses.dataclass
class Case:
    """A wrong use, its error, and the facts that this states."""

    program: str
    error: type[Exception]
    facts: list[str]


def cases_of(table):
    """The cases of a table."""
    for name, number in {"{N}": N, "{N+1}": N + 1, "{N-1}": N - 1}.items():
        table = table.replace(name, str(number))
    lines = [line for line in table.splitlines() if line and not line.startswith("#")]
    cases = []
    for program, line in zip(lines[::2], lines[1::2], strict=True):
        error, _, facts = line.strip().partition(": ")
        kind = getattr(builtins, error, None) or getattr(hs, error)
        cases.append(Case(program, kind, facts.split(" ... ")))
    return cases


class Env:
    """Two strategies, with variables, and the names of programs."""

    def __init__(self, place, strategy, other):
        self.place, self.s = place, strategy
        outside = hs.Variable(np.zeros(3, np.float32), name="outside", aggregation="SUM")
        with other.scope():
            foreign = hs.Variable(np.zeros(3, np.float32), name="foreign", aggregation="SUM")
        sums = {"v": ONES * 0, "scalars": ONES * 0, "two": ONES[:2] * 0, "scalar": 0.0}
        with strategy.scope():
            made = [
                *(hs.Variable(value, name=name, aggregation="SUM") for name, value in sums.items()),
                hs.Variable(np.zeros((300, 100)), name="large", aggregation="MEAN"),
                hs.Variable(np.zeros(3, np.float32), name="none"),
                hs.Variable(np.zeros(3, np.int32), name="i", aggregation="SUM"),
                hs.Variable(np.zeros(3, np.int32), name="mean", aggregation="MEAN"),
                hs.Variable([True, False], name="b", aggregation="ONLY_FIRST_REPLICA"),
            ]
            own = hs.Variable(ONES * 0, name="own", synchronization="ON_READ", aggregation="SUM")
        self.variables, self.before = made, [v.numpy() for v in made]
        self.v, kept = made[0], []
        strategy.run(lambda: kept.append(hs.get_replica_context()))
        self.names: dict[str, Any] = {
            **{"hs": hs, "np": np, "Dataset": Dataset, "N": N},
            **{"Manager": CheckpointManager, "RANK": RANK, "ONES": ONES},
            **{"TWO": ONES[:2], "FIVE": np.ones(5, np.float32), "context": hs.get_replica_context},
            **{"s": strategy, "other": other, "place": place, "devices": place.devices},
            **{v.name: v for v in (outside, foreign, own, *made)},
            **{"kept": kept[0], "here": self.here, "each": self.each, "rows": self.rows},
            **{"within": within, "variable": self.variable, "from_function": self.from_function},
            "slices": hs.IndexedSlices(place.xp.ones((1, 2)), place.xp.array([0]), (4, 2)),
            "of_replica": lambda value: hs.PerReplica(self.here(value), RANK, N),
            "pairs": Dataset.from_tensor_slices((np.ones((4, 2)), np.arange(4))).batch(4),
        }

    def here(self, value) -> Any:
        """`value` with its arrays on this rank's device, if that supports their dtype."""
        if isinstance(value, list):
            return [self.here(one) for one in value]
        if isinstance(value, dict):
            return {key: self.here(one) for key, one in value.items()}
        is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
        return self.place.xp.asarray(value) if is_array and value.dtype.char != "g" else value

    def each(self, value):
        """A value from each replica."""
        return self.s.run(lambda: self.here(value))

    def rows(self, values, indices):
        return hs.IndexedSlices(self.here(values), indices)

    def variable(self, value, **options):
        return within(self.s, lambda: hs.Variable(self.here(value), **options))

    def from_function(self, value):
        return self.s.experimental_distribute_values_from_function(lambda _: self.here(value))

    def run(self, program, odd, inside=False, **others):
        """Runs a program; `odd` says whether it is wrong on this rank."""
        code = compile(program, __file__, "eval")
        names = self.names | {"odd": odd} | others
        return self.s.run(lambda: eval(code, names)) if inside else eval(code, names)

    def is_unchanged(self):
        """Whether the variables are as before, and a next call gives its result."""
        total = self.s.reduce("SUM", self.s.run(lambda: RANK), None)
        return (
            not hs.has_strategy()
            and all(map(np.array_equal, [v.numpy() for v in self.variables], self.before))
            and total == N * (N - 1) // 2
        )

    def works(self):
        """Nothing has changed, and the next calls are right."""
        xp = self.place.xp
        assert self.is_unchanged()
        array = self.s.run(lambda: xp.full(2, RANK))
        assert self.s.reduce("SUM", array, None).tolist() == [N * (N - 1) // 2] * 2
        assert self.s.gather(array, 0).tolist() == [r for r in range(N) for _ in "ab"]
        self.s.run(lambda: self.v.assign_add(xp.ones(3)))
        assert self.v.numpy().tolist() == [N, N, N]
        assert self.variable([2.0]).numpy().tolist() == [2]
        self.v.assign(np.zeros(3))


def within(strategy, fn):
    """The result of `fn`, called in the scope of a strategy."""
    with strategy.scope():
        return fn()
