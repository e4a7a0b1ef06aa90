"""What MPI is assumed to do in a call of n ranks: the messages of its rounds.

Those of MPICH for the sizes that the library sends; Thakur, Rabenseifner and Gropp, "Optimization
of Collective Communication Operations in MPICH", International Journal of High Performance
Computing Applications 19(1), 2005. A round is a list of messages that are under way at the same
time: source, destination, bytes.
"""

import itertools

SHORT_BROADCAST, LONG_BROADCAST = 12288, 1 << 19  # bytes; MPICH's defaults
SHORT_GATHER, LONG_GATHER = 81920, 1 << 19  # of all ranks together
FEW = 8  # ranks, to which even a long message goes as a whole


def largest_power(n):
    """The largest power of two up to n."""
    return 1 << n.bit_length() - 1


def bruck(sizes):
    """All-gather of few bytes: Bruck's algorithm.

    Recursive doubling has as many rounds and bytes.
    """
    n, distance = len(sizes), 1
    ends = [0, *itertools.accumulate([*sizes, *sizes])]
    while distance < n:
        count = min(distance, n - distance)
        yield [(rank, (rank - distance) % n, ends[rank + count] - ends[rank]) for rank in range(n)]
        distance *= 2


def ring(sizes):
    """All-gather of many bytes: each rank passes on what came from the previous rank."""
    n = len(sizes)
    for turn in range(n - 1):
        yield [(rank, (rank + 1) % n, sizes[(rank - turn) % n]) for rank in range(n)]


def all_gather(sizes):
    """By the sum of the sizes."""
    n = len(sizes)
    limit = LONG_GATHER if largest_power(n) == n else SHORT_GATHER
    return bruck(sizes) if sum(sizes) < limit else ring(sizes)


def recursive_doubling(n, nbytes):
    """All-reduce of few bytes: both ranks of a pair send what they have, at doubling distances.

    Ranks beyond a power of two leave their part to a neighbour first, and hear from it at the end.
    """
    power = largest_power(n)
    extra = n - power
    folded = [(2 * i, 2 * i + 1, nbytes) for i in range(extra)]
    taking_part = [*range(1, 2 * extra, 2), *range(2 * extra, n)]
    yield folded
    distance = 1
    while distance < power:
        yield [(taking_part[i], taking_part[i ^ distance], nbytes) for i in range(power)]
        distance *= 2
    yield [(to, source, nbytes) for source, to, nbytes in folded]


def broadcast(n, root, nbytes):
    """A tree for few bytes; more are scattered along a tree first, then gathered by all."""
    if nbytes < SHORT_BROADCAST or n < FEW:
        yield from binomial(n, root, [nbytes] * n)
        return
    part = -(-nbytes // n)
    parts = [max(0, min(part, nbytes - part * place)) for place in range(n)]
    # what each rank gets of the scattered parts: those of the ranks below it in the tree
    yield from binomial(n, root, [sum(parts[i : i + (i & -i)]) for i in range(n)])
    if nbytes < LONG_BROADCAST and largest_power(n) == n:
        # recursive doubling has as many rounds as Bruck's algorithm
        gathered = bruck(parts)
    else:
        gathered = ring(parts)
    for messages in gathered:
        yield [((root + i) % n, (root + j) % n, nbytes) for i, j, nbytes in messages]


def binomial(n, root, sizes):
    """A tree of messages; `sizes` are those that the ranks receive, counted from the root."""
    distance = 1 << (n - 1).bit_length()
    while distance := distance // 2:
        yield [
            ((root + place) % n, (root + place + distance) % n, sizes[place + distance])
            for place in range(0, n - distance, 2 * distance)
        ]
