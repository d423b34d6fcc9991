// The CUDA backward against a naive one in float64 that shares no law with the package: its own mask, its own out and lse.
// Every result and workspace is filled with NaN bytes before each run, and stands between guards that must survive.
//
//   kernels_backward check [small] [substring of a case's name]
//
// prints a line a case and `N passed, M failed`. `small` is what compute-sanitizer can run in seconds.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/launch.h"

using namespace jax_flash2;

#define CHECK(x)                                                               \
  do {                                                                         \
    const cudaError_t e = (x);                                                 \
    if (e != cudaSuccess) {                                                    \
      std::printf("%s at %s:%d\n", cudaGetErrorString(e), __FILE__, __LINE__); \
      std::exit(2);                                                            \
    }                                                                          \
  } while (0)

struct Case {
  int B = 2, T = 65, S = 65, N = 2, K = 2, D = 64, Dv = 0;  // Dv 0: D
  bool bf16 = true, causal = false, bottom_right = false;
  int left = -1, right = -1;
  bool lengths = false;  // of queries and keys, 0 and too long ones among them
  double scale = 0;      // 0: 1 / sqrt(D)
  double softcap = 0;
  bool traced = false;  // scale as an operand, another one a batch row
  bool dlse = false;
  bool poison = false;  // NaN wherever nothing may be read
  bool deterministic = false;
  bool far = false;     // scores below -100
  bool bare = false;    // without the order workspace
  bool shared = false;  // K and V shared by all batch rows
  bool small = false;   // a case for compute-sanitizer

  int value_dim() const { return Dv ? Dv : D; }
  std::string name() const {
    char s[200];
    const std::string dims = Dv ? std::to_string(D) + "/" + std::to_string(Dv) : std::to_string(D);
    std::snprintf(s, sizeof s, "%s D%s B%d T%d S%d N%d K%d%s%s", bf16 ? "bf16" : "f16", dims.c_str(), B, T, S, N, K,
                  causal ? " causal" : "", bottom_right ? " bottom_right" : "");
    std::string r = s;
    if (left >= 0 || right >= 0) r += " window" + std::to_string(left) + "," + std::to_string(right);
    if (scale != 0) r += " scale" + std::to_string(scale).substr(0, 5);
    if (softcap != 0) r += " softcap";
    const auto flag = [&](bool f, const char* what) { r += f ? std::string(" ") + what : ""; };
    flag(lengths, "lengths"), flag(traced, "traced"), flag(dlse, "dlse"), flag(poison, "poison");
    flag(deterministic, "deterministic"), flag(far, "far"), flag(bare, "bare"), flag(shared, "shared");
    return r;
  }
};

// ---- the naive one. One batch row's facts by value; positions as the law's text has them.

struct Row {
  int q_len, k_len, left, right, off;
  double scale, softcap;
  __host__ __device__ bool visible(int i, int j) const {
    if (i >= q_len || j >= k_len) return false;
    if (left >= 0 && j < i + off - left) return false;
    return right < 0 || j <= i + off + right;
  }
};

template <class E>
struct Naive {
  const E *q, *k, *v, *dout;
  const float* dlse;
  const Row* rows;
  int T, S, N, K, D, Dv;
  bool shared;
  double *out, *lse, *delta;  // [B, T, N, Dv], [B, N, T]
  double *dq, *dk, *dv, *dscale;

  // Element d of a row of `cols`.
  static __device__ double at(const E* x, int cols, int b, int L, int H, int l, int h, int d) {
    return double(float(x[((int64_t(b) * L + l) * H + h) * cols + d]));
  }
  __device__ double dot(int cols, int b, int i, int n, int j, const E* x, const E* y) const {
    double sum = 0;
    for (int d = 0; d < cols; d++)
      sum += at(x, cols, b, T, N, i, n, d) * at(y, cols, shared ? 0 : b, S, K, j, n / (N / K), d);
    return sum;
  }
  __device__ double score(int b, int i, int n, int j) const {
    const double s = rows[b].scale * dot(D, b, i, n, j, q, k);
    return rows[b].softcap != 0 ? rows[b].softcap * tanh(s / rows[b].softcap) : s;
  }
  // P and d loss / d (scale * q.k).
  __device__ void pair(int b, int i, int n, int j, double* p, double* ds) const {
    const int64_t row = (int64_t(b) * N + n) * T + i;
    const double s = score(b, i, n, j), t = rows[b].softcap != 0 ? s / rows[b].softcap : 0;
    *p = exp(s - lse[row]);
    *ds = *p * (dot(Dv, b, i, n, j, dout, v) - delta[row]) * (1 - t * t);
  }
};

// One thread a row each; sums over d live in the results themselves.
template <class E>
__global__ void naive_forward(const Naive<E> m, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * 128 + threadIdx.x;
  if (row >= rows) return;
  const int i = row % m.T, n = row / m.T % m.N, b = row / m.T / m.N, h = n / (m.N / m.K), kv = m.shared ? 0 : b;
  double* const out = m.out + ((int64_t(b) * m.T + i) * m.N + n) * m.Dv;
  for (int d = 0; d < m.Dv; d++) out[d] = 0;
  double top = -INFINITY, sum = 0, delta = 0;
  for (int j = 0; j < m.S; j++) {
    if (m.rows[b].visible(i, j)) top = fmax(top, m.score(b, i, n, j));
  }
  for (int j = 0; j < m.S; j++) {
    if (!m.rows[b].visible(i, j)) continue;
    const double e = exp(m.score(b, i, n, j) - top);
    sum += e;
    for (int d = 0; d < m.Dv; d++) out[d] += e * m.at(m.v, m.Dv, kv, m.S, m.K, j, h, d);
  }
  m.lse[row] = sum > 0 ? top + log(sum) : -INFINITY;
  for (int d = 0; d < m.Dv && sum > 0; d++) {
    out[d] /= sum;
    delta += out[d] * m.at(m.dout, m.Dv, b, m.T, m.N, i, n, d);
  }
  m.delta[row] = sum > 0 ? delta - (m.dlse ? m.dlse[row] : 0) : 0;
}

template <class E>
__global__ void naive_dq(const Naive<E> m, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * 128 + threadIdx.x;
  if (row >= rows) return;
  const int i = row % m.T, n = row / m.T % m.N, b = row / m.T / m.N, h = n / (m.N / m.K), kv = m.shared ? 0 : b;
  double* const dq = m.dq + ((int64_t(b) * m.T + i) * m.N + n) * m.D;
  for (int d = 0; d < m.D; d++) dq[d] = 0;
  for (int j = 0; j < m.S; j++) {
    if (!m.rows[b].visible(i, j)) continue;
    double p, ds;
    m.pair(b, i, n, j, &p, &ds);
    for (int d = 0; d < m.D; d++) dq[d] += ds * m.at(m.k, m.D, kv, m.S, m.K, j, h, d);
  }
  double share = 0;
  for (int d = 0; d < m.D; d++) {
    if (dq[d] != 0) share += dq[d] * m.at(m.q, m.D, b, m.T, m.N, i, n, d);
    dq[d] *= m.rows[b].scale;
  }
  m.dscale[row] = share;
}

template <class E>
__global__ void naive_dkv(const Naive<E> m, int64_t rows) {
  const int64_t row = int64_t(blockIdx.x) * 128 + threadIdx.x;
  if (row >= rows) return;
  const int j = row % m.S, h = row / m.S % m.K, b = row / m.S / m.K, group = m.N / m.K;
  double* const dk = m.dk + ((int64_t(b) * m.S + j) * m.K + h) * m.D;
  double* const dv = m.dv + ((int64_t(b) * m.S + j) * m.K + h) * m.Dv;
  for (int d = 0; d < m.D; d++) dk[d] = 0;
  for (int d = 0; d < m.Dv; d++) dv[d] = 0;
  for (int n = h * group; n < (h + 1) * group; n++) {
    for (int i = 0; i < m.T; i++) {
      if (!m.rows[b].visible(i, j)) continue;
      double p, ds;
      m.pair(b, i, n, j, &p, &ds);
      for (int d = 0; d < m.D; d++) dk[d] += ds * m.at(m.q, m.D, b, m.T, m.N, i, n, d) * m.rows[b].scale;
      for (int d = 0; d < m.Dv; d++) dv[d] += p * m.at(m.dout, m.Dv, b, m.T, m.N, i, n, d);
    }
  }
}

// ---- memory

constexpr size_t kGuard = 4096;

// A device array between two guards of 0xff bytes, itself filled with 0xff: NaN in every floating-point type.
struct Array {
  char* base = nullptr;
  size_t bytes = 0;
  explicit Array(size_t bytes) : bytes(bytes) {
    CHECK(cudaMalloc(&base, bytes + 2 * kGuard));
    poison();
  }
  ~Array() { cudaFree(base); }
  Array(const Array&) = delete;
  void poison() { CHECK(cudaMemset(base, 0xff, bytes + 2 * kGuard)); }
  template <class T>
  T* get() const {
    return reinterpret_cast<T*>(base + kGuard);
  }
  bool guarded() const {
    std::vector<unsigned char> g(2 * kGuard);
    CHECK(cudaMemcpy(g.data(), base, kGuard, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(g.data() + kGuard, base + kGuard + bytes, kGuard, cudaMemcpyDeviceToHost));
    for (unsigned char c : g) {
      if (c != 0xff) return false;
    }
    return true;
  }
  template <class T>
  std::vector<T> host() const {
    std::vector<T> r(bytes / sizeof(T));
    CHECK(cudaMemcpy(r.data(), get<T>(), bytes, cudaMemcpyDeviceToHost));
    return r;
  }
  template <class T>
  void set(const std::vector<T>& x) {
    CHECK(cudaMemcpy(get<T>(), x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
};

uint64_t g_state;
double uniform() {  // splitmix64
  uint64_t z = g_state += 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull, z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return double((z ^ (z >> 31)) >> 11) * 0x1p-53;
}
double normal() { return std::sqrt(-2 * std::log(uniform() + 1e-300)) * std::cos(6.283185307179586 * uniform()); }

Tensor tensor(const Array& x, int64_t batch, int64_t row, int64_t head) {
  Tensor t;
  t.data = x.get<void>();
  t.batch[kMaxBatchAxes - 1] = batch, t.row = row, t.head = head, t.col = 1;
  return t;
}

// Relative error in the Euclidean norm; infinite where something is not finite, or not zero where it must be.
template <class T>
double error(const std::vector<T>& x, const std::vector<double>& ref, double floor) {
  double d = 0, n = 0;
  for (size_t a = 0; a < x.size(); a++) {
    const double e = double(float(x[a])) - ref[a];
    if (!std::isfinite(e)) return INFINITY;
    d += e * e, n += ref[a] * ref[a];
  }
  return std::sqrt(d / (n + floor * floor * x.size()));
}

template <class E>
bool run(const Case& c) {
  const int64_t B = c.B, T = c.T, S = c.S, N = c.N, K = c.K, D = c.D, Dv = c.value_dim();
  const int64_t rows_q = B * N * T, nq = rows_q * D, no = rows_q * Dv, nk = B * S * K * D, nv = B * S * K * Dv;
  const int64_t nk_in = c.shared ? nk / B : nk, nv_in = c.shared ? nv / B : nv;
  g_state = 1;
  for (char x : c.name()) g_state = g_state * 31 + x;

  // Lengths, scales, the law.
  std::vector<int> q_lens(B), k_lens(B);
  std::vector<float> scales(B);
  std::vector<Row> rows(B);
  for (int b = 0; b < B; b++) {
    const int q[] = {c.T - 1, 0, c.T / 2, c.T + 5, c.T, 1}, k[] = {c.S / 2 + 1, c.S, 0, c.S - 1, c.S + 9, -3};
    q_lens[b] = q[b % 6], k_lens[b] = k[b % 6];
    const double plain = c.scale != 0 ? c.scale : 1 / std::sqrt(double(D));
    scales[b] = float(c.traced ? plain * (b % 3 == 1 ? -1.5 : b % 3 == 2 ? 0 : 1) : plain);
    const auto clamp = [](int x, int hi) { return x < 0 ? 0 : x > hi ? hi : x; };
    Row& r = rows[b];
    r = {c.lengths ? clamp(q_lens[b], c.T) : c.T,
         c.lengths ? clamp(k_lens[b], c.S) : c.S,
         c.left,
         c.causal ? 0 : c.right,
         0,
         c.traced ? double(scales[b]) : plain,
         c.softcap};
    if (c.bottom_right) r.off = r.k_len - r.q_len;
  }
  std::vector<char> live_q(B * T), live_k(B * S);
  for (int64_t b = 0; b < B; b++) {
    for (int i = 0; i < T; i++) {
      for (int j = 0; j < S; j++) {
        if (rows[b].visible(i, j)) live_q[b * T + i] = live_k[b * S + j] = 1;
      }
    }
  }

  // Inputs. `far`: the first column alone takes every score to about -200.
  std::vector<E> q(nq), k(nk_in), v(nv_in), dout(no), out(no);
  std::vector<float> dlse(rows_q), lse(rows_q);
  for (E& x : q) x = E(float(normal()));
  for (E& x : k) x = E(float(normal()));
  for (int64_t a = 0; a < nq && c.far; a += D) q[a] = E(float(-200 / rows[0].scale));
  for (int64_t a = 0; a < nk_in && c.far; a += D) k[a] = E(1.0f);
  for (E& x : v) x = E(float(normal()));
  for (E& x : dout) x = E(float(normal()));
  for (float& x : dlse) x = float(normal());
  const float nan = NAN;
  if (c.poison) {
    for (int64_t a = 0; a < nq; a++) {
      if (!live_q[a / (N * D)]) q[a] = E(nan);
    }
    for (int64_t a = 0; a < no; a++) {
      if (!live_q[a / (N * Dv)]) dout[a] = E(nan);
    }
    for (int64_t a = 0; a < nk && !c.shared; a++) {
      if (!live_k[a / (K * D)]) k[a] = E(nan);
    }
    for (int64_t a = 0; a < nv && !c.shared; a++) {
      if (!live_k[a / (K * Dv)]) v[a] = E(nan);
    }
    for (int64_t a = 0; a < rows_q; a++) {
      if (!live_q[a / T / N * T + a % T]) dlse[a] = nan;
    }
  }

  Array q_d(nq * 2), k_d(nk_in * 2), v_d(nv_in * 2), dout_d(no * 2), out_d(no * 2), lse_d(rows_q * 4),
      dlse_d(rows_q * 4);
  Array rows_d(B * sizeof(Row)), scales_d(B * 4), q_lens_d(B * 4), k_lens_d(B * 4);
  q_d.set(q), k_d.set(k), v_d.set(v), dout_d.set(dout), dlse_d.set(dlse), rows_d.set(rows), scales_d.set(scales);
  q_lens_d.set(q_lens), k_lens_d.set(k_lens);

  Array ref_out(no * 8), ref_lse(rows_q * 8), ref_delta(rows_q * 8), ref_dq(nq * 8), ref_dk(nk * 8), ref_dv(nv * 8),
      ref_ds(rows_q * 8);
  Naive<E> m{q_d.get<E>(),
             k_d.get<E>(),
             v_d.get<E>(),
             dout_d.get<E>(),
             c.dlse ? dlse_d.get<float>() : nullptr,
             rows_d.get<Row>(),
             c.T,
             c.S,
             c.N,
             c.K,
             c.D,
             c.value_dim(),
             c.shared,
             ref_out.get<double>(),
             ref_lse.get<double>(),
             ref_delta.get<double>(),
             ref_dq.get<double>(),
             ref_dk.get<double>(),
             ref_dv.get<double>(),
             ref_ds.get<double>()};
  const auto launch = [&](void (*kernel)(Naive<E>, int64_t), int64_t n) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned((n + 127) / 128)), config.blockDim = dim3(128);
    CHECK(cudaLaunchKernelEx(&config, kernel, m, n));
  };
  launch(naive_forward<E>, rows_q);
  launch(naive_dq<E>, rows_q);
  launch(naive_dkv<E>, B * K * S);
  CHECK(cudaDeviceSynchronize());
  const auto exact_out = ref_out.host<double>(), exact_lse = ref_lse.host<double>();
  for (int64_t a = 0; a < no; a++) out[a] = E(c.poison && !live_q[a / (N * Dv)] ? nan : float(exact_out[a]));
  for (int64_t a = 0; a < rows_q; a++) lse[a] = float(exact_lse[a]);
  out_d.set(out), lse_d.set(lse);

  Array dq_d(nq * 2), dk_d(nk * 2), dv_d(nv * 2), delta_d(rows_q * 4), dq_acc_d(nq * 4), dk_acc_d(nk * 4),
      dv_acc_d(nv * 4);
  const int64_t turns = (T + 31) / 32 + 1;
  Array order_d(B * N * turns * 4), dscale_d(rows_q * 4);
  Array* const written[] = {&dq_d, &dk_d, &dv_d, &delta_d, &dq_acc_d, &dk_acc_d, &dv_acc_d, &order_d, &dscale_d};

  Problem p{};
  p.dtype = c.bf16 ? DType::kBF16 : DType::kF16;
  for (int& x : p.batch_sizes) x = 1;
  p.batch_sizes[kMaxBatchAxes - 1] = c.B;
  p.B = c.B, p.T = c.T, p.S = c.S, p.N = c.N, p.K = c.K, p.D = c.D, p.Dv = c.value_dim();
  p.spec.scale = rows[0].scale, p.spec.softcap = c.softcap, p.spec.bottom_right = c.bottom_right;
  p.spec.window_left = c.left, p.spec.window_right = c.causal ? 0 : c.right, p.spec.deterministic = c.deterministic;
  const auto q_like = [&](const Array& x, int64_t cols) { return tensor(x, T * N * cols, N * cols, cols); };
  const auto k_like = [&](const Array& x, int64_t cols) { return tensor(x, S * K * cols, K * cols, cols); };
  const auto lse_like = [&](const Array& x) { return tensor(x, N * T, 1, T); };
  p.q = q_like(q_d, D), p.k = k_like(k_d, D), p.v = k_like(v_d, Dv);
  p.out = q_like(out_d, Dv), p.dout = q_like(dout_d, Dv);
  if (c.shared) p.k.batch[kMaxBatchAxes - 1] = p.v.batch[kMaxBatchAxes - 1] = 0;
  p.lse = lse_like(lse_d), p.delta = lse_like(delta_d);
  if (c.dlse) p.dlse = lse_like(dlse_d);
  p.dq = q_like(dq_d, D), p.dk = k_like(dk_d, D), p.dv = k_like(dv_d, Dv);
  p.dq_acc = tensor(dq_acc_d, N * T * D, D, T * D);
  if (N != K) p.dk_acc = tensor(dk_acc_d, K * S * D, D, S * D), p.dv_acc = tensor(dv_acc_d, K * S * Dv, Dv, S * Dv);
  if (!c.bare) p.order = tensor(order_d, N * turns, 0, turns);
  if (c.traced) p.extras.scale = tensor(scales_d, 1, 0, 0), p.grads.scale = lse_like(dscale_d);
  if (c.lengths) p.extras.query_lens = tensor(q_lens_d, 1, 0, 0), p.extras.key_lens = tensor(k_lens_d, 1, 0, 0);

  std::vector<E> dq, dk, dv;
  bool same = true, guarded = true;
  for (int repeat = 0; repeat < (c.deterministic ? 3 : 1); repeat++) {
    for (Array* x : written) x->poison();
    const Status s = cuda::backward(p, nullptr);
    if (!s.ok()) {
      std::printf("FAIL %s: %s\n", c.name().c_str(), s.error);
      return false;
    }
    CHECK(cudaDeviceSynchronize());
    const auto a = dq_d.host<E>(), b = dk_d.host<E>(), d = dv_d.host<E>();
    if (repeat > 0)
      same &= !memcmp(a.data(), dq.data(), nq * 2) && !memcmp(b.data(), dk.data(), nk * 2) &&
              !memcmp(d.data(), dv.data(), nv * 2);
    dq = a, dk = b, dv = d;
    for (Array* x : written) guarded &= x->guarded();
  }

  bool zeros = true;  // exactly, wherever nothing is read
  for (int64_t a = 0; a < nq; a++) zeros &= live_q[a / (N * D)] || float(dq[a]) == 0;
  for (int64_t a = 0; a < nk; a++) zeros &= live_k[a / (K * D)] || float(dk[a]) == 0;
  for (int64_t a = 0; a < nv; a++) zeros &= live_k[a / (K * Dv)] || float(dv[a]) == 0;
  const double magnitude = std::fabs(rows[0].scale);
  const double e_q = error(dq, ref_dq.host<double>(), 0.05 * magnitude),
               e_k = error(dk, ref_dk.host<double>(), 0.05 * magnitude);
  const double e_v = error(dv, ref_dv.host<double>(), 0.05);
  double e_s = 0;
  if (c.traced) {
    const auto ds = dscale_d.host<float>();
    e_s = error(ds, ref_ds.host<double>(), 0.05);
    for (int64_t a = 0; a < rows_q; a++) zeros &= live_q[a / T / N * T + a % T] || ds[a] == 0;
  }
  // Rounding of P and dS; a few times that of the result.
  const double limit = c.bf16 ? 8e-3 : 1.5e-3;
  const bool ok = e_q < limit && e_k < limit && e_v < limit && e_s < limit && zeros && same && guarded;
  std::printf("%s %s: dq %.1e dk %.1e dv %.1e", ok ? "ok  " : "FAIL", c.name().c_str(), e_q, e_k, e_v);
  if (c.traced) std::printf(" dscale %.1e", e_s);
  std::printf("%s%s%s\n", zeros ? "" : " NOT ZERO WHERE DEAD", same ? "" : " NOT REPEATABLE",
              guarded ? "" : " WROTE OUTSIDE");
  std::fflush(stdout);
  return ok;
}

std::vector<Case> cases() {
  std::vector<Case> r;
  const int dims[] = {64, 128, 256, 96, 192, 40, 80, 8, 168, 248};
  // Sizes around the tiles' edges.
  const int sizes[][2] = {{1, 1},     {7, 7},   {63, 65}, {64, 64},   {65, 63},
                          {129, 128}, {1, 129}, {129, 1}, {128, 200}, {8, 72}};
  int turn = 0;
  for (int D : dims) {
    for (const auto& s : sizes) {
      for (int mask = 0; mask < 3; mask++, turn++) {
        r.push_back({.T = s[0],
                     .S = s[1],
                     .D = D,
                     .bf16 = turn % 2 == 0,
                     .causal = mask > 0,
                     .bottom_right = mask == 2,
                     .dlse = turn % 3 == 0,
                     .poison = true,
                     .small = s[0] * s[1] < 200 || (D == 96 && mask == 1)});
      }
    }
  }
  for (int D : dims) {
    for (bool bf16 : {true, false}) {
      r.push_back({.B = 1, .T = 1000, .S = 1000, .N = 3, .K = 3, .D = D, .bf16 = bf16, .causal = true, .dlse = true});
      r.push_back(
          {.B = 2, .T = 300, .S = 777, .N = 1, .K = 1, .D = D, .bf16 = bf16, .causal = true, .bottom_right = true});
      r.push_back({.B = 2,
                   .T = 777,
                   .S = 300,
                   .N = 1,
                   .K = 1,
                   .D = D,
                   .bf16 = bf16,
                   .causal = true,
                   .bottom_right = true,
                   .poison = true});
      r.push_back({.B = 6,
                   .T = 190,
                   .S = 259,
                   .D = D,
                   .bf16 = bf16,
                   .causal = D % 3 == 0,
                   .bottom_right = D % 2 == 0,
                   .lengths = true,
                   .dlse = true,
                   .poison = true});
      r.push_back({.B = 6,
                   .T = 259,
                   .S = 190,
                   .D = D,
                   .bf16 = bf16,
                   .bottom_right = true,
                   .left = 70,
                   .right = 3,
                   .lengths = true,
                   .poison = true});
    }
    // Windows: both sides, left alone, a single diagonal, one that leaves most rows without keys.
    for (const auto& w : {std::pair{100, 30}, {64, -1}, {0, 0}, {17, 0}, {5, 200}}) {
      r.push_back({.T = 200, .S = 333, .D = D, .left = w.first, .right = w.second, .poison = true, .small = D == 128});
      r.push_back(
          {.T = 333, .S = 200, .D = D, .bottom_right = true, .left = w.first, .right = w.second, .poison = true});
    }
    // Everything that acts on a score.
    r.push_back({.T = 130,
                 .S = 200,
                 .D = D,
                 .causal = true,
                 .bottom_right = true,
                 .softcap = 1.5,
                 .dlse = true,
                 .poison = true,
                 .small = D == 64});
    r.push_back({.T = 130, .S = 200, .D = D, .bf16 = false, .scale = -0.1, .poison = true});
    r.push_back({.B = 6,
                 .T = 77,
                 .S = 100,
                 .D = D,
                 .causal = true,
                 .lengths = true,
                 .traced = true,
                 .dlse = true,
                 .poison = true,
                 .small = D == 40});
    r.push_back({.B = 3, .T = 131, .S = 64, .N = 4, .K = 2, .D = D, .softcap = 2, .traced = true});
    r.push_back({.T = 70, .S = 90, .D = D, .scale = 1e-30});
    r.push_back({.T = 70, .S = 90, .D = D, .causal = true, .far = true});
    r.push_back({.B = 3, .T = 70, .S = 90, .D = D, .lengths = true, .poison = true, .far = true});
    // Key heads with several query heads: split over blocks, in one block, in order.
    r.push_back({.B = 1,
                 .T = 129,
                 .S = 257,
                 .N = 8,
                 .K = 1,
                 .D = D,
                 .causal = true,
                 .bottom_right = true,
                 .poison = true,
                 .small = D == 64});
    r.push_back({.B = 2,
                 .T = 100,
                 .S = 100,
                 .N = 6,
                 .K = 2,
                 .D = D,
                 .bf16 = false,
                 .causal = true,
                 .lengths = true,
                 .poison = true});
    r.push_back({.B = 9, .T = 65, .S = 1000, .N = 4, .K = 2, .D = D});
    r.push_back({.B = 40, .T = 65, .S = 1000, .N = 4, .K = 2, .D = D, .left = 300});
    r.push_back({.B = 2,
                 .T = 200,
                 .S = 300,
                 .N = 6,
                 .K = 2,
                 .D = D,
                 .causal = true,
                 .bottom_right = true,
                 .deterministic = true,
                 .small = D == 64});
    r.push_back({.B = 3, .T = 333, .S = 1000, .N = 2, .K = 2, .D = D, .deterministic = true});
    r.push_back({.B = 3, .T = 1000, .S = 1000, .N = 2, .K = 2, .D = D, .causal = true, .deterministic = true});
    r.push_back({.B = 6,
                 .T = 500,
                 .S = 700,
                 .N = 2,
                 .K = 1,
                 .D = D,
                 .left = 90,
                 .right = 200,
                 .lengths = true,
                 .poison = true,
                 .deterministic = true});
    r.push_back({.B = 6,
                 .T = 100,
                 .S = 150,
                 .D = D,
                 .causal = true,
                 .lengths = true,
                 .traced = true,
                 .poison = true,
                 .deterministic = true});
    r.push_back({.B = 4, .T = 100, .S = 150, .D = D, .shared = true});
    r.push_back({.B = 2, .T = 200, .S = 300, .D = D, .causal = true, .bare = true});
  }
  // Values of fewer columns than keys: their own instance, and tiles that are partly empty.
  for (const auto& d : {std::pair{192, 128}, {64, 40}, {128, 96}, {256, 136}, {192, 120}, {168, 8}}) {
    const int D = d.first, Dv = d.second;
    r.push_back({.T = 65, .S = 63, .D = D, .Dv = Dv, .causal = true, .dlse = true, .poison = true, .small = true});
    r.push_back({.B = 1, .T = 300, .S = 200, .N = 3, .K = 3, .D = D, .Dv = Dv, .bf16 = false});
    r.push_back({.B = 2, .T = 1, .S = 129, .N = 4, .K = 2, .D = D, .Dv = Dv});
    r.push_back({.T = 200, .S = 333, .D = D, .Dv = Dv, .bf16 = false, .left = 100, .right = 30, .poison = true});
    r.push_back({.T = 333, .S = 200, .D = D, .Dv = Dv, .bottom_right = true, .left = 17, .right = 0, .poison = true});
    r.push_back({.B = 6,
                 .T = 100,
                 .S = 150,
                 .N = 6,
                 .K = 2,
                 .D = D,
                 .Dv = Dv,
                 .causal = true,
                 .lengths = true,
                 .dlse = true,
                 .poison = true});
    r.push_back({.B = 1,
                 .T = 129,
                 .S = 257,
                 .N = 8,
                 .K = 1,
                 .D = D,
                 .Dv = Dv,
                 .causal = true,
                 .bottom_right = true,
                 .poison = true});
    r.push_back({.T = 130, .S = 200, .D = D, .Dv = Dv, .causal = true, .softcap = 1.5, .traced = true, .poison = true});
    r.push_back({.B = 2, .T = 200, .S = 300, .N = 6, .K = 2, .D = D, .Dv = Dv, .causal = true, .deterministic = true});
    r.push_back({.B = 2, .T = 70, .S = 90, .D = D, .Dv = Dv, .shared = true});
  }
  r.push_back({.B = 1, .T = 4096, .S = 4096, .N = 2, .K = 2, .D = 128, .causal = true, .deterministic = true});
  r.push_back({.B = 1, .T = 4096, .S = 4096, .N = 2, .K = 1, .D = 64});
  r.push_back({.B = 70000, .T = 2, .S = 3, .N = 1, .K = 1, .D = 64});  // more heads than a grid's second axis has
  return r;
}

int main(int argc, char** argv) {
  bool small = false;
  std::string filter;
  for (int a = 1; a < argc; a++) {
    const std::string s = argv[a];
    if (s == "small")
      small = true;
    else if (s != "check")
      filter = s;
  }
  int passed = 0, failed = 0;
  for (const Case& c : cases()) {
    if ((small && !c.small) || c.name().find(filter) == std::string::npos) continue;
    ((c.bf16 ? run<__nv_bfloat16>(c) : run<__half>(c)) ? passed : failed)++;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0;
}
