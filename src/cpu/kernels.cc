// Forward and backward, one query row at a time. Knows nothing of XLA.
#include "cpu/kernels.h"

#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "cpu/element.h"
#include "cpu/parallel.h"

namespace jax_flash2::cpu {
namespace {

struct Math {
  static float tanh(float x) { return std::tanh(x); }
  static double tanh(double x) { return std::tanh(x); }
};

template <class E>
struct Kernel {
  using Real = typename RealOf<E>::type;
  static constexpr Real kInf = std::numeric_limits<Real>::infinity();
  static constexpr int kRows = 64;
  const Problem& p;

  void forward_rows(const Batch& b, int n, int i0, int i1, Real* acc) const {
    const Mask mask = p.mask(b);
    const auto score = p.template score<Real>(b, n);
    const E *q = p.q.at<const E>(b, n), *k = p.k.at<const E>(b, n / p.group()), *v = p.v.at<const E>(b, n / p.group());
    E* out = p.out.at<E>(b, n);
    Real* lse = p.lse.at<Real>(b, n);
    for (int i = i0; i < i1; i++) {
      const Range keys = mask.keys(i);
      Real m = -kInf, l = 0;
      for (int d = 0; d < p.Dv; d++) acc[d] = 0;
      for (int j = keys.begin; j < keys.end; j++) {
        Real dot = 0;
        for (int d = 0; d < p.D; d++) dot += load(q[i * p.q.row + d * p.q.col]) * load(k[j * p.k.row + d * p.k.col]);
        const Real s = score.template apply<Math>(dot, i, j);
        if (s > m) {
          const Real shrink = m == -kInf ? Real(0) : std::exp(m - s);
          l *= shrink;
          for (int d = 0; d < p.Dv; d++) acc[d] *= shrink;
          m = s;
        }
        const Real e = s == -kInf ? Real(0) : std::exp(s - m);
        l += e;
        for (int d = 0; d < p.Dv; d++) acc[d] += e * load(v[j * p.v.row + d * p.v.col]);
      }
      const bool empty = l == 0;
      for (int d = 0; d < p.Dv; d++) store(out + i * p.out.row + d * p.out.col, empty ? Real(0) : acc[d] / l);
      lse[i * p.lse.row] = empty ? -kInf : m + std::log(l);
    }
  }

  void backward_head(const Batch& b, int key_head, Real* dk, Real* dv, Real* dq) const {
    const Mask mask = p.mask(b);
    const E *k = p.k.at<const E>(b, key_head), *v = p.v.at<const E>(b, key_head);
    for (int64_t x = 0; x < int64_t{p.S} * p.D; x++) dk[x] = 0;
    for (int64_t x = 0; x < int64_t{p.S} * p.Dv; x++) dv[x] = 0;
    for (int n = key_head * p.group(); n < (key_head + 1) * p.group(); n++) {
      const auto score = p.template score<Real>(b, n);
      const E *q = p.q.at<const E>(b, n), *out = p.out.at<const E>(b, n), *dout = p.dout.at<const E>(b, n);
      const Real *lse = p.lse.at<const Real>(b, n), *dlse = p.dlse.present() ? p.dlse.at<const Real>(b, n) : nullptr;
      for (int i = 0; i < p.T; i++) {
        const Range keys = mask.keys(i);
        for (int d = 0; d < p.D; d++) dq[d] = 0;
        Real delta = 0, row_lse = kInf;
        if (keys.begin < keys.end) {
          for (int d = 0; d < p.Dv; d++)
            delta += load(dout[i * p.dout.row + d * p.dout.col]) * load(out[i * p.out.row + d * p.out.col]);
          if (dlse) delta -= dlse[i * p.dlse.row];
          if (lse[i * p.lse.row] != -kInf) row_lse = lse[i * p.lse.row];
        }
        for (int j = keys.begin; j < keys.end; j++) {
          Real dot = 0, dp = 0;
          for (int d = 0; d < p.D; d++) dot += load(q[i * p.q.row + d * p.q.col]) * load(k[j * p.k.row + d * p.k.col]);
          for (int d = 0; d < p.Dv; d++)
            dp += load(dout[i * p.dout.row + d * p.dout.col]) * load(v[j * p.v.row + d * p.v.col]);
          const Real s = score.template apply<Math>(dot, i, j), e = std::exp(s - row_lse);
          const Real ds = e * (dp - delta) * score.slope(s);
          for (int d = 0; d < p.Dv; d++) dv[int64_t{j} * p.Dv + d] += e * load(dout[i * p.dout.row + d * p.dout.col]);
          for (int d = 0; d < p.D; d++) {
            dk[int64_t{j} * p.D + d] += score.scale * ds * load(q[i * p.q.row + d * p.q.col]);
            dq[d] += ds * load(k[j * p.k.row + d * p.k.col]);
          }
        }
        Real dscale = 0;
        if (keys.begin < keys.end)
          for (int d = 0; d < p.D; d++) dscale += dq[d] * load(q[i * p.q.row + d * p.q.col]);
        for (int d = 0; d < p.D; d++) store(p.dq.at<E>(b, n) + i * p.dq.row + d * p.dq.col, score.scale * dq[d]);
        if (p.grads.scale.present())
          p.grads.scale.at<float>(b, n)[i * p.grads.scale.row] = static_cast<float>(dscale);
      }
    }
    for (int64_t j = 0; j < p.S; j++) {
      for (int d = 0; d < p.D; d++) store(p.dk.at<E>(b, key_head) + j * p.dk.row + d * p.dk.col, dk[j * p.D + d]);
      for (int d = 0; d < p.Dv; d++) store(p.dv.at<E>(b, key_head) + j * p.dv.row + d * p.dv.col, dv[j * p.Dv + d]);
    }
  }

  void forward(Executor& executor) const {
    const int64_t tiles = (int64_t{p.T} + kRows - 1) / kRows, count = tiles * p.N * p.B;
    const int n_workers = workers(executor, count);
    std::vector<Real> scratch(static_cast<size_t>(n_workers) * p.Dv);
    parallel_for(executor, n_workers, count, [&](int64_t x, int worker) {
      const int tile = static_cast<int>(x % tiles), n = static_cast<int>(x / tiles % p.N);
      forward_rows(p.batch(static_cast<int>(x / tiles / p.N)), n, tile * kRows, min_(p.T, (tile + 1) * kRows),
                   scratch.data() + int64_t{worker} * p.Dv);
    });
  }

  void backward(Executor& executor) const {
    const int64_t count = int64_t{p.B} * p.K, dk_size = int64_t{p.S} * p.D, dv_size = int64_t{p.S} * p.Dv;
    const int n_workers = workers(executor, count);
    std::vector<Real> scratch(static_cast<size_t>(n_workers) * (dk_size + dv_size + p.D));
    parallel_for(executor, n_workers, count, [&](int64_t x, int worker) {
      Real* dk = scratch.data() + worker * (dk_size + dv_size + p.D);
      backward_head(p.batch(static_cast<int>(x / p.K)), static_cast<int>(x % p.K), dk, dk + dk_size,
                    dk + dk_size + dv_size);
    });
  }
};

template <class Pass>
Status with_dtype(const Problem& p, const Pass& pass) {
  try {
    switch (p.dtype) {
      case DType::kF16: return pass(Kernel<F16>{p}), Status{};
      case DType::kBF16: return pass(Kernel<BF16>{p}), Status{};
      case DType::kF32: return pass(Kernel<float>{p}), Status{};
      case DType::kF64: return pass(Kernel<double>{p}), Status{};
      default: return {"dtype must be float16, bfloat16, float32 or float64"};
    }
  } catch (const std::bad_alloc&) {
    return {"out of host memory for the scratch tiles"};
  }
}

}  // namespace

Status forward(const Problem& p, Executor& executor) {
  return with_dtype(p, [&](const auto& kernel) { kernel.forward(executor); });
}

Status backward(const Problem& p, Executor& executor) {
  return with_dtype(p, [&](const auto& kernel) { kernel.backward(executor); });
}

}  // namespace jax_flash2::cpu
