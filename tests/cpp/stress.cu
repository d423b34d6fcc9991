// Random shapes through the library's dispatch, every element of every result against float64:
//
//   stress [check] [--count 2000] [--seed 1] [--backward] [--dims 64,128] [--dv] [--work 3e8]   seeds 1 .. 2000
//   stress --only SEED [--backward]                                one of them, as a failure's line names it
//   stress --repeat 1000 [--backward]                              given shapes, 1000 times each, bit for bit
//
// Results and workspaces are filled with garbage first and stand among bytes that must survive. A failing case is
// printed and the run goes on; one line of counts ends it. Exit status: 0 passed, 1 some failed, 2 CUDA error, 3 a hang.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "cuda/dispatch.h"
#include "stress_case.h"
#include "stress_device.cuh"
#include "stress_pairs.h"
#include "stress_reference.cuh"

namespace {

using namespace stress;
using jax_flash2::Problem;
using jax_flash2::Status;
using jax_flash2::Tensor;

constexpr double kPatience = 20;  // seconds

std::string g_now;  // what is running

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n  %s\n", what, cudaGetErrorString(error), g_now.c_str());
  std::fflush(stdout);
  std::_Exit(2);
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Waits for the device, but not for ever: a kernel that waits for itself must be named too.
void finish(const char* what) {
  cudaEvent_t done;
  require(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), what);
  require(cudaEventRecord(done), what);
  const double start = seconds();
  for (int turn = 0;; turn++) {
    const cudaError_t state = cudaEventQuery(done);
    if (state != cudaErrorNotReady) {
      require(state, what);
      break;
    }
    if (turn > 1000) std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (seconds() - start > kPatience) {
      std::printf("HANG in %s\n  %s\n", what, g_now.c_str());
      std::fflush(stdout);
      std::_Exit(3);
    }
  }
  cudaEventDestroy(done);
}

// Device memory that grows as needed and is kept, so that a case allocates nothing.
class Buffer {
 public:
  void* need(size_t bytes) {
    if (bytes > size_) {
      require(cudaFree(data_), "cudaFree");
      require(cudaMalloc(&data_, size_ = bytes * 3 / 2 + 4096), "cudaMalloc");
    }
    return data_;
  }
  template <class T>
  T* upload(const std::vector<T>& x) {
    T* const to = static_cast<T*>(need(std::max<size_t>(x.size(), 4) * sizeof(T)));
    require(cudaMemcpyAsync(to, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
    return to;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// The forward's workspace, in trees whose Problem has it.
template <class P>
void give_queue(P& p, const Tensor& t) {
  if constexpr (requires { p.queue; }) p.queue = t;
}

template <class Kernel, class... Args>
void launch(int64_t threads, int block, Kernel kernel, Args... args) {
  if (threads > 0) kernel<<<unsigned((threads + block - 1) / block), block>>>(args...);
}

constexpr int64_t kGuard = 512;  // elements of garbage before and behind a result

struct Worst {
  double share = 0;
  uint64_t seed = 0;
  void see(double x, uint64_t s) {
    if (x > share) share = x, seed = s;
  }
};

class Runner {
 public:
  bool backward = false;
  int refused = 0;
  Worst worst[8];  // out, lse, dq, dk, dv, dscale

  bool run(const Case& c) { return c.bf16 ? run<__nv_bfloat16>(c) : run<__half>(c); }
  bool repeat(const Case& c, int times) { return c.bf16 ? repeat<__nv_bfloat16>(c, times) : repeat<__half>(c, times); }

 private:
  Buffer rows_, lens_q_, lens_k_, scales_, pairs_[7], live_q_, live_k_, inputs_[4], exact_, dlse_, verdict_, first_;
  Buffer out_, lse_, queue_, grads_[3], delta_, dq_acc_, dk_acc_, dv_acc_, order_, dscale_;

  template <class E>
  struct Prepared {
    Problem p{};
    stress::Call<E> reference{};
    Layout q, k, v, out, dq, dk, dv;
    Tensor queue{};
    int64_t rows = 0;
  };

  static Tensor tensor(const void* data, const View& v) {
    Tensor t;
    t.data = const_cast<void*>(data);
    t.batch[0] = v.batch0, t.batch[1] = v.batch1, t.row = v.row, t.head = v.head, t.col = 1;
    return t;
  }
  // [B, heads, length, D] dense; D = 0: no column.
  static Tensor dense(const Case& c, const void* data, int64_t heads, int64_t length, int64_t D) {
    const int64_t columns = std::max<int64_t>(D, 1), batch = heads * length * columns;
    Tensor t = tensor(data, {c.B1 * batch, batch, columns, length * columns});
    t.col = D > 0;
    return t;
  }

  // A result between guards; poison() writes the garbage.
  template <class E>
  E* result(Buffer& buffer, const Layout& at) {
    return static_cast<E*>(buffer.need((at.size() + 2 * kGuard) * sizeof(E))) + kGuard;
  }
  template <class E>
  void poison(E* data, const Layout& at, int byte = 0xff) {
    require(cudaMemsetAsync(data - kGuard, byte, (at.size() + 2 * kGuard) * sizeof(E)), "memset");
  }

  // The table to the reference, the operands to the kernels.
  void tell_pairs(const Case& c, std::vector<Row>& rows, Problem& p) {
    const PairOperands pairs = draw_pairs(c, rows);
    const uint8_t* const table = pairs_[0].upload(pairs.table);
    for (int b = 0; b < c.B(); b++) rows[b].table = table + int64_t(b) * c.T * c.S, rows[b].table_cols = c.S;
    const auto operand = [&](Buffer& buffer, const auto& x, int64_t batch, int64_t row, int64_t col) {
      Tensor t;
      t.data = buffer.upload(x);
      t.batch[0] = c.B1 * batch, t.batch[1] = batch, t.row = row, t.col = col;
      return t;
    };
    p.extras.key_spans = operand(pairs_[1], pairs.key_spans, c.T * 2, 2, 1);
    p.extras.query_spans = operand(pairs_[2], pairs.query_spans, c.S * 2, 2, 1);
    p.extras.span_flags = operand(pairs_[3], pairs.flags, 1, 0, 0);
    if (!pairs.query_ids.empty()) {
      p.extras.query_ids = operand(pairs_[4], pairs.query_ids, c.T, 1, 0);
      p.extras.key_ids = operand(pairs_[5], pairs.key_ids, c.S, 1, 0);
    }
    if (!pairs.mask.empty()) p.extras.mask = operand(pairs_[6], pairs.mask, int64_t(c.T) * c.S, c.S, 1);
    require(cudaDeviceSynchronize(), "upload");  // before the vectors go
  }

  template <class E>
  Prepared<E> prepare(const Case& c) {
    const Placement unshared_q{c.q.heads_first, false, false, c.q.pad_inner, c.q.pad_outer},
        unshared_k{c.k.heads_first, false, false, c.k.pad_inner, c.k.pad_outer},
        unshared_v{c.v.heads_first, false, false, c.v.pad_inner, c.v.pad_outer};
    Prepared<E> r{.q = Layout(c, c.q, c.T, c.N, c.D),
                  .k = Layout(c, c.k, c.S, c.K, c.D),
                  .v = Layout(c, c.v, c.S, c.K, c.Dv),
                  .out = Layout(c, c.out, c.T, c.N, c.Dv),
                  .dq = Layout(c, unshared_q, c.T, c.N, c.D),
                  .dk = Layout(c, unshared_k, c.S, c.K, c.D),
                  .dv = Layout(c, unshared_v, c.S, c.K, c.Dv)};
    const int B = c.B();
    r.rows = int64_t(B) * c.N * c.T;

    std::vector<Row> rows(B);
    for (int b = 0; b < B; b++) {
      Row& row = rows[b];
      row.q_len = c.q_lens ? std::clamp(c.query_lens[b], 0, c.T) : c.T;
      row.k_len = c.k_lens ? std::clamp(c.key_lens[b], 0, c.S) : c.S;
      row.left = c.left, row.right = c.right, row.off = c.bottom_right ? row.k_len - row.q_len : 0;
      row.scale = c.traced ? double(c.scales[b]) : double(float(c.scale)), row.softcap = double(float(c.softcap));
    }
    if (c.pairs != Pairs::none) tell_pairs(c, rows, r.p);
    const Row* const rows_d = rows_.upload(rows);
    auto* const live_q = static_cast<unsigned char*>(live_q_.need(size_t(B) * c.T + 1));
    auto* const live_k = static_cast<unsigned char*>(live_k_.need(size_t(B) * c.S + 1));
    launch(int64_t(B) * c.T, 128, find_live, rows_d, B, c.T, c.S, true, live_q);
    launch(int64_t(B) * c.S, 128, find_live, rows_d, B, c.T, c.S, false, live_k);

    const Layout* const layouts[] = {&r.q, &r.k, &r.v, &r.out};
    E* inputs[4];
    for (int x = 0; x < (backward ? 4 : 3); x++) {
      const Layout& at = *layouts[x];
      inputs[x] = static_cast<E*>(inputs_[x].need(at.size() * sizeof(E) + 256));
      const unsigned char* const live = !c.poison ? nullptr : x == kQuery || x == kGradient ? live_q : live_k;
      launch(at.size(), 256, fill<E>, inputs[x], at, at.size(), Kind(x), c.data, c.seed, live);
    }

    Problem& p = r.p;
    p.dtype = c.bf16 ? jax_flash2::DType::kBF16 : jax_flash2::DType::kF16;
    p.B = B, p.T = c.T, p.S = c.S, p.N = c.N, p.K = c.K, p.D = c.D, p.Dv = c.Dv;
    p.batch_sizes[0] = c.B0, p.batch_sizes[1] = c.B1, p.batch_sizes[2] = p.batch_sizes[3] = 1;
    p.spec.scale = c.traced ? 777 : c.scale, p.spec.softcap = c.softcap;
    p.spec.window_left = c.left, p.spec.window_right = c.right, p.spec.bottom_right = c.bottom_right;
    p.spec.deterministic = c.deterministic;
    p.q = tensor(inputs[0], r.q.view()), p.k = tensor(inputs[1], r.k.view()), p.v = tensor(inputs[2], r.v.view());
    if (c.q_lens) p.extras.query_lens = dense(c, lens_q_.upload(c.query_lens), 1, 1, 0);
    if (c.k_lens) p.extras.key_lens = dense(c, lens_k_.upload(c.key_lens), 1, 1, 0);
    if (c.traced) p.extras.scale = dense(c, scales_.upload(c.scales), 1, 1, 0);
    p.out = tensor(result<E>(out_, r.out), r.out.view());
    p.lse = dense(c, lse_.need(r.rows * 4), c.N, c.T, 0);
    r.queue = dense(c, queue_.need(int64_t(B) * c.N * 4), c.N, 1, 0);
    if (c.queue) give_queue(p, r.queue);

    stress::Call<E>& e = r.reference;
    e.B1 = c.B1, e.T = c.T, e.S = c.S, e.N = c.N, e.K = c.K, e.D = c.D, e.Dv = c.Dv;
    // Powers that are all but equal lie on both sides of one rounding boundary: half an ulp each, not what is usual.
    const bool alike = c.scale != 0 && std::abs(c.scale) * std::sqrt(double(c.D)) < 1e-4;
    e.unit = (c.bf16 ? 0x1p-9 : 0x1p-12) * (alike ? 2 : 1), e.least = c.bf16 ? 0 : 0x1p-25;
    e.q = inputs[0], e.k = inputs[1], e.v = inputs[2];
    e.vq = r.q.view(), e.vk = r.k.view(), e.vv = r.v.view(), e.rows = rows_d;
    if (backward) prepare_backward(c, r, inputs[3]);
    return r;
  }

  template <class E>
  void prepare_backward(const Case& c, Prepared<E>& r, E* dout) {
    Problem& p = r.p;
    stress::Call<E>& e = r.reference;
    p.dout = tensor(dout, r.out.view()), e.dout = dout, e.vdout = r.out.view();
    if (c.dlse) {
      std::vector<float> dlse(r.rows);
      Random random(c.seed ^ 0x5555);
      for (float& x : dlse) x = float(2 * random.uniform() - 1);
      const float* const data = dlse_.upload(dlse);
      p.dlse = dense(c, data, c.N, c.T, 0), e.dlse = data;
    }
    const int64_t B = c.B(), keys = B * c.K * c.S, turns = (c.T + 31) / 32 + 1;
    p.dq = tensor(result<E>(grads_[0], r.dq), r.dq.view()), p.dk = tensor(result<E>(grads_[1], r.dk), r.dk.view());
    p.dv = tensor(result<E>(grads_[2], r.dv), r.dv.view());
    p.delta = dense(c, delta_.need(r.rows * 4), c.N, c.T, 0);
    p.dq_acc = dense(c, dq_acc_.need(r.rows * c.D * 4), c.N, c.T, c.D);
    if (c.N != c.K) {
      p.dk_acc = dense(c, dk_acc_.need(keys * c.D * 4 + 4), c.K, c.S, c.D);
      p.dv_acc = dense(c, dv_acc_.need(keys * c.Dv * 4 + 4), c.K, c.S, c.Dv);
    }
    if (c.deterministic || c.queue) {
      p.order = dense(c, order_.need(B * c.N * turns * 4), c.N, turns, 0);
      p.order.row = 0;
    }
    if (c.traced) p.grads.scale = dense(c, dscale_.need(r.rows * 4), c.N, c.T, 0);
  }

  // Fills everything that the call writes.
  template <class E>
  void poison_all(const Case& c, Prepared<E>& r, int byte = 0xff) {
    poison(static_cast<E*>(r.p.out.data), r.out, byte);
    require(cudaMemsetAsync(r.p.lse.data, byte, r.rows * 4), "memset");
    require(cudaMemsetAsync(r.queue.data, byte, int64_t(c.B()) * c.N * 4), "memset");
    if (!backward) return;
    poison(static_cast<E*>(r.p.dq.data), r.dq, byte), poison(static_cast<E*>(r.p.dk.data), r.dk, byte);
    poison(static_cast<E*>(r.p.dv.data), r.dv, byte);
    const int64_t keys = int64_t(c.B()) * c.K * c.S, turns = (c.T + 31) / 32 + 1;
    require(cudaMemsetAsync(r.p.delta.data, byte, r.rows * 4), "memset");
    require(cudaMemsetAsync(r.p.dq_acc.data, byte, r.rows * c.D * 4), "memset");
    if (c.N != c.K && keys > 0) {
      require(cudaMemsetAsync(r.p.dk_acc.data, byte, keys * c.D * 4), "memset");
      require(cudaMemsetAsync(r.p.dv_acc.data, byte, keys * c.Dv * 4), "memset");
    }
    if (r.p.order.present()) require(cudaMemsetAsync(r.p.order.data, byte, int64_t(c.B()) * c.N * turns * 4), "memset");
    if (c.traced) require(cudaMemsetAsync(r.p.grads.scale.data, byte, r.rows * 4), "memset");
  }

  Status call(const Problem& p) {
    const Status status = jax_flash2::cuda::forward(p, nullptr);
    return status.ok() && backward ? jax_flash2::cuda::backward(p, nullptr) : status;
  }

  template <class E>
  void compute_exact(const Case& c, Prepared<E>& r) {
    const int64_t keys = int64_t(c.B()) * c.K * c.S, queries = r.rows;
    const int64_t sizes[] = {queries * c.Dv, queries * c.Dv, queries,       queries,    queries,
                             queries,        queries * c.D,  queries * c.D, keys * c.D, keys * c.D,
                             keys * c.Dv,    keys * c.Dv,    queries,       queries};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    double* at = static_cast<double*>(exact_.need(total * sizeof(double)));
    Exact& e = r.reference.exact;
    double** const arrays[] = {&e.out,         &e.out_error, &e.lse,      &e.lse_error,   &e.delta,
                               &e.delta_error, &e.dq,        &e.dq_error, &e.dk,          &e.dk_error,
                               &e.dv,          &e.dv_error,  &e.dscale,   &e.dscale_error};
    for (int x = 0; x < 14; x++) *arrays[x] = at, at += sizes[x];
    exact_forward<E><<<unsigned(queries), kThreads>>>(r.reference, backward);
    if (!backward) return;
    exact_dq<E><<<unsigned(queries), kThreads>>>(r.reference);
    if (keys > 0) exact_dkv<E><<<unsigned(keys), kThreads>>>(r.reference);
  }

  template <class E>
  bool run(const Case& c) {
    g_now = c.text();
    Prepared<E> r = prepare<E>(c);
    compute_exact(c, r);
    poison_all(c, r);
    require(cudaGetLastError(), "the reference");
    const Status status = call(r.p);
    if (!status.ok()) {
      if (c.S == 0) return refused++, true;
      std::printf("FAIL %s\n     refused: %s\n", g_now.c_str(), status.error);
      return false;
    }
    require(cudaGetLastError(), "the launch");
    finish("the kernels");

    constexpr int kResults = 6;
    const char* const names[kResults] = {"out", "lse", "dq", "dk", "dv", "dscale"};
    auto* const verdicts = static_cast<Verdict*>(verdict_.need(kResults * sizeof(Verdict)));
    std::vector<Verdict> host(kResults, Verdict{~0ull, 0, 0});
    require(cudaMemcpy(verdicts, host.data(), kResults * sizeof(Verdict), cudaMemcpyHostToDevice), "upload");
    const Exact& e = r.reference.exact;
    const auto of = [&](int x, const Tensor& t, const Layout& at, const double* exact, const double* error) {
      launch(at.size(), 256, compare<E>, static_cast<const E*>(t.data), at, at.size(), exact, error, verdicts + x);
    };
    const auto of_rows = [&](int x, const Tensor& t, const double* exact, const double* error) {
      launch(r.rows, 256, compare_rows, static_cast<const float*>(t.data), r.rows, exact, error, verdicts + x);
    };
    of(0, r.p.out, r.out, e.out, e.out_error), of_rows(1, r.p.lse, e.lse, e.lse_error);
    if (backward) {
      of(2, r.p.dq, r.dq, e.dq, e.dq_error), of(3, r.p.dk, r.dk, e.dk, e.dk_error);
      of(4, r.p.dv, r.dv, e.dv, e.dv_error);
      if (c.traced) of_rows(5, r.p.grads.scale, e.dscale, e.dscale_error);
    }
    require(cudaMemcpy(host.data(), verdicts, kResults * sizeof(Verdict), cudaMemcpyDeviceToHost), "verdict");

    std::string trouble;
    for (int x = 0; x < kResults; x++) {
      float share;
      std::memcpy(&share, &host[x].worst, 4);
      worst[x].see(share, c.seed);
      if (host[x].wrong) trouble += describe(c, r, x, names[x], host[x]);
    }
    guard(r.p.out, r.out, "out", &trouble, E{});
    if (backward) guard(r.p.dq, r.dq, "dq", &trouble, E{}), guard(r.p.dk, r.dk, "dk", &trouble, E{});
    if (backward) guard(r.p.dv, r.dv, "dv", &trouble, E{});
    if (trouble.empty()) return true;
    std::printf("FAIL %s\n%s", g_now.c_str(), trouble.c_str());
    std::fflush(stdout);
    return false;
  }

  // The first wrong element, in words.
  template <class E>
  std::string describe(const Case& c, const Prepared<E>& r, int which, const char* name, const Verdict& v) {
    const Exact& e = r.reference.exact;
    const Layout* const layouts[] = {&r.out, nullptr, &r.dq, &r.dk, &r.dv, nullptr};
    const Tensor* const tensors[] = {&r.p.out, &r.p.lse, &r.p.dq, &r.p.dk, &r.p.dv, &r.p.grads.scale};
    const double* const exact[] = {e.out, e.lse, e.dq, e.dk, e.dv, e.dscale};
    const double* const errors[] = {e.out_error, e.lse_error, e.dq_error, e.dk_error, e.dv_error, e.dscale_error};
    int64_t from = int64_t(v.first);
    char text[240], place[120];
    double got, want, allowed;
    if (const Layout* at = layouts[which]) {
      int b0, b1, l, h, d;
      E value;
      require(cudaMemcpy(&value, static_cast<const E*>(tensors[which]->data) + from, sizeof(E), cudaMemcpyDeviceToHost),
              "read");
      got = double(float(value));
      if (!at->element(from, &b0, &b1, &l, &h, &d)) {
        std::snprintf(text, sizeof text, "     %s: wrote %g between rows at %lld (%u wrong)\n", name, got,
                      static_cast<long long>(from), v.wrong);
        return text;
      }
      from = (((int64_t(b0) * at->B1 + b1) * at->H + h) * at->L + l) * at->D + d;
      std::snprintf(place, sizeof place, "b%d,%d head %d position %d column %d", b0, b1, h, l, d);
    } else {
      float value;
      require(cudaMemcpy(&value, static_cast<const float*>(tensors[which]->data) + from, 4, cudaMemcpyDeviceToHost),
              "read");
      got = double(value);
      std::snprintf(place, sizeof place, "b%lld head %lld position %lld", static_cast<long long>(from / c.T / c.N),
                    static_cast<long long>(from / c.T % c.N), static_cast<long long>(from % c.T));
    }
    require(cudaMemcpy(&want, exact[which] + from, 8, cudaMemcpyDeviceToHost), "read");
    require(cudaMemcpy(&allowed, errors[which] + from, 8, cudaMemcpyDeviceToHost), "read");
    std::snprintf(text, sizeof text, "     %s: %u wrong, first %.9g for %.9g +- %.3g at %s\n", name, v.wrong, got, want,
                  allowed, place);
    return text;
  }

  template <class E>
  void guard(const Tensor& t, const Layout& at, const char* name, std::string* trouble, E) {
    std::vector<uint16_t> g(2 * kGuard);
    const E* const data = static_cast<const E*>(t.data);
    require(cudaMemcpy(g.data(), data - kGuard, kGuard * 2, cudaMemcpyDeviceToHost), "read");
    require(cudaMemcpy(g.data() + kGuard, data + at.size(), kGuard * 2, cudaMemcpyDeviceToHost), "read");
    for (uint16_t x : g) {
      if (x == 0xffff) continue;
      *trouble += std::string("     wrote outside ") + name + "\n";
      return;
    }
  }

  // The same bits every time, whatever lies in the results and in shared memory before, and whatever runs beside.
  template <class E>
  bool repeat(const Case& c, int times) {
    g_now = c.text();
    Prepared<E> r = prepare<E>(c);
    struct Part {
      const void* data;
      int64_t size;  // 16-bit units
    };
    std::vector<Part> parts{{r.p.out.data, r.out.size()}, {r.p.lse.data, r.rows * 2}};
    if (backward)
      parts.insert(parts.end(), {{r.p.dq.data, r.dq.size()}, {r.p.dk.data, r.dk.size()}, {r.p.dv.data, r.dv.size()}});
    int64_t total = 0;
    for (const Part& part : parts) total += part.size;
    auto* const first = static_cast<uint16_t*>(first_.need(total * 2));
    auto* const counts = static_cast<unsigned int*>(verdict_.need(parts.size() * 4));
    require(cudaMemset(counts, 0, parts.size() * 4), "memset");

    constexpr int kShared = 160 * 1024;
    require(cudaFuncSetAttribute(disturb, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "disturb");
    cudaStream_t beside;
    require(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "stream");
    Random random(c.seed);
    for (int time = 0; time < times; time++) {
      poison_all(c, r, time == 0 ? 0 : random.within(0, 255));
      disturb<<<132, 256, kShared>>>(0);
      if (time % 2) disturb<<<unsigned(random.within(1, 100)), 64, kShared, beside>>>(random.within(0, 100000));
      const Status status = call(r.p);
      if (!status.ok()) {
        std::printf("FAIL %s\n     refused: %s\n", g_now.c_str(), status.error);
        return false;
      }
      uint16_t* at = first;
      for (size_t x = 0; x < parts.size(); at += parts[x].size, x++) {
        if (time == 0) {
          require(cudaMemcpyAsync(at, parts[x].data, parts[x].size * 2, cudaMemcpyDeviceToDevice), "copy");
        } else {
          launch(std::min<int64_t>(parts[x].size, 256 * 1024), 256, differ, static_cast<const uint16_t*>(parts[x].data),
                 at, parts[x].size, counts + x);
        }
      }
      if (time % 100 == 99) finish("the repeats");
    }
    finish("the repeats");
    require(cudaStreamDestroy(beside), "stream");
    std::vector<unsigned int> host(parts.size());
    require(cudaMemcpy(host.data(), counts, parts.size() * 4, cudaMemcpyDeviceToHost), "counts");
    const char* const names[] = {"out", "lse", "dq", "dk", "dv"};
    bool same = true;
    for (size_t x = 0; x < parts.size(); x++) {
      if (host[x]) std::printf("FAIL %s differs in %u places: %s\n", names[x], host[x], g_now.c_str());
      same &= host[x] == 0;
    }
    return same;
  }
};

// Tiles of every head dim, several a block; masks that cut them; rows that outgrow their reference and are done again.
std::vector<Case> repeated(const std::vector<int>& dims) {
  std::vector<Case> list;
  const auto add = [&](Case c) {
    c.seed = 1000 + list.size();
    if (c.Dv == 0) c.Dv = c.D;
    c.scale = 1 / std::sqrt(double(c.D)), c.deterministic = true;
    c.query_lens.assign(c.B(), c.T - 3), c.key_lens.assign(c.B(), c.S / 2 + 1), c.scales.assign(c.B(), 0.1f);
    list.push_back(c);
  };
  for (int D : dims) {
    add({.bf16 = true, .B0 = 2, .T = 1024, .S = 1024, .N = 8, .K = 8, .D = D, .Dv = 0});
    add({.bf16 = true, .B0 = 2, .T = 1000, .S = 1000, .N = 8, .K = 2, .D = D, .Dv = 0, .right = 0});
    add({.bf16 = false,
         .B0 = 1,
         .T = 2048,
         .S = 2048,
         .N = 8,
         .K = 8,
         .D = D,
         .Dv = 0,
         .right = 0,
         .data = Data::falling});
    add({.bf16 = true, .B0 = 1, .T = 1500, .S = 2000, .N = 8, .K = 4, .D = D, .Dv = 0, .data = Data::jump});
    add({.bf16 = false,
         .B0 = 3,
         .T = 700,
         .S = 900,
         .N = 6,
         .K = 3,
         .D = D,
         .Dv = 0,
         .left = 200,
         .right = 50,
         .k_lens = true});
    if (D == 192) add({.bf16 = true, .B0 = 2, .T = 1000, .S = 1000, .N = 8, .K = 8, .D = D, .Dv = 128, .right = 0});
  }
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  int count = 2000, repeats = 0;
  uint64_t seed = 1;
  Options options;
  Runner runner;
  for (int a = 1; a < argc; a++) {
    const std::string name = argv[a];
    const auto value = [&] { return a + 1 < argc ? argv[++a] : "0"; };
    if (name == "check")
      count = 500;  // as the other tests of this folder are called
    else if (name == "--count")
      count = std::atoi(value());
    else if (name == "--seed")
      seed = std::strtoull(value(), nullptr, 10);
    else if (name == "--only")
      seed = std::strtoull(value(), nullptr, 10), count = 1;
    else if (name == "--repeat")
      repeats = std::atoi(value());
    else if (name == "--backward")
      runner.backward = true;
    else if (name == "--work")
      options.most_work = std::atof(value());
    else if (name == "--dims") {
      for (const char* s = value(); *s; s += *s == ',')
        options.dims.push_back(int(std::strtol(s, const_cast<char**>(&s), 10)));
    } else {
      std::printf("%s: unknown argument %s\n", argv[0], argv[a]);
      return 2;
    }
  }
  int device = 0;
  cudaDeviceProp device_facts;
  require(cudaGetDevice(&device), "cudaGetDevice");
  require(cudaGetDeviceProperties(&device_facts, device), "cudaGetDeviceProperties");
  const char* const arch = jax_flash2::cuda::arch_for(device_facts.major, device_facts.minor);
  const double start = seconds();
  int passed = 0, failed = 0;
  if (repeats) {
    for (const Case& c : repeated(options.dims.empty() ? std::vector<int>{64, 96, 128, 192, 256} : options.dims))
      (runner.repeat(c, repeats) ? passed : failed)++;
    std::printf("%d shapes %d times each: %d the same bit for bit, %d not; %s, %s, %.1f s\n", passed + failed, repeats,
                passed, failed, device_facts.name, arch ? arch : "no kernels", seconds() - start);
    return failed > 0;
  }
  for (int x = 0; x < count; x++) (runner.run(draw(seed + x, options)) ? passed : failed)++;
  std::printf("largest share of what is allowed:");
  const char* const names[] = {"out", "lse", "dq", "dk", "dv", "dscale"};
  for (int x = 0; x < (runner.backward ? 6 : 2); x++)
    std::printf(" %s %.2f (seed %llu)", names[x], runner.worst[x].share,
                static_cast<unsigned long long>(runner.worst[x].seed));
  std::printf(
      "\n%d cases from seed %llu: %d passed, %d failed, %d of them not served (no key); %s, %s, "
      "%.1f s\n",
      count, static_cast<unsigned long long>(seed), passed, failed, runner.refused, device_facts.name,
      arch ? arch : "no kernels", seconds() - start);
  return failed > 0;
}
