"""Updates in one pass over memory: a rule's kernel as a C loop, compiled by the host's compiler.

NumPy's operations pass over a chunk a dozen times, from cache, and are four times slower than
memory. The loop computes the same bits, which is tested on a few numbers whenever a loop is loaded.
Without a compiler, where its files cannot be kept or loaded, or where anything else goes wrong,
NumPy does the work.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._communicators.reduction import CHUNK, reduce_chunk
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._update.kernel import Kernel
from hpcstrat._update.library_cache import compiler, load_library
from hpcstrat._update.rule import LANES, UpdateRule, sums_of_squares

FEWEST = 100_000
"""The fewest elements of an update worth compiling at once: it takes half a second, once per
machine."""
FEWEST_UPDATES = 1_000
"""Updates by the same few messages after which smaller ones are compiled, too. These gain
microseconds in each step; with messages that are new in each step, as where a host's ranks have
parts of slots, they would lose more."""

Loop: TypeAlias = "Callable[[Array, Array], Callable[[ctypes.c_void_p, int, int], None]]"
"""Binds two arrays of float64: the kernel's constants, which each call reads, and for each of its
terms a sum, to which each call adds its squares. What it returns is called with the fields of a
`Table`."""


class Table(NamedTuple):
    """The arrays that a loop goes through.

    Attributes:
        rows: points to one row per run: its number of elements, then its addresses in the variable,
            in each slot and in each message. Messages are summed in this order.
        runs: how many rows there are.
        messages: how many messages.
    """

    rows: ctypes.c_void_p
    runs: int
    messages: int


_TYPES = {
    "float32": ("float", "float"),
    "float64": ("double", "double"),
    "float16": ("float", "_Float16"),
    "bfloat16": ("float", "uint16_t"),
}
"""The C types in which a variable's elements are computed and stored."""

# `_source` defines the names in capitals, which are all that differs between kernels and dtypes.
_LOOP = r"""
#include <stdint.h>
#include <string.h>
#include <tgmath.h>
#define auto __auto_type
typedef NUMBER number;
typedef STORED stored;
#define BLOCK 256  // eight buffers of this many elements fit in the fastest cache

// ---- A block's sum of messages, in their order: in `sums`, or where the only message is

#if !IS_16_BIT

// No message is copied: to add two takes half the time of copying one first.
static inline const number *add_up(const int64_t *message, int64_t messages, int64_t start,
                                   int64_t count, number *restrict sums) {
    const number *const first = (const number *)message[0] + start;
    if (messages == 1) return first;
    const number *const second = (const number *)message[1] + start;
    for (int64_t i = 0; i < count; ++i) sums[i] = first[i] + second[i];
    for (int64_t k = 2; k < messages; ++k) {
        const number *const next = (const number *)message[k] + start;
        for (int64_t i = 0; i < count; ++i) sums[i] += next[i];
    }
    return sums;
}

#else

#if IS_FLOAT16
// Compilers do not choose these instructions by themselves; without them it takes ten times as
// long.
#ifdef __F16C__
#include <immintrin.h>
#endif
static inline void read(const stored *restrict from, number *restrict to, int64_t count) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(from + i))));
#endif
    for (; i < count; ++i) to[i] = from[i];
}
static inline void write(const number *restrict from, stored *restrict to, int64_t count) {
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((void *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < count; ++i) to[i] = from[i];
}
#else  // bfloat16
static inline void read(const stored *restrict from, number *restrict to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}
static inline void write(const number *restrict from, stored *restrict to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {  // to nearest, ties to even
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        to[i] = from[i] != from[i] ? (bits >> 16 & 0x8000) | 0x7fc0
                                   : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}
#endif

// Added up in `float`, and rounded once, as NumPy does it in `reduce_chunk`.
static inline const number *add_up(const int64_t *message, int64_t messages, int64_t start,
                                   int64_t count, number *restrict sums) {
    read((const stored *)message[0] + start, sums, count);
    if (messages == 1) return sums;  // nothing to round
    for (int64_t k = 1; k < messages; ++k) {
        number next[BLOCK];
        read((const stored *)message[k] + start, next, count);
        for (int64_t i = 0; i < count; ++i) sums[i] += next[i];
    }
    stored rounded[BLOCK];
    write(sums, rounded, count);
    read(rounded, sums, count);
    return sums;
}

#endif

// ---- Sums of squares, as `rule.sums_of_squares` computes them

static inline void add_squares(const number *terms, double *restrict lanes, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        for (int64_t j = 0; j < LANES && i + j < count; ++j)
            lanes[j] += (double)terms[i + j] * (double)terms[i + j];
}
static inline double sum(const double *lanes) {
    double sum = 0;
    for (int64_t j = 0; j < LANES; ++j) sum += lanes[j];
    return sum;
}

// ---- All runs

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

#define FOR_EACH_ELEMENT(SUM) \
    for (int64_t i = 0; i < count; ++i) { \
        const number gradient = SUM; \
        LOAD KERNEL STORE \
    }

static inline void update_chunk(const int64_t *row, int64_t start, int64_t stop, int64_t messages,
                                const double *given, double *squares) {
    const int64_t *const message = row + FIRST_MESSAGE;
    TAKE_NUMBERS
    double lanes[TERMS][LANES];
    memset(lanes, 0, sizeof lanes);
    for (; start < stop; start += BLOCK) {
        const int64_t count = smaller(BLOCK, stop - start);
        OPEN
        number terms[TERMS][BLOCK], room[BLOCK];
        // The last message is added in the kernel's loop: two need no other loop.
        const int64_t others = IS_16_BIT || messages == 1 ? messages : messages - 1;
        const number *restrict const sums = add_up(message, others, start, count, room);
        if (others < messages) {
            const number *restrict const last = (const number *)message[others] + start;
            FOR_EACH_ELEMENT(sums[i] + last[i])
        } else {
            FOR_EACH_ELEMENT(sums[i])
        }
        CLOSE
        for (int term = 0; term < TERMS; ++term) add_squares(terms[term], lanes[term], count);
    }
    for (int term = 0; term < TERMS; ++term) squares[term] += sum(lanes[term]);
}

void update(const double *given, double *squares, const int64_t *row, int64_t rows,
            int64_t messages) {
    for (; rows > 0; --rows, row += FIRST_MESSAGE + messages)
        for (int64_t start = 0; start < row[0]; start += CHUNK)
            update_chunk(row, start, smaller(start + CHUNK, row[0]), messages, given, squares);
}
"""


_loops: dict[tuple[Kernel, str], Loop | None] = {}


def loop(rule: UpdateRule, dtype: np.dtype[Any]) -> Loop | None:
    """The compiled loop of a rule for variables of this dtype; `None` if none can be made."""
    if rule.kernel is None or dtype.name not in _TYPES:
        return None
    key = (rule.kernel, dtype.name)
    if key not in _loops:
        _loops[key] = None
        # Any error, perhaps on one rank only, is suppressed: it would interrupt the update.
        with contextlib.suppress(Exception):
            _loops[key] = load(rule, dtype)
    return _loops[key]


def load(rule: UpdateRule, dtype: np.dtype[Any]) -> Loop:
    """The compiled loop of a rule with a kernel, compiled if it is not in the cache.

    Raises:
        OSError, AttributeError, RuntimeError, SubprocessError: it cannot be made; the error says
            why.
    """
    assert rule.kernel is not None
    kernel = rule.kernel
    function = load_library(_source(kernel, dtype.name)).update
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = (pointer, pointer, pointer, count, count), None

    def bind(numbers: Array, sums: Array) -> Callable[[ctypes.c_void_p, int, int], None]:
        # Pointers keep their arrays. Finding addresses in each step would cost as much as NumPy's
        # operations on a small update.
        return functools.partial(function, *[a.ctypes.data_as(pointer) for a in (numbers, sums)])

    if not _matches_numpy(bind, rule, kernel, dtype):
        raise OSError(f"{compiler()}: the code for {kernel.name} computes other values than NumPy")
    return bind


def _source(kernel: Kernel, dtype: str) -> str:
    """The C code of a kernel's loop.

    For SGD with momentum, for example, of float32, there are these definitions:

        TAKE_NUMBERS  const number number_0 = given[0];
                      const number number_1 = given[1];
        OPEN          number *restrict const all_value = (number *)row[1] + start;
                      number *restrict const all_slot_momentum = (number *)row[2] + start;
        LOAD          number value = all_value[i];
                      number slot_momentum = all_slot_momentum[i];
        STORE         all_value[i] = value;
                      all_slot_momentum[i] = slot_momentum;
    """
    computed, stored = _TYPES[dtype]
    arrays = ("value", *kernel.slots)
    changed = () if kernel.terms else arrays
    terms = range(len(kernel.terms))
    if computed == stored:  # changed where they are
        opened, closed = "number *restrict const all_{0} = (number *)row[{1}] + start;", ""
    else:
        opened = "number all_{0}[BLOCK]; read((const stored *)row[{1}] + start, all_{0}, count);"
        closed = "write(all_{0}, (stored *)row[{1}] + start, count);"
    definitions = {
        "NUMBER": [computed],
        "STORED": [stored],
        "IS_16_BIT": [int(computed != stored)],
        "IS_FLOAT16": [int(dtype == "float16")],
        "LANES": [LANES],
        "CHUNK": [CHUNK],
        "FIRST_MESSAGE": [1 + len(arrays)],
        "TERMS": [len(terms)],
        "TAKE_NUMBERS": [
            f"const number {name} = given[{place}];" for place, name in enumerate(kernel.constants)
        ],
        "OPEN": [opened.format(name, column) for column, name in enumerate(arrays, 1)],
        "LOAD": [
            *[f"number {name} = all_{name}[i];" for name in arrays],
            *[f"number term_{term};" for term in terms],
        ],
        "KERNEL": kernel.body.splitlines(),
        "STORE": [
            *[f"all_{name}[i] = {name};" for name in changed],
            *[f"terms[{term}][i] = term_{term};" for term in terms],
        ],
        "CLOSE": [closed.format(name, column) for column, name in enumerate(changed, 1)],
    }
    lines = [f"#define {name} {' '.join(map(str, text))}" for name, text in definitions.items()]
    return "\n".join([*lines, _LOOP])


def table(runs: Sequence[Sequence[Array]], messages: int) -> Table:
    """The table of runs: of each its arrays in the variable, in each slot and in each message."""
    rows = [[arrays[0].size, *(array.ctypes.data for array in arrays)] for arrays in runs]
    return Table(np.array(rows, np.int64).ctypes.data_as(ctypes.c_void_p), len(rows), messages)


def _matches_numpy(bind: Loop, rule: UpdateRule, kernel: Kernel, dtype: np.dtype[Any]) -> bool:
    """Whether the loop computes the bits of the NumPy operations, except for NaN payloads."""
    random = np.random.default_rng(0)
    special = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-6, 6e4)
    with np.errstate(all="ignore"):
        arrays = []
        for _ in range(1 + len(kernel.slots) + 4):  # four messages: all that can be done with any
            numbers = random.standard_normal(1009)
            if kernel.terms:  # numbers whose sums of squares are not nan
                numbers = abs(numbers)
            else:
                numbers[::7] = random.choice(special, numbers[::7].size)
            arrays.append(numbers.astype(dtype))
        changed, messages = arrays[:-4], arrays[-4:]
        copies = [array.copy() for array in changed]
        sums = np.zeros(len(kernel.terms))
        bind(np.array(rule.kernel_constants), sums)(*table([arrays], 4))
        gradient = np.empty_like(copies[0])
        reduce_chunk(gradient, messages, ReduceOp.SUM)
        terms = kernel.apply(rule.kernel_constants, copies[0], gradient, copies[1:])
        found = [sums, *[array.astype(np.float64) for array in changed]]
        wanted = [sums_of_squares(terms), *[array.astype(np.float64) for array in copies]]
    return all(
        np.array_equal(one, other, equal_nan=True)
        and np.array_equal(np.signbit(one[one == 0]), np.signbit(other[other == 0]))
        for one, other in zip(found, wanted, strict=True)
    )
