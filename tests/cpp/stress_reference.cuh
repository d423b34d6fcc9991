// Attention and its gradients in float64 on the GPU for stress.cu, by the definition, with what roundings may cost each
// element beside each result. A block of 128 threads a row; shares no law with src/core.
//
// What is allowed follows from where a kernel rounds: powers and score gradients to the dtype (independent roundings:
// their standard deviations add in squares, six of them are allowed), results to the dtype, scores to float32 (bounds).
#pragma once
#include <cmath>
#include <cstdint>

namespace stress {

constexpr int kThreads = 128;
constexpr double kDeviations = 6;

// Element (b0, b1, position, head, d) of a tensor.
struct View {
  int64_t batch0, batch1, row, head;
  __host__ __device__ int64_t at(int b0, int b1, int l, int h, int d) const {
    return b0 * batch0 + b1 * batch1 + l * row + h * head + d;
  }
};

// The law, of one batch row.
struct Row {
  int q_len, k_len;
  int64_t left, right, off;
  double scale, softcap;
  const uint8_t* table = nullptr;  // [T, table_cols], in place of all that
  int table_cols = 0;
  __host__ __device__ bool sees(int64_t i, int64_t j) const {
    if (table) return table[i * table_cols + j];
    if (i >= q_len || j >= k_len) return false;
    if (left >= 0 && j < i + off - left) return false;
    return right < 0 || j <= i + off + right;
  }
};

// What may be wrong with a result by rounding: out [B, N, T, Dv] and lse [B, N, T] (dense, as the exact values are).
struct Exact {
  double *out, *out_error, *lse, *lse_error, *delta, *delta_error;
  double *dq, *dq_error, *dk, *dk_error, *dv, *dv_error, *dscale, *dscale_error;
};

template <class E>
struct Call {
  int B1, T, S, N, K, D, Dv;
  double unit, least;  // relative and absolute error of one rounding to E
  const E *q, *k, *v, *dout;
  const float* dlse;  // [B, N, T], or null
  View vq, vk, vv, vdout;
  const Row* rows;
  Exact exact;
};

__device__ inline double reduce(double x, bool maximum) {
  __shared__ double shared[kThreads];
  __syncthreads();
  shared[threadIdx.x] = x;
  for (int width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) {
      const double a = shared[threadIdx.x], b = shared[threadIdx.x + width];
      shared[threadIdx.x] = maximum ? fmax(a, b) : a + b;
    }
  }
  __syncthreads();
  return shared[0];
}

// Score of a pair, the sum of its products' magnitudes, and tanh of the capped score.
template <class E>
__device__ double score(const Call<E>& c, const Row& row, const E* q, const E* k, double* magnitude, double* tanh_of) {
  double dot = 0, absolute = 0;
  for (int d = 0; d < c.D; d++) {
    const double x = double(float(q[d])) * double(float(k[d]));
    dot += x, absolute += fabs(x);
  }
  *magnitude = absolute * fabs(row.scale), *tanh_of = 0;
  const double s = dot * row.scale;
  if (row.softcap == 0) return s;
  *tanh_of = tanh(s / row.softcap);
  return row.softcap * *tanh_of;
}

template <class E>
__device__ double dot_dv(const Call<E>& c, const E* dout, const E* v, double* magnitude) {
  double dot = 0, absolute = 0;
  for (int d = 0; d < c.Dv; d++) {
    const double x = double(float(dout[d])) * double(float(v[d]));
    dot += x, absolute += fabs(x);
  }
  *magnitude = absolute;
  return dot;
}

struct Place {
  int b, b0, b1, head, position;
  __device__ Place(int64_t block, int B1, int heads, int length)
      : b(int(block / length / heads)),
        b0(b / B1),
        b1(b % B1),
        head(int(block / length % heads)),
        position(int(block % length)) {}
};

// One block a query row: out, lse, delta = rowsum(dout * out) - dlse, and what each may be off by.
template <class E>
__global__ void exact_forward(const Call<E> c, bool backward) {
  const Place at(blockIdx.x, c.B1, c.N, c.T);
  const Row row = c.rows[at.b];
  const int i = at.position, h = at.head / (c.N / c.K);
  const E* const q = c.q + c.vq.at(at.b0, at.b1, i, at.head, 0);
  double top = -INFINITY, largest = 0, sum = 0, magnitude, t;
  for (int j = threadIdx.x; j < c.S; j += kThreads) {
    if (!row.sees(i, j)) continue;
    top = fmax(top, score(c, row, q, c.k + c.vk.at(at.b0, at.b1, j, h, 0), &magnitude, &t));
    largest = fmax(largest, magnitude);
  }
  top = reduce(top, true), largest = reduce(largest, true);

  __shared__ double power[kThreads];
  constexpr int kOwn = 256 / kThreads;  // columns of a thread
  double out[kOwn] = {}, squares[kOwn] = {}, absolute[kOwn] = {}, values[kOwn] = {};
  for (int j0 = 0; j0 < c.S && top != -INFINITY; j0 += kThreads) {
    const int j = j0 + threadIdx.x;
    const bool seen = j < c.S && row.sees(i, j);
    const double e = seen ? exp(score(c, row, q, c.k + c.vk.at(at.b0, at.b1, j, h, 0), &magnitude, &t) - top) : 0;
    sum += e;
    __syncthreads();
    power[threadIdx.x] = seen ? e : -1;
    __syncthreads();
    for (int x = 0; x < kOwn; x++) {
      const int d = threadIdx.x + x * kThreads;
      for (int y = 0; y < kThreads && d < c.Dv; y++) {
        if (power[y] < 0) continue;
        const double v = double(float(c.v[c.vv.at(at.b0, at.b1, j0 + y, h, d)])), pv = power[y] * v;
        out[x] += pv, squares[x] += pv * pv, absolute[x] += fabs(pv), values[x] += v * v;
      }
    }
  }
  sum = reduce(sum, false);
  const bool empty = top == -INFINITY;
  const double lse = empty ? -INFINITY : top + log(sum);
  const double score_error = 4e-6 + 1e-6 * largest + 4e-7 * row.softcap;
  double delta = 0, delta_squares = 0;
  for (int x = 0; x < kOwn; x++) {
    const int d = threadIdx.x + x * kThreads;
    if (d >= c.Dv) continue;
    const int64_t to = int64_t(blockIdx.x) * c.Dv + d;
    const double value = empty ? 0 : out[x] / sum;
    const double deviation = empty ? 0
                                   : sqrt(c.unit * c.unit * (squares[x] / sum / sum + value * value) +
                                          c.least * c.least * (values[x] / sum / sum + 1));
    c.exact.out[to] = value;
    c.exact.out_error[to] = empty ? 0 : kDeviations * deviation + 2 * score_error * absolute[x] / sum + 1e-7;
    if (!backward || empty) continue;
    const double dout = double(float(c.dout[c.vdout.at(at.b0, at.b1, i, at.head, d)]));
    delta += value * dout, delta_squares += deviation * deviation * dout * dout;
  }
  delta = reduce(delta, false), delta_squares = reduce(delta_squares, false);
  if (threadIdx.x == 0) {
    c.exact.lse[blockIdx.x] = lse;
    c.exact.lse_error[blockIdx.x] = empty ? 0 : score_error + 4e-7 * fabs(lse);
    if (!backward) return;
    c.exact.delta[blockIdx.x] = empty ? 0 : delta - (c.dlse ? double(c.dlse[blockIdx.x]) : 0);
    c.exact.delta_error[blockIdx.x] = empty ? 0 : sqrt(delta_squares) + 1e-6 * fabs(delta);
  }
}

// A pair's probability, score gradient (before scale), what of delta's error reaches that gradient, and bounds of what else
// may be wrong with both.
struct Pair {
  double p, ds, of_delta, bounded, p_bounded;
};

template <class E>
__device__ Pair pair(const Call<E>& c, const Row& row, const E* q, const E* k, const E* dout, const E* v,
                     int64_t row_index) {
  double magnitude, t, products;
  const double s = score(c, row, q, k, &magnitude, &t), p = exp(s - c.exact.lse[row_index]);
  const double inner = dot_dv(c, dout, v, &products) - c.exact.delta[row_index], slope = 1 - t * t;
  const double relative = c.exact.lse_error[row_index] + 4e-6 + 1e-6 * magnitude;
  const double ds = p * inner * slope;
  // The slope's own error: 1 - t^2 from a float32 t.
  return {p, ds, p * slope,
          fabs(ds) * relative + p * slope * 2e-6 * products + p * fabs(inner) * 1e-5 * (row.softcap != 0),
          p * relative};
}

// One block a query row: dq, and the row's share of d loss / d scale.
template <class E>
__global__ void exact_dq(const Call<E> c) {
  const Place at(blockIdx.x, c.B1, c.N, c.T);
  const Row row = c.rows[at.b];
  const int i = at.position, h = at.head / (c.N / c.K);
  const E* const q = c.q + c.vq.at(at.b0, at.b1, i, at.head, 0);
  const E* const dout = c.dout + c.vdout.at(at.b0, at.b1, i, at.head, 0);
  __shared__ double ds[kThreads], of_delta[kThreads], bounded[kThreads];
  constexpr int kOwn = 256 / kThreads;
  double sum[kOwn] = {}, squares[kOwn] = {}, coherent[kOwn] = {}, absolute[kOwn] = {}, keys[kOwn] = {};
  for (int j0 = 0; j0 < c.S; j0 += kThreads) {
    const int j = j0 + threadIdx.x;
    const bool seen = j < c.S && row.sees(i, j);
    Pair x{};
    if (seen)
      x = pair(c, row, q, c.k + c.vk.at(at.b0, at.b1, j, h, 0), dout, c.v + c.vv.at(at.b0, at.b1, j, h, 0), blockIdx.x);
    __syncthreads();
    ds[threadIdx.x] = x.ds, of_delta[threadIdx.x] = seen ? x.of_delta : -1, bounded[threadIdx.x] = x.bounded;
    __syncthreads();
    for (int o = 0; o < kOwn; o++) {
      const int d = threadIdx.x + o * kThreads;
      for (int y = 0; y < kThreads && d < c.D; y++) {
        if (of_delta[y] < 0) continue;
        const double k = double(float(c.k[c.vk.at(at.b0, at.b1, j0 + y, h, d)]));
        sum[o] += ds[y] * k, squares[o] += ds[y] * ds[y] * k * k, absolute[o] += bounded[y] * fabs(k);
        coherent[o] += of_delta[y] * k, keys[o] += k * k;
      }
    }
  }
  double share = 0, share_error = 0;
  for (int o = 0; o < kOwn; o++) {
    const int d = threadIdx.x + o * kThreads;
    if (d >= c.D) continue;
    const int64_t to = int64_t(blockIdx.x) * c.D + d;
    const bool empty = c.exact.lse[blockIdx.x] == -INFINITY;
    const double delta = c.exact.delta_error[blockIdx.x] * coherent[o];
    const double deviation = sqrt(c.unit * c.unit * squares[o] + delta * delta + c.least * c.least * keys[o]);
    const double error = kDeviations * deviation + absolute[o];
    c.exact.dq[to] = row.scale * sum[o];
    c.exact.dq_error[to] =
        empty ? 0 : fabs(row.scale) * (error + kDeviations * c.unit * fabs(sum[o]) + 1e-7) + kDeviations * c.least;
    if (empty) continue;
    const double x = double(float(q[d]));
    share += sum[o] * x, share_error += error * fabs(x) + 1e-6 * fabs(sum[o] * x);
  }
  share = reduce(share, false), share_error = reduce(share_error, false);
  if (threadIdx.x == 0) c.exact.dscale[blockIdx.x] = share, c.exact.dscale_error[blockIdx.x] = share_error + 1e-6;
}

// One block a key: dk and dv.
template <class E>
__global__ void exact_dkv(const Call<E> c) {
  const Place at(blockIdx.x, c.B1, c.K, c.S);
  const Row row = c.rows[at.b];
  const int j = at.position, group = c.N / c.K;
  const E* const k = c.k + c.vk.at(at.b0, at.b1, j, at.head, 0);
  const E* const v = c.v + c.vv.at(at.b0, at.b1, j, at.head, 0);
  __shared__ double ds[kThreads], p[kThreads], bounded[kThreads], p_bounded[kThreads], delta[kThreads];
  constexpr int kOwn = 256 / kThreads;
  double dk[kOwn] = {}, dk_squares[kOwn] = {}, dk_absolute[kOwn] = {}, queries[kOwn] = {};
  double dv[kOwn] = {}, dv_squares[kOwn] = {}, dv_absolute[kOwn] = {}, douts[kOwn] = {};
  bool read = false;
  for (int n = at.head * group; n < (at.head + 1) * group; n++) {
    for (int i0 = 0; i0 < c.T; i0 += kThreads) {
      const int i = i0 + threadIdx.x;
      const bool seen = i < c.T && row.sees(i, j);
      const int64_t index = (int64_t(at.b) * c.N + n) * c.T + i;
      Pair x{};
      if (seen)
        x = pair(c, row, c.q + c.vq.at(at.b0, at.b1, i, n, 0), k, c.dout + c.vdout.at(at.b0, at.b1, i, n, 0), v, index);
      __syncthreads();
      ds[threadIdx.x] = x.ds, p[threadIdx.x] = seen ? x.p : -1;
      bounded[threadIdx.x] = x.bounded, p_bounded[threadIdx.x] = x.p_bounded;
      delta[threadIdx.x] = seen ? x.of_delta * c.exact.delta_error[index] : 0;
      __syncthreads();
      for (int y = 0; y < kThreads; y++) {
        if (p[y] < 0) continue;
        read = true;
        for (int o = 0; o < kOwn; o++) {
          const int d = threadIdx.x + o * kThreads;
          if (d < c.D) {
            const double q = double(float(c.q[c.vq.at(at.b0, at.b1, i0 + y, n, d)])), off = delta[y] * q;
            dk[o] += ds[y] * q, dk_absolute[o] += bounded[y] * fabs(q), queries[o] += q * q;
            dk_squares[o] += c.unit * c.unit * ds[y] * ds[y] * q * q + off * off;
          }
          if (d < c.Dv) {
            const double g = double(float(c.dout[c.vdout.at(at.b0, at.b1, i0 + y, n, d)]));
            dv[o] += p[y] * g, dv_absolute[o] += p_bounded[y] * fabs(g), douts[o] += g * g;
            dv_squares[o] += c.unit * c.unit * p[y] * p[y] * g * g;
          }
        }
      }
    }
  }
  for (int o = 0; o < kOwn; o++) {
    const int d = threadIdx.x + o * kThreads;
    const double scale = row.scale, unit = c.unit, least = c.least;
    if (d < c.D) {
      const int64_t to = int64_t(blockIdx.x) * c.D + d;
      const double deviation = sqrt(dk_squares[o] + unit * unit * dk[o] * dk[o] + least * least * queries[o]);
      c.exact.dk[to] = scale * dk[o];
      c.exact.dk_error[to] =
          read ? fabs(scale) * (kDeviations * deviation + dk_absolute[o] + 1e-7) + kDeviations * least : 0;
    }
    if (d < c.Dv) {
      const int64_t to = int64_t(blockIdx.x) * c.Dv + d;
      const double deviation = sqrt(dv_squares[o] + unit * unit * dv[o] * dv[o] + least * least * (douts[o] + 1));
      c.exact.dv[to] = dv[o];
      c.exact.dv_error[to] = read ? kDeviations * deviation + dv_absolute[o] + 1e-7 : 0;
    }
  }
}

}  // namespace stress
