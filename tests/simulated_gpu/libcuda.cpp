// The driver of simulated GPUs, as far as the package asks it: how many there are, their unique ids, and its errors.

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <unistd.h>

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

int rank() {
    for (const char* name : {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}) {
        if (const char* text = std::getenv(name)) return std::atoi(text);
    }
    return 0;
}

const struct {
    int status;
    const char* name;
} errors[] = {
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {34, "CUDA_ERROR_STUB_LIBRARY"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"},
    {805, "CUDA_ERROR_MPS_CONNECTION_FAILED"},
    {807, "CUDA_ERROR_MPS_SERVER_NOT_READY"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

}  // namespace

extern "C" {

// SIMULATED_CUINIT: `STATUS[@RANK]`. Where SIMULATED_CUINIT_WHILE names a file, only while that is there.
int cuInit(unsigned) {
    const char *text = std::getenv("SIMULATED_CUINIT"), *file = std::getenv("SIMULATED_CUINIT_WHILE");
    if (!text || (file && access(file, F_OK))) return 0;
    const char* at = std::strchr(text, '@');
    return at && std::atoi(at + 1) != rank() ? 0 : std::atoi(text);
}

int cuGetErrorName(int status, const char** name) {
    *name = nullptr;
    for (const auto& one : errors) {
        if (one.status == status) *name = one.name;
    }
    return *name ? 0 : 1;
}

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

// Here an event is a function that says whether the work before it is done.
int cuEventQuery(void* event) { return reinterpret_cast<int (*)()>(event)(); }

int cuDeviceGetUuid_v2(void* uuid, int device) { return cuDeviceGetUuid(uuid, device); }

}
