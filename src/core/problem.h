// One attention call as plain data: named dims, tensors with their strides, the spec and the optional operands.
// Built once by ffi/decode.h, passed by value to CPU threads and CUDA kernels. Owns nothing and allocates nothing.
#pragma once
#include "core/addend.h"
#include "core/dropout.h"
#include "core/mask.h"
#include "core/score.h"
#include "core/spec.h"

namespace jax_flash2 {

// Letters, the same everywhere: B batch, T query length, S key length, N query heads, K key/value heads, D query/key head
// dim, Dv value head dim. Query head n reads key head n / (N / K).

// Any number of batch axes are coalesced to at most this many; an operand has stride 0 along an axis it does not vary on.
inline constexpr int kMaxBatchAxes = 4;

// The coordinates of one batch row.
struct Batch {
  int32_t at[kMaxBatchAxes];
};

// A tensor [*B, ...] by its strides in elements; an axis that the tensor lacks or shares has stride 0. Null data: absent.
struct Tensor {
  void* data = nullptr;
  int64_t batch[kMaxBatchAxes] = {};
  int64_t row = 0;   // along T or S
  int64_t head = 0;  // along N or K
  int64_t col = 0;   // along D, Dv, or S of a score-shaped operand

  JAX_FLASH2_HD bool present() const { return data != nullptr; }

  // The first element of (batch row, head), and where it lies.
  template <class T>
  JAX_FLASH2_HD T* at(const Batch& b, int h = 0) const {
    return static_cast<T*>(data) + offset(b, h);
  }
  JAX_FLASH2_HD int64_t offset(const Batch& b, int h = 0) const {
    int64_t offset = h * head;
    for (int a = 0; a < kMaxBatchAxes; a++) offset += b.at[a] * batch[a];
    return offset;
  }
};

struct Extras {
#define JAX_FLASH2_EXTRA(name, dtype, axes, slot) Tensor name;
  JAX_FLASH2_EXTRAS(JAX_FLASH2_EXTRA)
#undef JAX_FLASH2_EXTRA
};

// What a kernel's body knows of: bounds that hold for all rows of a batch row, with a scale known to be positive; spans in
// their place; operands that remove pairs too; and what acts on every score.
enum class Body : uint8_t { kPlain, kSpans, kRemoving, kGeneral };

// What blocks of a backward tell each other by, of each head: where the adding to dQ is ordered, how many had their turn
// at each of its query tiles, of 32 rows or more, and else, in the places of the first ones, counters of the head, in
// calls with as many turns at least. Behind them, of the first head, the tickets that blocks have drawn; kChores, too, is
// a call's and lies in its first head.
enum class HeadCounter { kPrepared, kAdded, kChores };
JAX_FLASH2_HD constexpr int64_t order_turns(int64_t T) { return (T + 31) / 32; }
JAX_FLASH2_HD constexpr int64_t order_entries(int64_t T) { return order_turns(T) + 1; }

struct Problem {
  DType dtype;                         // of q, k, v, out and their gradients; the rest says its own below
  int32_t batch_sizes[kMaxBatchAxes];  // unused axes are 1
  int32_t B, T, S, N, K, D, Dv;        // B: product of batch_sizes
  Spec spec;
  Extras extras;
  DType bias_dtype;  // of extras.bias

  Tensor q;    // [*B, T, N, D]
  Tensor k;    // [*B, S, K, D]
  Tensor v;    // [*B, S, K, Dv]
  Tensor out;  // [*B, T, N, Dv]
  Tensor lse;  // [*B, N, T] float32 (float64 where dtype is): log sum exp of a row's scores, natural log

  // Forward workspace of some CUDA kernels, uninitialised; absent: they do without.
  Tensor queue;  // [*B, N] int32

  // Backward only.
  Tensor dout;        // like out
  Tensor dlse;        // like lse, or absent (zero)
  Tensor dq, dk, dv;  // like q, k, v but with every batch axis
  Extras grads;       // a slot per optional operand, see JAX_FLASH2_EXTRAS

  // Backward workspaces of the CUDA kernels, uninitialised.
  Tensor delta;           // [*B, N, T], as lse: rowsum(dout * out) - dlse
  Tensor dq_acc;          // [*B, N, T, D] float32
  Tensor dk_acc, dv_acc;  // [*B, K, S, D | Dv] float32, or absent where N == K
  Tensor order;           // [*B, N, order_entries(T)] int32; absent: only where not deterministic

  JAX_FLASH2_HD int group() const { return N / K; }

  // Of `order`, all zero at first.
  JAX_FLASH2_HD int* counter(HeadCounter which, int64_t batch_row = 0, int n = 0) const {
    return static_cast<int*>(order.data) + (batch_row * N + n) * order_entries(T) + int(which);
  }
  JAX_FLASH2_HD int* tickets() const { return static_cast<int*>(order.data) + order_turns(T); }
  JAX_FLASH2_HD int64_t counters() const { return int64_t(B) * N * order_entries(T); }

  JAX_FLASH2_HD Batch batch(int b) const {
    Batch r;
    for (int a = kMaxBatchAxes - 1; a > 0; a--) r.at[a] = b % batch_sizes[a], b /= batch_sizes[a];
    r.at[0] = b;
    return r;
  }

  template <bool kSpans = true>
  JAX_FLASH2_HD Mask mask(const Batch& b) const {
    const auto length = [&](const Tensor& lens, int full) {
      return lens.present() ? clamp_(*lens.at<const int32_t>(b), 0, full) : full;
    };
    Mask m = Mask::make(spec, length(extras.query_lens, T), length(extras.key_lens, S));
    if constexpr (!kSpans) return m;
    const uint32_t flags = extras.span_flags.present() ? *extras.span_flags.at<const int32_t>(b) : 0;
    m = m.with_flags(removes_pairs() ? flags : flags | 1);
    return with_spans(m, b);
  }
  JAX_FLASH2_HD bool has_spans() const { return extras.key_spans.present(); }
  JAX_FLASH2_HD Mask with_spans(Mask m, const Batch& b) const {
    const auto spans = [&](const Tensor& t) { return reinterpret_cast<const Span*>(t.at<const int32_t>(b)); };
    if (has_spans()) m.key_spans = spans(extras.key_spans), m.query_spans = spans(extras.query_spans);
    return m;
  }

  template <class Real>
  JAX_FLASH2_HD Score<Real> score(const Batch& b, int /*n*/) const {
    const Real scale = extras.scale.present() ? Real(*extras.scale.at<const float>(b)) : Real(spec.scale);
    return {scale, Real(spec.softcap)};
  }

  // `m`: the mask of the batch row.
  template <class Real>
  JAX_FLASH2_HD Addend<Real> addend(const Batch& b, int n, const Mask& m) const {
    const auto start = [&]<class T>(const Tensor& t, const T*) { return t.present() ? t.at<const T>(b, n) : nullptr; };
    const auto* const bias = static_cast<const char*>(extras.bias.data);
    const int bytes = bias_dtype == DType::kF64 ? 8 : bias_dtype == DType::kF32 ? 4 : 2;
    const Real* const slope = start(extras.alibi_slopes, static_cast<const Real*>(nullptr));
    const auto unless_exact = [&](const auto* x) { return m.exact ? nullptr : x; };
    return {.mask = unless_exact(start(extras.mask, static_cast<const uint8_t*>(nullptr))),
            .mask_row = extras.mask.row,
            .mask_col = extras.mask.col,
            .query_ids = unless_exact(start(extras.query_ids, static_cast<const int32_t*>(nullptr))),
            .key_ids = unless_exact(start(extras.key_ids, static_cast<const int32_t*>(nullptr))),
            .bias = bias ? bias + extras.bias.offset(b, n) * bytes : nullptr,
            .bias_row = extras.bias.row,
            .bias_col = extras.bias.col,
            .bias_dtype = bias_dtype,
            .sloped = slope != nullptr,
            .slope = slope ? *slope : Real(0),
            .positions = start(extras.positions, static_cast<const int32_t*>(nullptr)),
            .off = m.off};
  }

  // The score of the key without a value; -inf: there is none.
  template <class Real>
  JAX_FLASH2_HD Real sink(const Batch& b, int n) const {
    return extras.sinks.present() ? *extras.sinks.at<const Real>(b, n) : static_cast<Real>(-INFINITY);
  }

  template <class Real>
  JAX_FLASH2_HD Dropout<Real> dropout(const Batch& b, int n) const {
    return Dropout<Real>::make(spec.dropout_rate,
                               extras.seeds.present() ? extras.seeds.at<const uint32_t>(b, n) : nullptr);
  }

  // Whether pairs share elements of the bias.
  JAX_FLASH2_HD bool bias_is_shared() const {
    const Tensor& t = extras.bias;
    bool shared = (t.head == 0 && N > 1) || (t.row == 0 && T > 1) || (t.col == 0 && S > 1);
    for (int a = 0; a < kMaxBatchAxes; a++) shared |= t.batch[a] == 0 && batch_sizes[a] > 1;
    return shared;
  }

  // Whether there are operands that say which pairs are kept.
  JAX_FLASH2_HD bool removes_pairs() const { return extras.mask.present() || extras.query_ids.present(); }
  // Whether operands may remove pairs that the mask of a batch row leaves, as a bias does with -inf; and whether an Addend
  // does anything to them.
  JAX_FLASH2_HD bool may_remove(const Mask& m) const { return !m.exact || extras.bias.present(); }
  JAX_FLASH2_HD bool has_addend(const Mask& m) const { return may_remove(m) || extras.alibi_slopes.present(); }
  // Whether operands change scores or probabilities pair by pair. A sink only ends a row.
  JAX_FLASH2_HD bool elementwise() const {
    return extras.bias.present() || extras.alibi_slopes.present() || extras.seeds.present();
  }

  // Whether only the device knows who sees whom.
  bool ragged() const { return extras.query_lens.present() || extras.key_lens.present() || has_spans(); }

  Body body() const {
    if (extras.scale.present() || spec.scale <= 0 || spec.softcap != 0 || elementwise()) return Body::kGeneral;
    if (removes_pairs()) return Body::kRemoving;
    return has_spans() ? Body::kSpans : Body::kPlain;
  }
};

// What host code answers: null when the work was enqueued or done, else a message that names the failing rule.
struct Status {
  const char* error = nullptr;
  bool ok() const { return error == nullptr; }
};

}  // namespace jax_flash2
