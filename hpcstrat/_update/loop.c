// An update in one pass over memory: sums the messages in their order, and applies a kernel. And the
// squares of such sums, for their norms.

// KERNEL: here come the definitions of one kernel and dtype, which `compiled.py` makes

#include <stdint.h>
#include <tgmath.h>
#define auto __auto_type
#define BLOCK 256  // eight buffers of this many elements fit in the fastest cache
typedef TYPE number;

// A block's sum of messages; where the only one is, for no message is copied.
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

#define FOR_EACH_ELEMENT(SUM) \
    for (int64_t i = 0; i < count; ++i) { \
        const number gradient = SUM; \
        LOAD BODY STORE \
    }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A row is a run of elements: how many, then their addresses in the value, in each slot and in each
// message.
void update(const double *given, const int64_t *row, int64_t rows, int64_t messages) {
    NUMBERS
    // The last message is added in the kernel's loop: two need no other loop.
    const int64_t others = messages == 1 ? 1 : messages - 1;
    for (; rows > 0; --rows, row += COLUMNS + messages) {
        const int64_t *const message = row + COLUMNS;
        for (int64_t start = 0; start < row[0]; start += BLOCK) {
            const int64_t count = smaller(BLOCK, row[0] - start);
            OPEN
            number room[BLOCK];
            const number *restrict const sums = add_up(message, others, start, count, room);
            if (others < messages) {
                const number *restrict const last = (const number *)message[others] + start;
                FOR_EACH_ELEMENT(sums[i] + last[i])
            } else {
                FOR_EACH_ELEMENT(sums[i])
            }
        }
    }
}

// A row is a run of elements: how many, then their addresses in each message. The sum of its squares
// is added up as in `sum_of_squares`, in lanes, so that a compiler can use vectors in one order.
void squares(double *sums, const int64_t *row, int64_t rows, int64_t messages) {
    for (; rows > 0; --rows, ++sums, row += 1 + messages) {
        *sums = 0;
        for (int64_t chunk = 0; chunk < row[0]; chunk += CHUNK) {
            double lanes[LANES] = {0}, sum = 0;
            const int64_t stop = smaller(chunk + CHUNK, row[0]);
            for (int64_t start = chunk; start < stop; start += BLOCK) {
                const int64_t count = smaller(BLOCK, stop - start);
                number room[BLOCK];
                const number *restrict const x = add_up(row + 1, messages, start, count, room);
                for (int64_t i = 0; i < count; i += LANES)
                    for (int64_t j = 0; j < LANES && i + j < count; ++j)
                        lanes[j] += (double)x[i + j] * (double)x[i + j];
            }
            for (int64_t j = 0; j < LANES; ++j) sum += lanes[j];
            *sums += sum;
        }
    }
}
