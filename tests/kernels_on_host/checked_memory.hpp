// Finds what a GPU's threads must not do to memory, though here they run one after another.
//
// Compiled by -fsanitize=thread, code calls a function before each access to memory. These functions are here instead of
// in the sanitizer's library, which is not linked: to them a thread is a thread of the kernel.

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace on_host {

// Memory that a kernel is given: `size` bytes, in words that it reads or writes at once.
struct Range {
    const char* first;
    size_t size, word;
    long is_written;
    const char* name;
};

enum Kind { NOTHING, READ, ADDED, WRITTEN };
static const char* const DONE[] = {"", "reads", "adds by an atomic operation to", "writes"};

#ifndef CHECKED
#define UNCHECKED
inline void begin_thread(uint64_t) {}
inline void access(const void*, size_t, Kind, size_t) {}

// Runs all threads of a kernel. Returns what one of them must not do, or nothing.
template <class Work> inline const char* checked(Work work, const Range*, long) { work(); return nullptr; }
#else
#define UNCHECKED __attribute__((no_sanitize("thread")))

// What was done to a word, and by which thread. One that did several kinds of things counts as having written, which
// goes together with nothing that another does.
struct Word { uint64_t kind : 2, thread : 62; };
static const uint64_t SEVERAL = ~(uint64_t)0 >> 2;

static thread_local struct {
    const Range* ranges;
    Word** words;  // of each range that is written, of which the others come behind
    long count, written, latest;
    uint64_t thread;
    const char* stack;  // where the kernel's begins; null while none runs
    jmp_buf out;
    char text[512];
} check;

UNCHECKED inline void begin_thread(uint64_t number) { check.thread = number; }

// Notes an access to a word, or ends the kernel.
UNCHECKED inline void meet(const Range& range, size_t index, Word& word, Kind kind) {
    if (word.kind == NOTHING) {
        word = {(uint64_t)kind, check.thread};
    } else if (word.thread == check.thread) {
        if (word.kind != kind) word.kind = WRITTEN;
    } else if (word.kind == kind && kind != WRITTEN) {
        word.thread = SEVERAL;
    } else {
        char other[32] = "another thread";
        if (word.thread != SEVERAL) std::snprintf(other, sizeof other, "thread %llu", (unsigned long long)word.thread);
        std::snprintf(
            check.text, sizeof check.text, "thread %llu %s word %zu of %s, which %s %s: which comes first is chance",
            (unsigned long long)check.thread, DONE[kind], index, range.name, other, DONE[word.kind]
        );
        std::longjmp(check.out, 1);
    }
}

UNCHECKED inline bool is_within(const Range& range, const char* place, size_t size) {
    const size_t offset = place - range.first;
    return offset < range.size && size <= range.size - offset;
}

// `alignment`: to whose multiples a GPU can do it.
UNCHECKED __attribute__((noinline)) void access(const void* address, size_t size, Kind kind, size_t alignment) {
    const char* const place = (const char*)address;
    const char* const built_in = (const char*)&on_host_place;
    if (check.stack == nullptr) return;
    if (place > (const char*)__builtin_frame_address(0) && place < check.stack) return;  // a thread's own variables
    if (place >= built_in && place < built_in + sizeof on_host_place) return;
    long k = 0;
    while (k < check.written && !is_within(check.ranges[k], place, size)) ++k;
    if (k == check.written && kind == READ) {
        if (check.latest >= check.written && check.latest < check.count &&
            is_within(check.ranges[check.latest], place, size))
            k = check.latest;
        while (k < check.count && !is_within(check.ranges[k], place, size)) ++k;
        check.latest = k;
    }
    const bool is_given = k < (kind == READ ? check.count : check.written);
    if (!is_given || (uintptr_t)place % alignment) {
        std::snprintf(
            check.text, sizeof check.text, "thread %llu %s %zu bytes at an address that is %s",
            (unsigned long long)check.thread, DONE[kind], size,
            is_given ? "not a multiple of them" : "outside of what its arguments say"
        );
        std::longjmp(check.out, 1);
    }
    if (k >= check.written) return;
    const Range& range = check.ranges[k];
    const size_t offset = place - range.first;
    for (size_t index = offset / range.word; index <= (offset + size - 1) / range.word; ++index)
        meet(range, index, check.words[k][index], kind);
}

template <class Work> UNCHECKED __attribute__((noinline)) void run(Work work) { work(); }

template <class Work>
UNCHECKED __attribute__((noinline)) const char* checked(Work work, const Range* ranges, long count) {
    check.ranges = ranges;
    check.count = count;
    check.latest = check.written = 0;
    while (check.written < count && ranges[check.written].is_written) ++check.written;
    check.words = (Word**)std::calloc(check.written + 1, sizeof(Word*));
    for (long k = 0; k < check.written; ++k)
        check.words[k] = (Word*)std::calloc(ranges[k].size / ranges[k].word + 1, sizeof(Word));
    check.stack = (const char*)__builtin_frame_address(0);
    const bool is_over = setjmp(check.out);
    if (!is_over) run(work);
    check.stack = nullptr;
    for (long k = 0; k < check.written; ++k) std::free(check.words[k]);
    std::free(check.words);
    return is_over ? check.text : nullptr;
}
#endif

}  // namespace on_host

#ifdef CHECKED
#define ANSWER extern "C" __attribute__((visibility("hidden"))) UNCHECKED void
#define ANSWERS(size) \
    ANSWER __tsan_read##size(void* place) { on_host::access(place, size, on_host::READ, size); } \
    ANSWER __tsan_write##size(void* place) { on_host::access(place, size, on_host::WRITTEN, size); } \
    ANSWER __tsan_unaligned_read##size(void* place) { on_host::access(place, size, on_host::READ, 1); } \
    ANSWER __tsan_unaligned_write##size(void* place) { on_host::access(place, size, on_host::WRITTEN, 1); }
ANSWERS(1) ANSWERS(2) ANSWERS(4) ANSWERS(8) ANSWERS(16)
ANSWER __tsan_read_range(void* place, size_t size) { on_host::access(place, size, on_host::READ, 1); }
ANSWER __tsan_write_range(void* place, size_t size) { on_host::access(place, size, on_host::WRITTEN, 1); }
ANSWER __tsan_init() {}
ANSWER __tsan_func_entry(void*) {}
ANSWER __tsan_func_exit() {}
#endif
