// Catches the host where it touches pinned memory that a copy is under way from, or to.
//
// The pages are protected. An access to bytes of a copy is noted, and Python told by a signal, whose handler raises at the
// line; one to other bytes of the same pages just goes on. Either way the page is open from then on.

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

struct Guard { uintptr_t start, stop; int forbids_reading; std::atomic<int> is_set; };

constexpr int MOST = 4096;
Guard guards[MOST];
std::atomic<int> violated{-1}, was_write{0};
struct sigaction before;
int (*tell_python)(int);
int number_to_tell;

uintptr_t page_size() { static const uintptr_t size = sysconf(_SC_PAGESIZE); return size; }

void protect(uintptr_t page) {
    int protection = PROT_READ | PROT_WRITE;
    for (const Guard& guard : guards)
        if (guard.is_set && guard.start < page + page_size() && page < guard.stop)
            protection = guard.forbids_reading || protection == PROT_NONE ? PROT_NONE : PROT_READ;
    mprotect((void*)page, page_size(), protection);
}

void protect_all(const Guard& guard) {
    for (uintptr_t page = guard.start & ~(page_size() - 1); page < guard.stop; page += page_size()) protect(page);
}

void handle(int signal, siginfo_t* info, void* context) {
    const uintptr_t place = (uintptr_t)info->si_addr;
    bool is_write = true;
#if defined(__x86_64__)
    is_write = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
    const uintptr_t page = place & ~(page_size() - 1);
    bool is_ours = false;
    for (int i = 0; i < MOST; ++i) {
        const Guard& guard = guards[i];
        if (!guard.is_set || guard.start >= page + page_size() || page >= guard.stop) continue;
        is_ours = true;
        if (guard.start <= place && place < guard.stop && (guard.forbids_reading || is_write)) {
            int none = -1;
            if (violated.compare_exchange_strong(none, i)) { was_write = is_write; tell_python(number_to_tell); }
        }
    }
    if (is_ours) {
        mprotect((void*)page, page_size(), PROT_READ | PROT_WRITE);
    } else {
        sigaction(SIGSEGV, &before, nullptr);  // and the instruction runs into it again
    }
}

}  // namespace

extern "C" {

void guard_install(void* tell, int number) {
    tell_python = (int (*)(int))tell;
    number_to_tell = number;
    struct sigaction now, mine = {};
    sigaction(SIGSEGV, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == handle) return;
    before = now;
    mine.sa_sigaction = handle;
    mine.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&mine.sa_mask);
    sigaction(SIGSEGV, &mine, nullptr);
}

int guard_begin(uintptr_t start, uintptr_t stop, int forbids_reading) {
    for (int i = 0; i < MOST; ++i)
        if (!guards[i].is_set) {
            guards[i].start = start;
            guards[i].stop = stop;
            guards[i].forbids_reading = forbids_reading;
            guards[i].is_set = 1;
            protect_all(guards[i]);
            return i;
        }
    return -1;
}

void guard_end(int i) {
    guards[i].is_set = 0;
    protect_all(guards[i]);
}

int guard_violated() { return violated.exchange(-1); }
int guard_was_write() { return was_write; }

}
