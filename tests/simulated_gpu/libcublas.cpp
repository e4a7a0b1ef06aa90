// cuBLAS of simulated GPUs, as far as the package calls it by itself: products are handed to `cupy/_cublas.py`.

#include <cstddef>

namespace {

struct Handle { void* stream; void* workspace; };

double number(const void* at, int compute) { return compute == 70 ? *(const double*)at : *(const float*)at; }

}  // namespace

extern "C" {

int (*multiply)(void* stream, int op_a, int op_b, int m, int n, int k, void* a, int lead_a, void* b, int lead_b,
                void* c, int lead_c, int type) = nullptr;

int cublasCreate_v2(Handle** handle) { *handle = new Handle{nullptr, nullptr}; return 0; }

int cublasSetStream_v2(Handle* handle, void* stream) { *handle = Handle{stream, nullptr}; return 0; }

int cublasSetWorkspace_v2(Handle* handle, void* workspace, size_t size) {
    if (size < 4 << 20) return 7;  // CUBLAS_STATUS_INVALID_VALUE
    handle->workspace = workspace;
    return 0;
}

int cublasGemmEx(Handle* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int type_a,
                 int lead_a, const void* b, int type_b, int lead_b, const void* beta, void* c, int type_c, int lead_c,
                 int compute, int algorithm) {
    if (!handle->workspace) return 3;  // CUBLAS_STATUS_ALLOC_FAILED: in a graph it must not allocate
    const bool fits = type_a == type_b && type_b == type_c && (compute == 70) == (type_a == 1) && algorithm == -1;
    const bool leads = lead_a >= (op_a ? k : m) && lead_b >= (op_b ? n : k) && lead_c >= m;
    if (!fits || !leads || number(alpha, compute) != 1 || number(beta, compute) != 0) return 7;
    return multiply(handle->stream, op_a, op_b, m, n, k, (void*)a, lead_a, (void*)b, lead_b, c, lead_c, type_a);
}

}
