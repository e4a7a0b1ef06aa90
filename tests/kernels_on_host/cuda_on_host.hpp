// What kernels of CUDA C++ need in order to be compiled by the host's compiler: built-in variables, types, functions.

#include <array>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
static thread_local struct { uint3 thread, block; dim3 threads, blocks; } on_host_place;
#define threadIdx on_host_place.thread
#define blockIdx on_host_place.block
#define blockDim on_host_place.threads
#define gridDim on_host_place.blocks

#include "checked_memory.hpp"

struct alignas(16) ulonglong2 { unsigned long long x, y; };

// The 16-bit floats are stored so and computed with as floats, as on a GPU: read exactly, rounded to the nearest even.
namespace on_host {

inline uint32_t bits_of(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
inline float float_of(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }

inline float from_half(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | (fraction << 13));
    if (exponent > 0) return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
    const float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
}

inline uint16_t to_half(float value) {
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u;
    const float size = std::fabs(value);
    if (std::isnan(value)) return (uint16_t)(sign | 0x7e00u);
    if (size >= 65520.0f) return (uint16_t)(sign | 0x7c00u);
    if (size < 0x1p-14f) return (uint16_t)(sign | (uint32_t)std::nearbyint(size * 0x1p24f));
    const uint32_t all = bits_of(size) - (112u << 23), lost = all & 0x1fffu, kept = all >> 13;
    return (uint16_t)(sign | (kept + (lost > 0x1000u || (lost == 0x1000u && (kept & 1)))));
}

inline float from_bfloat(uint16_t bfloat) { return float_of((uint32_t)bfloat << 16); }

inline uint16_t to_bfloat(float value) {
    const uint32_t bits = bits_of(value);
    if (std::isnan(value)) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

template <float (*Read)(uint16_t), uint16_t (*Write)(float)>
struct Short {
    uint16_t bits;
    Short() = default;
    template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
    Short(Number value) : bits(Write((float)value)) {}
    operator float() const { return Read(bits); }
    Short& operator+=(Short other) { return *this = Short((float)*this + (float)other); }
};

struct View {
    char* first;
    ptrdiff_t shape[16], strides[16], ndim;
};

// An array of any strides, whose elements an elementwise kernel finds by their number in C order.
template <class Element>
struct Raw {
    const View& view;
    Element& operator[](ptrdiff_t index) const {
        ptrdiff_t offset = 0;
        for (ptrdiff_t axis = view.ndim - 1; axis > 0; --axis) {
            offset += index % view.shape[axis] * view.strides[axis];
            index /= view.shape[axis];
        }
        return *(Element*)(view.first + offset + (view.ndim ? index * view.strides[0] : 0));
    }
};
template <class Element> inline Raw<Element> raw(const View& view) { return {view}; }

// One operation for each element of a shape, all arrays but the raw ones having it, one after another in C order.
template <size_t Count, class Operation>
UNCHECKED inline void loop(
    Operation operation, const bool* is_raw, const View* views, const ptrdiff_t* shape, ptrdiff_t ndim
) {
    View own[Count];  // on the stack, which is not checked
    for (size_t k = 0; k < Count; ++k) own[k] = views[k];
    ptrdiff_t offsets[Count] = {}, index[16] = {}, size = 1;
    for (ptrdiff_t axis = 0; axis < ndim; ++axis) size *= shape[axis];
    for (ptrdiff_t i = 0; i < size; ++i) {
        begin_thread(i);
        operation(own, offsets, i);
        for (ptrdiff_t axis = ndim - 1; axis >= 0; --axis) {
            const bool is_last = ++index[axis] == shape[axis];
            for (size_t k = 0; k < Count; ++k)
                if (!is_raw[k]) offsets[k] += views[k].strides[axis] * (is_last ? 1 - shape[axis] : 1);
            if (!is_last) break;
            index[axis] = 0;
        }
    }
}

template <auto Kernel, class... Arguments, size_t... Index>
UNCHECKED inline void call(void (*)(Arguments...), void** arguments, std::index_sequence<Index...>) {
    Kernel(*(std::remove_cv_t<std::remove_reference_t<Arguments>>*)arguments[Index]...);
}

// All threads of all blocks, one after another.
template <auto Kernel, class... Arguments>
UNCHECKED inline void launch(
    void (*kernel)(Arguments...), const unsigned* grid, const unsigned* block, void** arguments
) {
    uint64_t number = 0;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
    for (threadIdx.z = 0; threadIdx.z < block[2]; ++threadIdx.z)
    for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)
    for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x) {
        begin_thread(number++);
        call<Kernel>(kernel, arguments, std::index_sequence_for<Arguments...>());
    }
}

// What a kernel takes as one argument: its bytes, those of what it points to, and whether it may write that.
struct Parameter { long size, word, is_written; };

template <class Argument>
inline Parameter parameter() {
    if constexpr (std::is_pointer_v<Argument>) {
        using Pointed = std::remove_pointer_t<Argument>;
        return {sizeof(Argument), sizeof(Pointed), !std::is_const_v<Pointed>};
    } else {
        return {sizeof(Argument), 0, 0};
    }
}

// The number of arguments that a kernel takes; they go to `found`.
template <class... Arguments>
inline long parameters(void (*)(Arguments...), Parameter* found) {
    const std::array<Parameter, sizeof...(Arguments)> all = {parameter<std::remove_cv_t<Arguments>>()...};
    for (size_t i = 0; i < all.size() && i < 64; ++i) found[i] = all[i];
    return (long)all.size();
}

// A launch; what must not be, if anything, as a text. `ranges`: the memory of the arguments.
template <auto Kernel, class... Arguments>
inline const char* checked_launch(
    void (*kernel)(Arguments...), const unsigned* grid, const unsigned* block, void** arguments, const Range* ranges,
    long count
) {
    return checked([=]() UNCHECKED { launch<Kernel>(kernel, grid, block, arguments); }, ranges, count);
}

template <size_t Count, class Operation>
inline const char* checked_loop(
    Operation operation, const bool* is_raw, const View* views, const ptrdiff_t* shape, ptrdiff_t ndim,
    const Range* ranges, long count
) {
    return checked([=]() UNCHECKED { loop<Count>(operation, is_raw, views, shape, ndim); }, ranges, count);
}

// The memory that a structure points to, where it has arrays of these names: a kernel reads `length[i]` elements from
// `source[i]` on, and writes as many from `target[i]` on.
template <class Argument>
inline auto ranges_of(const Argument& table, Range* found, int)
    -> decltype(*table.source[0], *table.target[0], table.length[0], 0L) {
    long count = 0;
    for (size_t i = 0; i < std::extent_v<decltype(Argument::source)>; ++i)
        if (const size_t size = table.length[i] * sizeof(*table.source[i])) {
            found[count++] = {(const char*)table.source[i], size, sizeof(*table.source[i]), 0, "a source"};
            found[count++] = {(const char*)table.target[i], size, sizeof(*table.target[i]), 1, "a target"};
        }
    return count;
}
template <class Argument> inline long ranges_of(const Argument&, Range*, long) { return 0; }

// Likewise of all arguments of a kernel.
template <class... Arguments>
inline long ranges_in(void (*)(Arguments...), void** arguments, Range* found) {
    long count = 0, index = 0;
    ((count += ranges_of(*(const std::remove_cv_t<Arguments>*)arguments[index++], found + count, 0)), ...);
    return count;
}

}  // namespace on_host

using float16 = on_host::Short<on_host::from_half, on_host::to_half>;
using bfloat16 = on_host::Short<on_host::from_bfloat, on_host::to_bfloat>;
template <class Real> using complex = std::complex<Real>;

using std::abs; using std::isnan; using std::sqrt;

template <class Number> UNCHECKED inline Number atomicAdd(Number* place, Number value) {  // threads run one by one
    on_host::access(place, sizeof(Number), on_host::ADDED, alignof(Number));
    const Number old = *place;
    *place = old + value;
    return old;
}
