// The driver of simulated GPUs, as far as the package asks it: how many there are, and their unique ids.

#include <cstdlib>
#include <cstring>

namespace {

int installed() { const char* text = std::getenv("SIMULATED_GPUS"); return text ? std::atoi(text) : 4; }

// The n-th GPU that CUDA_VISIBLE_DEVICES shows, or -1.
int visible(int n) {
    const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!text) return n < installed() ? n : -1;
    for (; *text && n > 0; --n) {
        const char* comma = std::strchr(text, ',');
        text = comma ? comma + 1 : "";
    }
    if (*text < '0' || *text > '9') return -1;
    const int found = std::atoi(text);
    return found < installed() ? found : -1;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }

int cuDeviceGetCount(int* count) {
    for (*count = 0; visible(*count) >= 0;) ++*count;
    return 0;
}

int cuDeviceGet(int* device, int ordinal) { return (*device = visible(ordinal)) < 0 ? 101 : 0; }

int cuDeviceGetUuid(void* uuid, int device) {
    std::memset(uuid, 0, 16);
    std::memcpy(uuid, "simulated", 9);
    ((unsigned char*)uuid)[15] = (unsigned char)device;
    return 0;
}

int cuDeviceGetUuid_v2(void* uuid, int device) { return cuDeviceGetUuid(uuid, device); }

}
