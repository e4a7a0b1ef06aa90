"""Times single calls of the library on CPU replicas next to the same work by hand.

    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/calls.py
    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/calls.py --simulated-gpu

Times are microseconds on the slowest rank: medians over rounds in which the alternatives take
turns. Ranks that share a core pay for each other's Python, so use no more ranks than cores.

`apply_gradients` is compared with the same step written by hand in a shared window, with the
library's own barrier. Its parts (copying the gradients, the sum and the rule, two barriers) have
their own rows; the rest is our Python. The last lines count the calls of Python functions inside
the package in a steady `run` and `apply_gradients`; unlike times, they are equal on every machine.
"""

import argparse
import pathlib
import sys

import numpy as np
from by_hand import COMM, Window
from mpi4py import MPI
from networks import MOMENTUM, RATE, initial
from rounds import header, interleaved, repeated, row

import hpcstrat as hs
from hpcstrat._transports.barrier import LINE, barrier

LAYERS = (64, 32, 32, 10)  # six small variables
NEST = {"a": 1, "b": [2, 3], "c": 4}


def in_replica(strategy, call):
    """An alternative that makes the call in a replica context."""
    way, seconds = repeated(call), []

    def run(calls):
        strategy.run(lambda: seconds.append(way(calls)))
        return seconds[-1]

    return run


def a_run(strategy):
    return repeated(lambda: strategy.run(lambda nest: nest, args=(NEST,))), None


def a_reduction(strategy):
    value = strategy.run(lambda: np.float64(COMM.rank))
    own, result = np.array(COMM.rank, np.float64), np.array(0.0)
    COMM.Allreduce(own, result)
    assert strategy.reduce("SUM", value, axis=None) == result
    return repeated(lambda: strategy.reduce("SUM", value, axis=None)), repeated(
        lambda: COMM.Allreduce(own, result)
    )


def a_read(strategy):
    with strategy.scope():
        variable = hs.Variable(np.ones((8, 8), np.float32))
    return in_replica(strategy, variable.value), None


def an_operator(strategy):
    array = np.ones((8, 8), np.float32)
    with strategy.scope():
        variable = hs.Variable(array)
    return in_replica(strategy, lambda: variable + array), repeated(lambda: array + array)


def own_barrier():
    flags = MPI.Win.Allocate_shared(LINE * COMM.size if COMM.rank == 0 else 0, 1, comm=COMM)
    places = np.frombuffer(flags.Shared_query(0)[0], np.uint8)
    if COMM.rank == 0:
        places[...] = 0
    COMM.Barrier()
    return barrier(places, COMM.Dup())


def python_calls(call):
    """How many Python functions inside the package one steady call enters, on this thread.

    Of several calls the one with the fewest counts, in which the barrier has not polled.
    """
    package = str(pathlib.Path(hs.__file__).parent)
    found = 0

    def count(frame, event, _):
        nonlocal found
        code = frame.f_code  # a barrier's `_wait` polls if another rank is late
        found += (
            event == "call" and code.co_name != "_wait" and code.co_filename.startswith(package)
        )

    for _ in range(5):  # the first calls make plans and fill caches
        call()
    every = []
    for _ in range(20):
        found = 0
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
        every.append(found)
    return min(every)


def time_an_update(strategy, rounds, calls):
    """Prints the rows of an update, and returns how many Python calls a steady one makes."""
    start = list(initial(LAYERS))
    gradients = [np.full_like(value, COMM.rank) for value in start]
    with strategy.scope():
        variables = [hs.Variable(value) for value in start]
        optimizer = hs.optimizers.SGD(RATE, MOMENTUM)
    meet = own_barrier()
    hand, parts = Window(start, meet), Window(start, meet)
    ways = {
        "ours": in_replica(
            strategy, lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True))
        ),
        "beside": repeated(lambda: hand.step(gradients)),
        "- copying the gradients": repeated(lambda: parts.write(gradients)),
        "- the sum and the rule": repeated(parts.update),
        "- two barriers": repeated(lambda: (meet(), meet())),
    }
    medians = interleaved(ways, rounds, calls, COMM)
    for variable, weight in zip(variables, hand.weights, strict=True):
        np.testing.assert_allclose(variable.numpy(), weight, rtol=1e-4, atol=1e-6)
    show("apply_gradients of six small variables", medians, 12)
    for name, seconds in medians.items():
        if name.startswith("-"):
            row(name, "", f"{1e6 * seconds:,.2f}", "", "")
    counts = []
    strategy.run(
        lambda: counts.append(
            python_calls(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
        )
    )
    return counts[0]


def show(name, medians, goal):
    ours, beside = 1e6 * medians["ours"], 1e6 * medians.get("beside", 0)
    row(name, f"{ours:,.2f}", f"{beside:,.2f}" if beside else "", f"{ours - beside:,.2f}", goal)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=30, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument("--calls", type=int, default=500, help="calls a turn (%(default)s)")
    parser.add_argument(
        "--simulated-gpu",
        action="store_true",
        help="count the calls, launches and events of a step on simulated GPUs instead",
    )
    options = parser.parse_args()
    if options.simulated_gpu:
        sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
        import simulated_gpu

        simulated_gpu.enter()
        import simulated_calls

        simulated_calls.main()
        return
    strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
    print(f"Single calls on {COMM.size} ranks, microseconds, medians of {options.rounds} rounds\n")
    header("call", "ours", "beside", "more", "goal of that")
    for name, pair, goal in (
        ("run of an empty function, a nest of four", a_run, 10),
        ("reduce of a number, beside MPI's Allreduce", a_reduction, 15),
        ("value() in a replica", a_read, 0.5),
        ("an operator on a variable, beside the array's own", an_operator, 2),
    ):
        ours, beside = pair(strategy)
        ways = {"ours": ours} | ({"beside": beside} if beside is not None else {})
        show(name, interleaved(ways, options.rounds, options.calls, COMM), goal)
    update = time_an_update(strategy, options.rounds, options.calls)
    run = python_calls(lambda: strategy.run(lambda nest: nest, args=(NEST,)))
    if COMM.rank == 0:
        print(f"\nPython calls inside hpcstrat, steady: run {run}, apply_gradients {update}")


if __name__ == "__main__":
    main()
