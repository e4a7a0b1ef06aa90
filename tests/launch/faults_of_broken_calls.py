"""Faults in the middle of a call: interrupting signals, exceptions of one rank, two callers."""

from fault import ANY, BEGIN, HERE, WAIT, Fault

SAVE = """
hs.checkpoint.Checkpoint(v=v, optimizer=optimizer).save("saved")
"""


def broken(
    setting,
    call,
    named,
    strategy="CentralStorageStrategy",
    of="if last: ",
    error="KeyboardInterrupt",
    end=SAVE,
    ends=rf"Checkpoint\.save, at {HERE}<module>",
):
    """Some ranks catch an exception that interrupted a call: they must not save the result."""
    program = f"""
numbers = np.full(100_000, rank, np.float32)
with strategy.scope():
    v = hs.Variable(numbers, aggregation="SUM")
    own = hs.Variable(numbers, synchronization="ON_READ", aggregation="SUM")
    optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
rows = hs.IndexedSlices(numbers[:50], np.arange(50), numbers.shape)
def apply(gradient): strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
apply(numbers)
try:
    {of}interrupt({setting})
    {call}
except {error}:
    pass
{end}"""
    return Fault(
        program,
        [
            rf"\[rank \d\] {error}",
            rf"this exception interrupted {named} on this rank .* the job ends, at {ends}",
        ],
        r"\[rank \d\] Traceback",
        begin=BEGIN.replace("CentralStorageStrategy", strategy),
        ranks=2,
    )


MIRRORED = "MirroredStrategy"
APPLY = r"SGD\.apply_gradients"
ITERATE = """batches = hs.data.Dataset.range(9).{}
    for batch in strategy.experimental_distribute_dataset(batches): pass"""
ITERATING = r"iterating over Strategy\.experimental_distribute_dataset"
BROKEN = {
    "an update interrupted": broken("'apply'", "apply(numbers)", APPLY),
    "an update interrupted while it waits": broken(
        "'exchange_records'", "apply(numbers)", APPLY, MIRRORED
    ),
    "an update of rows interrupted": broken("'update_rows'", "apply(rows)", APPLY),
    "an assignment interrupted": broken(
        "'_reduced'", "v.assign_add(numbers)", "Variable.assign_add of 'Variable'"
    ),
    "a new variable interrupted": broken(
        "'new_block'", "with strategy.scope(): hs.Variable(v)", "Variable 'Variable'"
    ),
    "an update interrupted by an alarm": broken(
        "'apply', TimeoutError('late')", "apply(numbers)", APPLY, error="TimeoutError"
    ),
    "an update interrupted at the end": broken("'sync'", "apply(numbers)", APPLY, of=""),
    "a reduction interrupted": broken(
        "'_share_slices'",
        "strategy.reduce('SUM', strategy.run(lambda: numbers), None)",
        r"Strategy\.reduce",
    ),
    "an iteration interrupted that exchanges nothing": broken(
        "'fetch'", ITERATE.format("batch(3)"), ITERATING
    ),
    "an own value interrupted": broken(
        "'_assign'", "own.assign(numbers)", r"Variable\.assign of 'Variable'"
    ),
    "an update interrupted before the end of the program": broken(
        "'apply'", "apply(numbers)", APPLY, end="", ends="the end of the program"
    ),
    "a restoring interrupted": broken(
        "'_load'",
        "hs.checkpoint.Checkpoint(v=v, optimizer=optimizer).restore('before')",
        r"Checkpoint\.restore",
        of="hs.checkpoint.Checkpoint(v=v, optimizer=optimizer).save('before')\n    if last: ",
    ),
}


def caught(program, error, *says):
    """An exception that one rank gets after the ranks have met, and catches."""
    return Fault(
        program + WAIT,
        [
            rf"\[rank 1\] {error}",
            r"\[rank 1\] .* on rank 1 and was caught, but other ranks did not raise there",
            *says,
        ],
        r"\[rank 1\] Traceback",
        ranks=2,
    )


CAUGHT = {
    "caught by one rank: what it was sent": caught(
        """
class Sent:
    def __getstate__(self): return 1
    def __setstate__(self, state):
        if last: raise ValueError("only here")
with contextlib.suppress(ValueError): hs.broadcast_object(Sent())
""",
        "ValueError: only here",
    ),
    "caught by one rank: want of memory": caught(
        """
whole, concatenate = strategy.run(lambda: np.ones(3)), np.concatenate
def full(*_): raise MemoryError("full")
if last: np.concatenate = full
with contextlib.suppress(MemoryError): strategy.gather(whole, 0)
np.concatenate = concatenate
""",
        "MemoryError: full",
    ),
    "caught by one rank: in an update after a write": caught(
        """
with strategy.scope(): v = hs.Variable(np.zeros(3))
def update(v):
    v.assign(np.ones(3))
    if last: raise ValueError("only here")
def step(): hs.get_replica_context().merge_call(lambda s: s.extended.update(v, update))
with contextlib.suppress(ValueError): strategy.run(step)
""",
        "ValueError: only here",
    ),
    "caught by one rank: an argument of an update": caught(
        """
with strategy.scope(): v = hs.Variable(np.zeros(3))
with contextlib.suppress(TypeError):
    strategy.extended.update(v, lambda v, x: v.assign(x), np.ones(3) if last else (np.ones(3),))
""",
        r"TypeError: StrategyExtended\.update: args is of type ndarray",
    ),
    "caught by one rank: an exception without a text": caught(
        """
class Silent(ValueError):
    def __str__(self): raise self
def fail():
    if last: raise Silent
with contextlib.suppress(Silent): strategy.run(fail)
""",
        r"(__main__\.)?Silent: <",
    ),
    "caught by one rank: a result that is no array": caught(
        """
class Result:
    __dlpack__ = None
    __dlpack_device__ = lambda self: (1, 0)
    def copy(self): return self
    def __array__(self, *_, **__):
        if last: raise KeyError("no such result")
        return np.ones(1)
with contextlib.suppress(KeyError): strategy.run(Result)
""",
        "KeyError: 'no such result'",
    ),
}

TWICE = {
    "two threads at once, and nobody looks": Fault(
        """
from concurrent.futures import ThreadPoolExecutor
with strategy.scope(): v = hs.Variable(np.zeros(100_000))
def work():
    for _ in range(100000): v.assign_add(np.ones(100_000))
with ThreadPoolExecutor(2) as pool: pool.submit(work), pool.submit(work)
print("went on")
""",
        [
            rf"was called in the thread '.*', at {HERE}work, while .*: one thread at a time",
            "the job ends, at Variable",
        ],
        ranks=2,
    ),
    "a forked child in its parent's place": Fault(
        """
if last:
    child = os.fork()
    if child == 0:
        try: hs.barrier()
        except RuntimeError as error: print(error, file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print(strategy.reduce("SUM", strategy.run(lambda: 1.0), None))
""",
        [rf"barrier was called at {HERE}<module>, in process \d+, which the program forked"],
        prints=[r"\A2.0\n\Z"],
        ranks=2,
        status=ANY,
    ),
}
