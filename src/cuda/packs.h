// Packed sequences row by row, in one kernel: what jax_flash2/_packing.py says in jax.numpy.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"

namespace jax_flash2::cuda {

inline constexpr int kMostSequences = 1023;  // of a pack

// The sequences of a pack as they were given: any numbers. Null: as the comment says.
struct Packs {
  const int32_t* query_starts;  // [packs, sequences + 1], the last one being the end
  const int32_t* key_starts;    // the same of keys; null: query_starts
  const int32_t* query_used;    // [packs, sequences], how much of each is used; null: all
  const int32_t* key_used;
  int64_t packs;
  int sequences, queries, keys;  // sequences: 1 to kMostSequences
  int before, after;             // how far a query sees from where it stands
  bool bottom_right;             // the last query of a sequence stands at its last key
};

// What core/spec.h calls key_spans [packs, queries, 2], query_spans [packs, keys, 2], span_flags [packs] and positions
// [packs, queries].
struct PackedRows {
  Span *key_spans, *query_spans;
  int32_t *span_flags, *positions;
};

Status find_rows(const Packs& packs, const PackedRows& rows, cudaStream_t stream);

}  // namespace jax_flash2::cuda
