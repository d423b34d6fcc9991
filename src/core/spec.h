// What a caller may ask for: the two append-only lists. Knows names, types and neutral values; no meaning, no memory.
//
// A program exported by an older version carries fewer fields and operands: a missing one takes its neutral value, an
// unknown one is an error. So entries are only ever added at the end, and never renamed.
#pragma once
#include <cstdint>

// Always inlined on the host too: the CPU kernels compile the laws once per instruction set, and a shared out-of-line copy
// could hold instructions that the machine lacks.
#if defined(__CUDACC__)
#define JAX_FLASH2_HD __host__ __device__ __forceinline__
#else
#define JAX_FLASH2_HD inline __attribute__((always_inline))
#endif

namespace jax_flash2 {

enum class DType : uint8_t { kF16, kBF16, kF32, kF64, kS32 };

inline constexpr int64_t kOpen = -1;  // a window side without a bound

// Scalar options: X(type, name, neutral value).
//   scale         multiplies q.k; the operand `scale` takes its place when present
//   softcap       s -> softcap * tanh(s / softcap); 0: none
//   window_left   a query at position p reads keys >= p - window_left; kOpen: all. Positions are key positions: p = i + off
//   window_right  ... keys <= p + window_right; kOpen: all. A causal mask is window_right = 0
//   bottom_right  off = key length - query length of the batch row; false: off = 0
//   deterministic the backward is bitwise repeatable
#define JAX_FLASH2_SPEC_FIELDS(X) \
  X(double, scale, 1.0)           \
  X(double, softcap, 0.0)         \
  X(int64_t, window_left, kOpen)  \
  X(int64_t, window_right, kOpen) \
  X(bool, bottom_right, false)    \
  X(bool, deterministic, false)

struct Spec {
#define JAX_FLASH2_FIELD(type, name, neutral) type name = neutral;
  JAX_FLASH2_SPEC_FIELDS(JAX_FLASH2_FIELD)
#undef JAX_FLASH2_FIELD
};

// Optional operands: X(name, dtype, axes, slot). `axes` are the letters that follow the batch axes ("" for one value a
// batch row); every axis may have size 1 and is then shared. In the backward each has a gradient slot: a float32 array
// [*B, slot axes], or one of size zero where the operand has no gradient (slot "-") or is absent.
//   scale        in place of Spec::scale. Slot: each query row's share of d loss / d scale
//   query_lens   queries at or past it are padding: they read nothing
//   key_lens     keys at or past it are padding: nobody reads them
#define JAX_FLASH2_EXTRAS(X)   \
  X(scale, kF32, "", "NT")     \
  X(query_lens, kS32, "", "-") \
  X(key_lens, kS32, "", "-")

}  // namespace jax_flash2
