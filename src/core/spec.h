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

// kReal: what sums are kept in, float64 where q is and else float32. kFloat: any floating-point type, the array's own.
enum class DType : uint8_t { kF16, kBF16, kF32, kF64, kS32, kU32, kBool, kReal, kFloat };

inline constexpr int64_t kOpen = -1;  // a window side without a bound

// Scalar options: X(type, name, neutral value).
//   scale         multiplies q.k; the operand `scale` takes its place when present
//   softcap       s -> softcap * tanh(s / softcap); 0: none
//   window_left   a query at position p reads keys >= p - window_left; kOpen: all. Positions are key positions: p = i + off
//   window_right  ... keys <= p + window_right; kOpen: all. A causal mask is window_right = 0
//   bottom_right  off = key length - query length of the batch row; false: off = 0
//   deterministic the backward is bitwise repeatable
//   dropout_rate  the share of probabilities that are set to zero; the others are divided by 1 - dropout_rate
//   longest_span  no span is longer, as far as is known; kOpen: nobody knows. A hint to schedules, which changes no result
#define JAX_FLASH2_SPEC_FIELDS(X) \
  X(double, scale, 1.0)           \
  X(double, softcap, 0.0)         \
  X(int64_t, window_left, kOpen)  \
  X(int64_t, window_right, kOpen) \
  X(bool, bottom_right, false)    \
  X(bool, deterministic, false)   \
  X(double, dropout_rate, 0.0)    \
  X(int64_t, longest_span, kOpen)

struct Spec {
#define JAX_FLASH2_FIELD(type, name, neutral) type name = neutral;
  JAX_FLASH2_SPEC_FIELDS(JAX_FLASH2_FIELD)
#undef JAX_FLASH2_FIELD
};

// Optional operands: X(name, dtype, axes, slot). `axes` are the letters that follow the batch axes ("" for one value a
// batch row; W: two words); every axis may have size 1 and is then shared. In the backward each has a gradient slot: an
// array [*B, slot axes], one of the operand's own shape (slot "="), or one of size zero where the operand has no gradient
// (slot "-") or is absent. Slots are float32; those of kReal and kFloat operands are kReal.
//   scale        in place of Spec::scale. Slot: each query row's share of d loss / d scale
//   query_lens   queries at or past it are padding: they read nothing
//   key_lens     keys at or past it are padding: nobody reads them
//   mask         one byte a pair, 0 or 1: 0 removes it
//   query_ids    a query reads the keys of its own id only; a negative id is padding: it reads nothing,
//   key_ids      and nobody reads it
//   bias         added to the score; -inf removes the pair
//   alibi_slopes times the distance of i + off and j, subtracted from the score. Slot: each query row's share
//   sinks        the score of one more key, which has no value. Slot: each query row's share
//   seeds        of Philox, for dropout
//   key_spans    row by row, in place of windows and lengths: a query reads keys in [begin, end) only. Both ends never
//                decrease from row to row; a query that reads nothing all the same has ~begin for begin
//   query_spans  the same of the other side: a key's readers. The two agree on every pair but those that mask or ids remove
//   span_flags   1: mask and ids remove no pair that the spans leave; 2: no row and no key is dead; 3: both
//   positions    where a query stands among the keys, in place of i + off, for ALiBi
#define JAX_FLASH2_EXTRAS(X)        \
  X(scale, kF32, "", "NT")          \
  X(query_lens, kS32, "", "-")      \
  X(key_lens, kS32, "", "-")        \
  X(mask, kBool, "NTS", "-")        \
  X(query_ids, kS32, "T", "-")      \
  X(key_ids, kS32, "S", "-")        \
  X(bias, kFloat, "NTS", "=")       \
  X(alibi_slopes, kReal, "N", "NT") \
  X(sinks, kReal, "N", "NT")        \
  X(seeds, kU32, "NW", "-")         \
  X(key_spans, kS32, "TW", "-")     \
  X(query_spans, kS32, "SW", "-")   \
  X(span_flags, kS32, "", "-")      \
  X(positions, kS32, "T", "-")

}  // namespace jax_flash2
