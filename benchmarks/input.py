"""Times splitting a shuffled and batched dataset between CPU replicas next to indexing by hand.

    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/input.py

The alternatives for an epoch of 60,000 rows of 784 numbers and their labels, in turns:

    ours       shuffle(60_000).batch(B) of the slices, by experimental_distribute_dataset
    by hand    plain NumPy: rows[indices] for this rank's share of each batch, in a given order
    drawing    as by hand, but drawing the epoch's order is timed too, as in ours

Times are milliseconds, medians over rounds on the slowest rank. Then it counts the rows that each
rank touches in an epoch: it must be its own rows only. For this every row is a page of memory, and
the system knows which pages were read. Last, epochs of `map` with one call at once and with eight,
in turns: of a function that waits, after `batch`, and of one that is over at once, before it.
"""

import argparse
import functools
import itertools
import mmap
import time

import numpy as np
from mpi4py import MPI
from rounds import header, interleaved, repeated, row

import hpcstrat as hs

COMM = MPI.COMM_WORLD


def distributed(strategy, arrays, batch):
    dataset = (
        hs.data.Dataset.from_tensor_slices(arrays).shuffle(len(arrays[0]), seed=0).batch(batch)
    )
    return strategy.experimental_distribute_dataset(dataset)


def by_hand(rows, labels, batch, epochs):
    """Returns a function that fetches this rank's share of an epoch's batches, in a given order."""
    orders = itertools.cycle([own_parts(len(rows), batch, seed) for seed in range(epochs)])

    def epoch():
        for part in next(orders):
            yield rows[part], labels[part]

    return epoch


def drawing(rows, labels, batch):
    """As `by_hand`, but the function draws the order."""
    seeds = itertools.count()

    def epoch():
        for part in own_parts(len(rows), batch, next(seeds)):
            yield rows[part], labels[part]

    return epoch


def own_parts(count, batch, seed):
    """The indices of this rank's rows in each batch."""
    order, parts = np.random.default_rng(seed).permutation(count), []
    for start in range(0, count, batch):
        share, rest = divmod(min(batch, count - start), COMM.size)
        first = start + share * COMM.rank + min(COMM.rank, rest)
        last = first + share + (COMM.rank < rest)
        parts.append(order[first:last])
    return parts


def exhaust(batches):
    for _ in batches:
        pass


def labels_of_all_ranks(strategy, batches):
    """The labels of an epoch, rank by rank."""
    own = [strategy.experimental_local_results(y)[COMM.rank] for _, y in batches]
    return COMM.allgather(np.concatenate(own))


def check(strategy, ours, hand, count):
    """Checks that each row comes once, and that both ways give each rank as many rows."""
    labels = labels_of_all_ranks(strategy, ours)
    np.testing.assert_array_equal(np.sort(np.concatenate(labels)), np.arange(count))
    expected = COMM.allgather(sum(len(y) for _, y in hand()))
    assert [len(own) for own in labels] == expected, (labels, expected)


def pages_read(memory, rows):
    """Which pages of a fresh mapping were touched, as booleans."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(memory.ctypes.data // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(8 * rows), np.uint64)
    return entries >> np.uint64(63) == 1


def touched(strategy, count, batch):
    """The number of rows that each rank reads in an epoch, and whether they are its own.

    Before its first epoch a rank also reads the samples that the ranks compare, so this measures
    the second epoch.
    """
    mapping = mmap.mmap(-1, count * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    rows = np.frombuffer(mapping, np.uint8).reshape(count, mmap.PAGESIZE)
    batches = distributed(strategy, (rows, np.arange(count)), batch)
    exhaust(batches)
    mapping.madvise(mmap.MADV_DONTNEED)
    given = labels_of_all_ranks(strategy, batches)[COMM.rank]
    read = np.flatnonzero(pages_read(rows, count))
    np.testing.assert_array_equal(read, np.sort(given))
    return COMM.allgather(len(read))


def waits(numbers):
    time.sleep(0.01)
    return numbers


def compare_calls(strategy, rounds):
    """Prints the milliseconds of an epoch with one call at once and with eight."""
    cases = {
        "40 batches of a generator, mapped in 10 ms each": lambda calls: (
            hs.data.Dataset.from_generator(lambda: range(160)).batch(4).map(waits, calls)
        ),
        "20,000 numbers, negated": lambda calls: (
            hs.data.Dataset.range(20_000).map(np.negative, calls).batch(32)
        ),
    }
    distribute = strategy.experimental_distribute_dataset
    for name, dataset in cases.items():
        ways = {
            calls: repeated(functools.partial(exhaust, distribute(dataset(calls))))
            for calls in (1, 8)
        }
        one, eight = interleaved(ways, rounds, comm=COMM).values()
        print(
            f"{name}: {1e3 * one:,.1f} ms with one call at once, {1e3 * eight:,.1f} with eight, "
            f"which is {eight / one:.2f} of it"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=10, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument("--rows", type=int, default=60_000, help="of the dataset (%(default)s)")
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
    rows, labels = np.ones((options.rows, 784), np.float32), np.arange(options.rows)
    print(f"An epoch on {COMM.size} ranks, milliseconds, medians of {options.rounds} rounds\n")
    header("batch", "ours", "by hand", "ours of its speed", "goal", "drawing", "ours of its speed")
    for batch in (128, 256):
        ours, hand = (
            distributed(strategy, (rows, labels), batch),
            by_hand(rows, labels, batch, options.rounds),
        )
        draws = drawing(rows, labels, batch)
        check(strategy, ours, hand, options.rows)
        ways = {
            "ours": repeated(lambda ours=ours: exhaust(ours)),
            "by hand": repeated(lambda hand=hand: exhaust(hand())),
            "drawing": repeated(lambda draws=draws: exhaust(draws())),
        }
        medians = interleaved(ways, options.rounds, comm=COMM)
        took = {name: f"{1e3 * seconds:,.1f}" for name, seconds in medians.items()}
        speed = {
            name: f"{100 * seconds / medians['ours']:.0f} %" for name, seconds in medians.items()
        }
        row(
            batch,
            took["ours"],
            took["by hand"],
            speed["by hand"],
            "80 %",
            took["drawing"],
            speed["drawing"],
        )
    counts = ", ".join(f"{count:,}" for count in touched(strategy, options.rows, 256))
    print(f"\nRows that each rank touched in an epoch of {options.rows:,}: {counts}\n")
    compare_calls(strategy, options.rounds)


if __name__ == "__main__":
    main()
