// Which queries read a key at all, and which keys a query reads at all, where operands say so row by row or pair by pair.
// What is dead may hold NaN: kernels load zeros for it. (What lengths and windows leave, Mask knows.)
#pragma once
#include <algorithm>
#include <cmath>

#include "core/problem.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace jax_flash2::cpu {

template <class Real>
class Alive {
 public:
  Status find(const Problem& p, Executor& executor) {
    const bool by_pair = p.removes_pairs() || p.extras.bias.present();  // of some batch rows at least
    if (!by_pair && !p.extras.key_spans.present()) return {};
    T_ = p.T, S_ = p.S;
    const int64_t key_heads = int64_t{p.B} * p.K;
    const double pairs = 1.0 * key_heads * p.group() * p.T * (by_pair ? p.S : 1);
    const int n_workers = workers(executor, key_heads, pairs);
    queries_ = allocate<uint8_t>(int64_t{p.B} * p.N * p.T), keys_ = allocate<uint8_t>(key_heads * p.S);
    const auto pending = allocate<int>(by_pair ? int64_t{n_workers} * p.S : 1);
    if (!queries_ || !keys_ || !pending) return {"out of host memory for the flags of what is read"};
    parallel_for(executor, n_workers, key_heads, [&](int64_t x, int worker) {
      const auto row = static_cast<int>(x / p.K), kv_head = static_cast<int>(x % p.K);
      if (p.extras.bias.present() || !p.mask(p.batch(row)).exact)
        find_by_pair(p, row, kv_head, pending.get() + int64_t{worker} * p.S);
      else
        copy_spans(p, row, kv_head);
    });
    return {};
  }

  // Of head n or key head counted over batches. Outside of Mask's live ranges, or without such operands, it says nothing.
  bool query(int64_t head, int i) const { return !queries_ || queries_[head * T_ + i]; }

  // Clears the rows [begin, end) of `packed` that belong to a dead key, or query.
  void clear_keys(int64_t key_head, int begin, int end, Real* packed, int64_t ld) const {
    if (keys_) clear(keys_.get() + key_head * S_, begin, end, packed, ld);
  }
  void clear_queries(int64_t head, int begin, int end, Real* packed, int64_t ld) const {
    if (queries_) clear(queries_.get() + head * T_, begin, end, packed, ld);
  }

 private:
  static void clear(const uint8_t* alive, int begin, int end, Real* packed, int64_t ld) {
    for (int x = begin; x < end; x++)
      if (!alive[x]) std::fill_n(packed + (x - begin) * ld, ld, Real(0));
  }

  void copy_spans(const Problem& p, int row, int kv_head) const {
    const Mask mask = p.mask(p.batch(row));
    const Live queries = mask.live_queries(), keys = mask.live_keys();
    uint8_t* const to = queries_.get() + (int64_t{row} * p.N + kv_head * p.group()) * p.T;
    for (int64_t x = 0; x < int64_t{p.group()} * p.T; x++) to[x] = queries.has(static_cast<int>(x % p.T));
    for (int j = 0; j < p.S; j++) keys_[(int64_t{row} * p.K + kv_head) * p.S + j] = keys.has(j);
  }

  // `pending` holds the keys for which no reader has been found yet: usually few after the first rows.
  void find_by_pair(const Problem& p, int row, int kv_head, int* pending) const {
    const Batch b = p.batch(row);
    const Mask mask = p.mask(b);
    uint8_t* const keys = keys_.get() + (int64_t{row} * p.K + kv_head) * p.S;
    std::fill_n(keys, p.S, uint8_t(0));
    int count = 0;
    for (int j = mask.live_keys().begin; j < mask.live_keys().end; j++) pending[count++] = j;
    for (int n = kv_head * p.group(); n < (kv_head + 1) * p.group(); n++) {
      const auto addend = p.template addend<Real>(b, n, mask);
      const auto kept = [&](int i, int j) { return addend.at(i, j) != static_cast<Real>(-INFINITY); };
      uint8_t* const queries = queries_.get() + (int64_t{row} * p.N + n) * p.T;
      std::fill_n(queries, p.T, uint8_t(0));
      for (int i = mask.live_queries().begin; i < mask.live_queries().end; i++) {
        const Range seen = mask.keys(i);
        for (int j = seen.begin; j < seen.end && !queries[i]; j++) queries[i] = kept(i, j);
        if (!queries[i]) continue;
        int still = 0;
        for (int x = 0; x < count; x++) {
          const int j = pending[x];
          if (seen.has(j) && kept(i, j))
            keys[j] = 1;
          else
            pending[still++] = j;
        }
        count = still;
      }
    }
  }

  int T_ = 0, S_ = 0;
  Buffer<uint8_t> queries_, keys_;  // [B, N, T] and [B, K, S]
};

}  // namespace jax_flash2::cpu
