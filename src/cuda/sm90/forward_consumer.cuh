// A warpgroup of the forward that computes 64 rows, FlashAttention-3's way: a step issues the scores of one key tile, then
// the output's share of the tile before, whose powers are at hand, and works out the softmax of the first while the second
// runs. Asks Mask, Score and Operands what a score is; of features it knows dropout, of powers, and sinks, which end a row.
#pragma once
#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/output.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/tile/columns.cuh"
#include "cuda/tile/operand.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, Body kBody>
__device__ __forceinline__ void consume(const Problem& p, int pack_log2, uint32_t shared, int consumer) {
  constexpr bool kPlain = kBody != Body::kGeneral, kSpans = kBody != Body::kPlain;
  constexpr ForwardTile kTile = Config::kTile;
  constexpr int kKeys = kTile.keys, kHeadDim = kTile.head_dim, kValueDim = kTile.value_dim;
  constexpr int kCols8 = kKeys / 8, kOut8 = kValueDim / 8;
  constexpr bool kPingPong = kTile.ping_pong;
  constexpr int kTurnBarrier = 1, kConsumerBarrier = kTurnBarrier + kTile.consumers;  // named, one a consumer each
  using Shared = ForwardShared<Config>;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  using ptx::Major;
  typename Shared::WorkRing works{shared + Shared::kWorkRing};
  typename Shared::QRing q_ring{};
  typename Shared::KRing k_ring{shared + Shared::kKRing};
  typename Shared::VRing v_ring{shared + Shared::kVRing};
  const tile::Operand<KTile, Major::kK> k_operand(shared + Shared::kK);
  const tile::Operand<VTile, Major::kMN> v_operand(shared + Shared::kV);

  const int thread = threadIdx.x % 128, lane = thread % 32;
  const auto release = [&](auto& ring) {
    if (lane == 0) ring.release();
    ring.next();
  };
  const auto my_turn = [&] {
    if constexpr (kPingPong) ptx::bar_sync(kTurnBarrier + consumer, 256);
  };
  const auto next_turn = [&] {
    if constexpr (kPingPong) ptx::bar_arrive(kTurnBarrier + 1 - consumer, 256);
  };
  static_assert(!kPingPong || kTile.consumers == 2);
  if (kPingPong && consumer == 1) next_turn();

  // Tiles of keys that other consumers need.
  const auto skip = [&](int count, int turns) {
#pragma unroll 1
    for (; count > 0; count--) {
      if (turns-- > 0) my_turn(), next_turn();
      k_ring.wait_full(), release(k_ring);
      v_ring.wait_full(), release(v_ring);
    }
  };

  float out[kOut8][4] = {}, s[kCols8][4];
  uint32_t powers[kCols8 / 2][4];  // of the tile before, as fragments of A
  RowSoftmax<!kPlain> softmax;

#pragma unroll 1
  for (;;) {
    works.wait_full();
    const uint32_t work = shared + Shared::kWork + works.stage * Shared::kWorkBytes;
    const uint4 start = ptx::ld_shared_v4(work);  // Work's first members
    if (int(start.x) == Work::kEnd) return;
    if (int(start.x) == Work::kRoundDone) {
      __syncwarp();  // marks of all lanes
      if (lane == 0) ptx::mbarrier_arrive(shared + Shared::kRoundDone);
      release(works);
      continue;
    }
    // Worked out anew each time: what waits for the next tile may do so in local memory, which lies in L2.
    const int row = int(start.y) + consumer * 64 + thread / 32 * 16 + lane / 4;  // this lane's; another is 8 further on
    const tile::Operand<QTile, Major::kK> q_operand(shared + Shared::q(consumer));
    q_ring.barriers = shared + Shared::q_ring(consumer);
    const Mask mask = Mask::make(p.spec, int(start.z), int(start.w));
    const auto query = [&](int h) { return (row + 8 * h) >> pack_log2; };
    // Of all bodies but the plain one. But for what is held they are read where they are needed, for lack of registers.
    const Operands& operands = *Shared::operands(shared, works.stage);
    const Held held = kPlain ? Held{} : operands.hold(query(0), p.T);
    const Live live_of_mask = mask.live_keys();
    const auto live_keys = [&] { return kSpans ? operands.mask.live_keys() : live_of_mask; };
    const auto ask_spans = [&](Span(&spans)[2]) {
      if constexpr (kSpans) {
#pragma unroll
        for (int h = 0; h < 2; h++) spans[h] = operands.mask.span_of_query(query(h));
      }
    };
    Span first_spans[2];
    ask_spans(first_spans);  // they may be far away
    const auto head = [&] { return int(ptx::ld_shared_b32(work + offsetof(Work, q_head))); };
    const Tiles tiles = read_tiles(work + sizeof(Work) + consumer * sizeof(Tiles));
    const auto finish = [&](RowEnd(&ends)[2]) {
      if (kBody == Body::kGeneral && operands.dropout.present()) {
        ends[0].inverse *= operands.dropout.scale, ends[1].inverse *= operands.dropout.scale;
      }
      if (p.extras.sinks.present()) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int n = (head() << pack_log2) + (row + 8 * h - (query(h) << pack_log2));
          if (query(h) < mask.q_len) ends[h] = with_sink(ends[h], p.sink<float>(read_batch(work), n));
        }
      }
      // Rows that see nothing: 0, and not 0 times a NaN that other rows may read.
      if (__any_sync(~0u, ends[0].inverse == 0 || ends[1].inverse == 0)) {
#pragma unroll
        for (int x = 0; x < kOut8 * 4; x++) out[x / 4][x % 4] = ends[x / 2 % 2].inverse == 0 ? 0 : out[x / 4][x % 4];
      }
      const uint4 offsets = ptx::ld_shared_v4(work + offsetof(Work, out));
      __syncwarp();
      release(works);
      write_rows<Element>(p, int64_t(uint64_t(offsets.y) << 32 | offsets.x),
                          int64_t(uint64_t(offsets.w) << 32 | offsets.z), pack_log2, row, out, ends);
    };
    if (tiles.begin >= tiles.end) {
      const Tiles all = read_tiles(work + offsetof(Work, tiles));
      skip(all.end - all.begin, all.end - all.begin - 1);
      RowEnd ends[2] = {{0, -INFINITY}, {0, -INFINITY}};
      finish(ends);
      continue;
    }
    const int skipped = read_tiles(work + offsetof(Work, tiles)).end - tiles.end;
    skip(skipped, skipped);

    Score<float> score{};
    if constexpr (kPlain) {
      score.scale = float(p.spec.scale);
    } else {
      score = p.score<float>(read_batch(work), head());
    }
    bool live[2] = {};  // whether this lane's rows see a key, where spans say so
    const auto is_live = [&](int h) {
      if constexpr (kSpans) return live[h];
      const Range keys = mask.keys(query(h));
      return keys.begin < keys.end;
    };
    int summed = 0;  // whether out holds anything of this tile

    const auto issue_scores = [&] {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kKeys>::template ss<Major::kK>(s, q_operand.step(k, q_ring.stage * QTile::kBytes),
                                                           k_operand.step(k, k_ring.stage * KTile::kBytes), k > 0);
      }
      ptx::wgmma_commit_group();
    };
    const auto issue_output = [&] {
#pragma unroll
      for (int k = 0; k < kKeys / 16; k++) {
        ptx::Wgmma<Element, kValueDim>::template rs<Major::kMN>(
            out, powers[k], v_operand.step(k, v_ring.stage * VTile::kBytes), k > 0 || summed);
      }
      ptx::wgmma_commit_group();
      summed = 1;
    };
    const auto rescale = [&](const float (&factor)[2]) {
      ptx::wgmma_wait_group<0>();
      ptx::pin(out);
#pragma unroll
      for (int x = 0; x < kOut8 * 4; x++) out[x / 4][x % 4] *= factor[x / 2 % 2];
      ptx::pin(out);
    };
    constexpr int kPairs = min_(kCols8 * 2, 32), kWords = kCols8 * 2 / kPairs;
    using Pairs = Lines<true, kPairs>;
    using Seen = uint32_t[kWords][2];  // a lane's pairs of a masked tile, as far as is known before their scores are
    const auto first_column = [&](int kv_tile) { return kv_tile * kKeys + lane % 4 * 2; };
    const auto lines = [&](int kv_tile, int word) {
      return Pairs{query(0), first_column(kv_tile) + tile::column_step(word * kPairs)};
    };
    const auto look = [&]<bool kAsks>(int kv_tile, const Span(&spans)[2], Seen& seen) {
      const int column0 = first_column(kv_tile);
      Range keys[2];
#pragma unroll
      for (int h = 0; h < 2; h++) keys[h] = kSpans ? spans[h].range() : mask.keys(query(h));
#pragma unroll
      for (int h = 0; h < 2; h++) live[h] = keys[h].begin < keys[h].end;
#pragma unroll
      for (int word = 0; word < kWords; word++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          seen[word][h] = tile::column_bits({keys[h].begin - column0, keys[h].end - column0}, word * kPairs);
        }
        if constexpr (kAsks) operands.ask_who(kPlain ? operands.acts : held.acts, lines(kv_tile, word), seen[word]);
      }
    };
    // The scores of a tile, as the tensor core left them, to their powers.
    const auto weigh = [&]<bool kMasked, bool kFirst = false>(int kv_tile, Seen& seen) {
      if constexpr (!kPlain) apply(score, s);
#pragma unroll
      for (int word = 0; word < kWords; word++) {
        const auto at = [&](int h, int x) -> float& { return s[word * kPairs / 2 + x / 2][2 * h + x % 2]; };
        if constexpr (!kPlain) {
          constexpr int kPart = kValueDim <= 128 ? kPairs : 4;  // what there are registers for
          operands.add<kMasked, kPart>(held, lines(kv_tile, word), seen[word], at);
        }
        if constexpr (kMasked) {
          if (!kPlain && __all_sync(~0u, Pairs::are_whole(seen[word]))) continue;
#pragma unroll
          for (int x = 0; x < 2 * kPairs; x++) {
            float& y = at(x / kPairs, x % kPairs);
            y = seen[word][x / kPairs] & 1u << x % kPairs ? y : -INFINITY;
          }
        }
      }
      if constexpr (kMasked) {
        softmax.template exact<kFirst>(s, rescale);
      } else {
        softmax.fast(s, rescale);
      }
      if constexpr (!kPlain) {
        if (operands.dropout.present()) {
          const Dropout<float> dropout = operands.dropout;
#pragma unroll
          for (int c = 0; c < kCols8 / 2; c++) {
            drop(dropout, row, first_column(kv_tile) + 16 * c, s[2 * c], s[2 * c + 1]);
          }
        }
      }
    };
    const auto convert = [&] {
#pragma unroll
      for (int x = 0; x < kCols8 * 2; x++) {
        powers[x / 4][x % 4] = ptx::cvt_x2<Element>(s[x / 2][x % 2 * 2], s[x / 2][x % 2 * 2 + 1]);
      }
    };
    // V of a tile that holds dead keys: a zero times a NaN is no zero. Each warpgroup clears what it is about to read.
    bool unclean = false;
    const auto note_unclean = [&](int kv_tile) {
      const Live live_k = live_keys();
      if (live_k.spans) {
        bool dead = false;
        for (int j = kv_tile * kKeys + lane; j < min_(kv_tile * kKeys + kKeys, p.S); j += 32) dead |= !live_k.has(j);
        unclean = __any_sync(~0u, dead);
        return;
      }
      unclean = kv_tile * kKeys < live_k.begin || kv_tile * kKeys + kKeys > min_(live_k.end, p.S);
      unclean &= kv_tile * kKeys < live_k.begin || live_k.end < p.S;  // past the tensor there are zeros already
    };
    const auto clean = [&](int kv_tile) {
      const Live live_k = live_keys();
      v_ring.wait_full();
      for (int x = thread; x < kKeys * kOut8; x += 128) {
        if (!live_k.has(kv_tile * kKeys + x / kOut8)) {
          ptx::st_shared_v4(shared + Shared::kV + v_ring.stage * VTile::kBytes + VTile::offset(x / kOut8, x % kOut8),
                            {});
        }
      }
      ptx::fence_proxy_async();  // the tensor core is to see the zeros, and later copies are to come after them
      ptx::bar_sync(kConsumerBarrier + consumer, 128);
    };

    int kv_tile = tiles.end - 1;
    // kAsks: mask or ids may remove pairs that spans leave.
    const auto first_step = [&]<bool kAsks> {
      q_ring.wait_full();
      k_ring.wait_full();
      ptx::pin(s);
      ptx::wgmma_fence();
      issue_scores();
      Seen seen;
      look.template operator()<kAsks>(kv_tile, first_spans, seen);  // waits for memory, while scores are worked out
      softmax.start(kPlain ? score.scale * kLog2e : kLog2e, !is_live(0), !is_live(1));
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      release(k_ring);
      weigh.template operator()<true, true>(kv_tile, seen);
      convert();
      note_unclean(kv_tile);
    };
    const auto step = [&]<bool kMasked, bool kAsks> {
      kv_tile--;
      k_ring.wait_full();
      if (unclean) clean(kv_tile + 1);
      my_turn();
      ptx::pin(s), ptx::pin(out), ptx::pin(powers);
      ptx::wgmma_fence();
      issue_scores();
      v_ring.wait_full();
      ptx::wgmma_fence();
      issue_output();
      next_turn();
      Seen seen;
      if constexpr (kMasked) {
        Span spans[2];
        ask_spans(spans);
        look.template operator()<kAsks>(kv_tile, spans, seen);
      }
      ptx::wgmma_wait_group<1>();
      ptx::pin(s);
      release(k_ring);
      weigh.template operator()<kMasked>(kv_tile, seen);
      ptx::wgmma_wait_group<0>();
      ptx::pin(out), ptx::pin(powers);
      release(v_ring);
      convert();
      if constexpr (kMasked) {
        note_unclean(kv_tile);
      } else {
        unclean = false;
      }
    };
    const auto steps = [&]<bool kAsks> {
      first_step.template operator()<kAsks>();
      // Three loops, of which two are alike: with one masked loop for both ends ptxas serialises the products (C7511).
#pragma unroll 1
      while (kv_tile > tiles.full_end) step.template operator()<true, kAsks>();
#pragma unroll 1
      while (kv_tile > tiles.full_begin) step.template operator()<false, kAsks>();
#pragma unroll 1
      while (kv_tile > tiles.begin) step.template operator()<true, kAsks>();
    };
    if constexpr (kBody == Body::kRemoving) {
      if (operands.acts.ask()) {  // then no tile is whole; in a walk of its own, for the other is to stay short
        first_step.template operator()<true>();
#pragma unroll 1
        while (kv_tile > tiles.begin) step.template operator()<true, true>();
      } else {
        steps.template operator()<false>();
      }
    } else {
      steps.template operator()<!kPlain>();
    }

    release(q_ring);
    if (unclean) clean(kv_tile);
    v_ring.wait_full();
    ptx::pin(out), ptx::pin(powers);
    ptx::wgmma_fence();
    issue_output();
    RowEnd ends[2];
#pragma unroll
    for (int h = 0; h < 2; h++) ends[h] = softmax.finish(h, is_live(h));
    ptx::wgmma_wait_group<0>();
    ptx::pin(out), ptx::pin(powers);
    release(v_ring);

    // Not where it was done exactly: a NaN stays one.
    if (tiles.full_begin < tiles.full_end && __any_sync(~0u, softmax.lost(is_live(0), is_live(1)))) {
      const uint32_t step = ptx::ld_shared_b32(work + offsetof(Work, step));
      if (lane == 0) ptx::red_shared_or_b32(shared + Shared::kAgain + step / 32 * 4, 1u << step % 32);
    }
    const int left_over = tiles.begin - int(ptx::ld_shared_b32(work + offsetof(Work, tiles)));
    finish(ends);
    skip(left_over, left_over);
  }
}

}  // namespace jax_flash2::cuda::sm90
