// The operands of a batch row and a query head, as kernels ask them of the pairs that a lane holds.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/tile/columns.cuh"

namespace jax_flash2::cuda {

// Pairs that one lane holds of a row of C fragments, in two lines: query i and key j, and of the same query other keys, or of
// the same key other queries, as tile/columns.cuh says; the second line is 8 further on in the other direction. Which of a
// line's pairs are meant is said by bits.
template <bool kAlongKeys, int kPairs>
struct Lines {
  static_assert(kPairs <= 32);
  int i, j;

  __device__ __forceinline__ int query(int h, int x) const { return i + (kAlongKeys ? 8 * h : tile::column_step(x)); }
  __device__ __forceinline__ int key(int h, int x) const { return j + (kAlongKeys ? tile::column_step(x) : 8 * h); }
  // Calls act(h, x) for all pairs.
  template <class Act>
  static __device__ __forceinline__ void all(const Act& act) {
#pragma unroll
    for (int x = 0; x < 2 * kPairs; x++) act(x / kPairs, x % kPairs);
  }
  // kPart of the pairs, from the x0-th on, and of the bits of all of them theirs.
  template <int kPart>
  __device__ __forceinline__ Lines<kAlongKeys, kPart> part(int x0) const {
    return {query(0, kAlongKeys ? 0 : x0), key(0, kAlongKeys ? x0 : 0)};
  }
  static constexpr uint32_t kAll = ~0u >> (32 - kPairs);
  static __device__ __forceinline__ uint32_t of(uint32_t pairs, int x0) { return pairs >> x0 & kAll; }
  // Calls ask(the same part, bits of its pairs), and takes from `pairs` what that takes from the bits; then use(h, x) for all
  // pairs of the part.
  template <int kPart, class Ask, class Use>
  __device__ __forceinline__ void with_part(int x0, uint32_t (&pairs)[2], const Ask& ask, const Use& use) const {
    const auto part = this->part<kPart>(x0);
    const uint32_t named[2] = {part.of(pairs[0], x0), part.of(pairs[1], x0)};
    uint32_t left[2] = {named[0], named[1]};
    ask(part, left);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      pairs[h] &= ~((named[h] & ~left[h]) << x0);
#pragma unroll
      for (int x = 0; x < kPart; x++) use(h, x);
    }
  }
  static __device__ __forceinline__ bool are_whole(const uint32_t (&pairs)[2]) {
    return (pairs[0] & pairs[1] & kAll) == kAll;
  }
  // Calls body(h, x, distance) for all pairs, of which the first of each line have the signed distances `firsts`. They are
  // float32, exact below 2^24.
  template <class Body>
  static __device__ __forceinline__ void with_distances_from(const int (&firsts)[2], const Body& body) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const auto first = static_cast<float>(firsts[h]);
#pragma unroll
      for (int x = 0; x < kPairs; x++) body(h, x, fabsf(first + (kAlongKeys ? -1.0f : 1.0f) * tile::column_step(x)));
    }
  }
};

// The elements of an array [T, S] that lines have, and zeros of pairs that `pairs` does not name, which may lie outside of
// it. Of lines that are named whole neighbours are read together, where they lie so.
template <bool kAlongKeys, int kPairs, class T>
__device__ __forceinline__ void gather(const T* array, int64_t row, int64_t col, const Lines<kAlongKeys, kPairs>& lines,
                                       const uint32_t (&pairs)[2], T (&to)[2][kPairs]) {
  struct alignas(2 * sizeof(T)) Two {
    T x[2];
  };
  const T* const from = array + lines.i * row + lines.j * col;
  const int64_t step = kAlongKeys ? col : row, next = 8 * (kAlongKeys ? row : col);
  const auto is_aligned = [](const T* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(Two) == 0; };
  // The last follows from the one before, but without it ptxas spills more.
  if (kAlongKeys && step == 1 && lines.are_whole(pairs) && is_aligned(from) && is_aligned(from + next)) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 0; x < kPairs; x += 2) {
        const Two two = *reinterpret_cast<const Two*>(from + h * next + tile::column_step(x));
        to[h][x] = two.x[0], to[h][x + 1] = two.x[1];
      }
    }
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int x = 0; x < kPairs; x++) {
      to[h][x] = pairs[h] >> x & 1 ? from[h * next + tile::column_step(x) * step] : T{};
    }
  }
}

// Takes from `pairs` what a mask removes whose rows are bytes of 0 and 1, as many as there are keys, a multiple of 4, and
// begin at one. A quad of lanes holds the same queries of its warp's C fragments, whose first key is a multiple of 16, and
// each lane reads 16 keys for all four.
template <int kPairs>
__device__ __forceinline__ void keep_of_quad(const uint8_t* mask, int queries, int64_t keys,
                                             const Lines<true, kPairs>& lines, uint32_t (&pairs)[2]) {
  static_assert(kPairs % 16 == 0);
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int x0 = 0; x0 < kPairs; x0 += 16) {
    const int64_t key = lines.j - lane * 2 + tile::column_step(x0) + lane * 16;
    uint32_t words[2][4] = {};
#pragma unroll
    for (int x = 0; x < 8; x++) {
      const int query = lines.query(x / 4, 0), word = x % 4;
      const auto* const row = reinterpret_cast<const uint32_t*>(mask + key + query * keys);
      if (query < queries && key + 4 * word < keys) words[x / 4][word] = row[word];
    }
    uint32_t own = 0;  // a bit a byte, the first one's the lowest; 16 of each query
#pragma unroll
    for (int x = 0; x < 8; x++) own |= (words[x / 4][x % 4] * 0x01020408 >> 24) << 4 * x;
    uint32_t kept = 0;
#pragma unroll
    for (int other = 0; other < 4; other++) {  // of whose keys two and two are this lane's, 8 keys apart
      const uint32_t two = __shfl_sync(~0u, own, other, 4) >> lane * 2;
      kept |= ((two & 0x00030003) | (two >> 6 & 0x000c000c)) << 4 * other;
    }
    pairs[0] &= ~(0xffffu << x0) | (kept & 0xffff) << x0, pairs[1] &= ~(0xffffu << x0) | kept >> 16 << x0;
  }
}

// Zeroes what dropout drops of two neighbouring C fragments; query i and key j are the lane's first. What it keeps is yet
// to be multiplied by its scale.
__device__ __forceinline__ void drop(const Dropout<float>& dropout, int i, int j, float (&left)[4], float (&right)[4]) {
  Philox words[2];
  dropout.words(i, j, 0, 1, words);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    left[e] = dropout.keeps(words[e].x) ? left[e] : 0.0f, right[e] = dropout.keeps(words[e].y) ? right[e] : 0.0f;
    left[e + 2] = dropout.keeps(words[e].z) ? left[e + 2] : 0.0f;
    right[e + 2] = dropout.keeps(words[e].w) ? right[e + 2] : 0.0f;
  }
}

// What the operands of a batch row and a head do to a score, a bit each.
struct Acts {
  uint32_t bits;

  static constexpr uint32_t kMask = 1, kIds = 2, kBias = 4, kSlope = 8, kMaskInWords = 16;
  __device__ __forceinline__ bool mask() const { return bits & kMask; }
  __device__ __forceinline__ bool mask_in_words() const { return bits & kMaskInWords; }  // for keep_of_quad
  __device__ __forceinline__ bool ids() const { return bits & kIds; }
  __device__ __forceinline__ bool bias() const { return bits & kBias; }
  __device__ __forceinline__ bool slope() const { return bits & kSlope; }
  __device__ __forceinline__ bool ask() const { return bits & (kMask | kIds | kBias); }  // what Operands::ask does
  __device__ __forceinline__ bool add() const { return bits & kSlope; }                  // and, after it, Operands::add
};

// What a forward keeps in registers of a lane's two queries: each look into shared memory holds a warp up.
struct Held {
  Acts acts;
  float slope = 0;
  int positions[2] = {};  // among the keys, for ALiBi
};

// Lies in shared memory where registers are full. What a call of these asks first is `acts`, of which a caller that asks
// often keeps a copy.
struct Operands {
  Mask mask;
  Addend<float> addend;
  Dropout<float> dropout;
  Acts acts;

  // Those that a body knows of.
  template <Body kBody>
  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    if constexpr (kBody == Body::kGeneral) dropout = p.dropout<float>(b, n);
    if constexpr (kBody >= Body::kRemoving) addend = p.addend<float>(b, n, mask), note_acts();
  }
  __device__ __forceinline__ void note_acts() {
    const auto bit = [](bool does, uint32_t bit) { return does ? bit : 0u; };
    acts.bits = bit(addend.mask, Acts::kMask) | bit(addend.query_ids, Acts::kIds) | bit(addend.bias, Acts::kBias) |
                bit(addend.sloped, Acts::kSlope);
    const bool aligned = reinterpret_cast<uintptr_t>(addend.mask) % 4 == 0 && addend.mask_row % 4 == 0;
    if (acts.mask() && aligned && addend.mask_row > 0 && addend.mask_col == 1) acts.bits |= Acts::kMaskInWords;
  }

  // What needs no scores. Takes from `pairs` those that operands remove; a bias sets what it adds to the others. One operand
  // after the other, so that each is asked for once, and its elements together.
  template <bool kAlongKeys, int kPairs>
  __device__ __forceinline__ void ask(Acts acts, const Lines<kAlongKeys, kPairs>& lines, uint32_t (&pairs)[2],
                                      float (&bias)[2][kPairs]) const {
    ask_who(acts, lines, pairs);
    if (acts.bias()) ask_bias(lines, pairs, bias);
  }
  // The part of a bias.
  template <bool kAlongKeys, int kPairs>
  __device__ __forceinline__ void ask_bias(const Lines<kAlongKeys, kPairs>& lines, uint32_t (&pairs)[2],
                                           float (&bias)[2][kPairs]) const {
    addend.with_bias_dtype([&]<class Element>() {
      Element elements[2][kPairs];
      gather(static_cast<const Element*>(addend.bias), addend.bias_row, addend.bias_col, lines, pairs, elements);
#pragma unroll
      for (int x = 0; x < 2 * kPairs; x++) {
        bias[x / kPairs][x % kPairs] = Addend<float>::number(elements[x / kPairs][x % kPairs]);
      }
    });
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float least = bias[h][0];
#pragma unroll
      for (int x = 1; x < kPairs; x++) least = fminf(least, bias[h][x]);
      if (least == -INFINITY) {
#pragma unroll
        for (int x = 0; x < kPairs; x++) pairs[h] &= ~(uint32_t(bias[h][x] == -INFINITY) << x);
      }
    }
  }
  // The part of mask and ids.
  template <bool kAlongKeys, int kPairs>
  __device__ __forceinline__ void ask_who(Acts acts, const Lines<kAlongKeys, kPairs>& lines,
                                          uint32_t (&pairs)[2]) const {
    constexpr bool kFew =
        kAlongKeys && kPairs > 8;  // what there are registers for in forwards that ask for all at once
    bool ask_mask = acts.mask();
    if constexpr (kAlongKeys && kPairs % 16 == 0) {
      if (acts.mask_in_words()) keep_of_quad(addend.mask, mask.q_len, addend.mask_row, lines, pairs), ask_mask = false;
    }
    if (ask_mask) {
      constexpr int kPart = min_(kPairs, kFew ? 2 : 8);
#pragma unroll
      for (int x0 = 0; x0 < kPairs; x0 += kPart) {
        const auto part = lines.template part<kPart>(x0);
        const uint32_t named[2] = {part.of(pairs[0], x0), part.of(pairs[1], x0)};
        uint8_t kept[2][kPart];
        gather(addend.mask, addend.mask_row, addend.mask_col, part, named, kept);
        part.all([&](int h, int x) { pairs[h] &= ~(uint32_t(kept[h][x] == 0) << (x0 + x)); });
      }
    }
    if (acts.ids()) {
      int32_t own[2];
      const uint32_t some = pairs[0] | pairs[1];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        own[h] = !pairs[h] ? -1 : kAlongKeys ? addend.query_ids[lines.query(h, 0)] : addend.key_ids[lines.key(h, 0)];
      }
      const int32_t* const others = kAlongKeys ? addend.key_ids + lines.j : addend.query_ids + lines.i;
      constexpr int kPart = kFew ? 8 : kPairs;
      static_assert(kPairs % kPart == 0);
#pragma unroll
      for (int x0 = 0; x0 < kPairs; x0 += kPart) {
        int32_t ids[kPart];
#pragma unroll
        for (int x = 0; x < kPart; x++) ids[x] = some >> (x0 + x) & 1 ? others[tile::column_step(x0 + x)] : -1;
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
          for (int x = 0; x < kPart; x++) pairs[h] &= ~(uint32_t(ids[x] != own[h]) << (x0 + x));
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (own[h] < 0) pairs[h] = 0;
      }
    }
  }

  // Of queries i and i + 8; `queries` exist.
  __device__ __forceinline__ Held hold(int i, int queries) const {
    Held held{acts};
    if (held.acts.slope()) {
      held.slope = addend.slope;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int at = i + 8 * h;
        held.positions[h] = !addend.positions ? at + addend.off : at < queries ? addend.positions[at] : 0;
      }
    }
    return held;
  }

  // Adds to score(h, x) what operands do. kMayRemove: a bias too, for which it asks kPart pairs at a time, and takes from
  // `pairs` those that it removes; else there is none, or `ask` has set it.
  template <bool kMayRemove, int kPart, int kPairs, class Score>
  __device__ __forceinline__ void add(const Held& held, const Lines<true, kPairs>& lines, uint32_t (&pairs)[2],
                                      const Score& score) const {
    if (kMayRemove && held.acts.bias()) {
#pragma unroll
      for (int x0 = 0; x0 < kPairs; x0 += kPart) {
        float bias[2][kPart];
        lines.template with_part<kPart>(
            x0, pairs, [&](const auto& part, uint32_t (&left)[2]) { ask_bias(part, left, bias); },
            [&](int h, int x) { score(h, x0 + x) += bias[h][x]; });
      }
    }
    if (held.acts.slope()) {
      lines.with_distances_from({held.positions[0] - lines.j, held.positions[1] - lines.j},
                                [&](int h, int x, float distance) { score(h, x) -= held.slope * distance; });
    }
  }

  // Adds to score(h, x) what ALiBi does, of the pairs that `pairs` names: to others any number.
  template <int kPairs, class Score>
  __device__ __forceinline__ void add_slope(const Lines<false, kPairs>& lines, const uint32_t (&pairs)[2],
                                            const Score& score) const {
    const float slope = addend.slope;
    with_distances(lines, pairs, [&](int h, int x, float distance) { score(h, x) -= slope * distance; });
  }
  // Calls body(h, x, how far a pair's query stands from its key).
  template <int kPairs, class Body>
  __device__ __forceinline__ void with_distances(const Lines<false, kPairs>& lines, const uint32_t (&pairs)[2],
                                                 const Body& body) const {
    const int32_t* const positions = addend.positions;
    if (positions) {
      const uint32_t some = pairs[0] | pairs[1];
#pragma unroll
      for (int x = 0; x < kPairs; x++) {
        const int at = (some >> x & 1 ? positions[lines.query(0, x)] : 0) - lines.j;
#pragma unroll
        for (int h = 0; h < 2; h++) body(h, x, fabsf(static_cast<float>(at - 8 * h)));
      }
      return;
    }
    const int first = lines.i + addend.off - lines.j;
    lines.with_distances_from({first, first - 8}, body);
  }

  // `ask`, called, not inlined, where registers are full: pairs and bias lie in local memory. A few pairs at a time; a bias
  // that is not there is 0.
  template <bool kAlongKeys, int kPairs>
  __device__ __noinline__ void call_ask(Lines<kAlongKeys, kPairs> lines, uint32_t (&pairs)[2],
                                        float (&bias)[2][kPairs]) const {
    const Acts acts = this->acts;
    constexpr int kPart = min_(kPairs, 8);
#pragma unroll 1
    for (int x0 = 0; x0 < kPairs; x0 += kPart) {
      float own[2][kPart] = {};
      lines.template with_part<kPart>(
          x0, pairs, [&](const auto& part, uint32_t (&left)[2]) { ask(acts, part, left, own); },
          [&](int h, int x) { bias[h][x0 + x] = own[h][x]; });
    }
  }

  // What dropout keeps of lines along queries. Query and key have bit 3 clear.
  template <int kPairs>
  __device__ __forceinline__ void keep(const Lines<false, kPairs>& lines, uint32_t (&pairs)[2]) const {
    pairs[0] = pairs[1] = ~0u;
    if (dropout.present()) {
      const uint64_t both = call_keep<kPairs>(lines.i, lines.j);
      pairs[0] = uint32_t(both), pairs[1] = uint32_t(both >> 32);
    }
  }

 private:
  // Called, not inlined: its rounds at each of a tile's pairs take minutes to compile. The second line is in the upper half.
  template <int kPairs>
  __device__ __noinline__ uint64_t call_keep(int i, int j) const {
    const Dropout<float> dropout = this->dropout;
    uint32_t pairs[2] = {};
#pragma unroll 1
    for (int x = 0; x < kPairs; x += 4) {  // pairs x and x + 1, and x + 2 and x + 3, which are 8 queries further on
      Philox words[2];
      dropout.words(i + tile::column_step(x), j, 1, 0, words);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const uint32_t kept = dropout.kept(words[e]);
#pragma unroll
        for (int h = 0; h < 2; h++) pairs[h] |= ((kept >> h & 1) | (kept >> (h + 2) & 1) << 2) << (x + e);
      }
    }
    return uint64_t{pairs[1]} << 32 | pairs[0];
  }
};

}  // namespace jax_flash2::cuda
