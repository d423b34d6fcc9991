// Standalone test of the CUDA kernels: kernels check [small] [words that a case's name must hold ...]
// Every case against float64 by the definition; outputs are poisoned first, and what lies between rows must stay
// poisoned. `small` leaves out what takes long under compute-sanitizer. Needs a GPU and nothing else.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "attention_cases.h"
#include "core/problem.h"
#include "cuda/element.h"
#ifdef JAX_FLASH2_TEST_SM90
#include "cuda/sm90/forward.cuh"
namespace arch = jax_flash2::cuda::sm90;
#else
#include "cuda/sm80/forward.cuh"
namespace arch = jax_flash2::cuda::sm80;
#endif

namespace {

using namespace cases;
using jax_flash2::Problem;
using jax_flash2::Status;
using jax_flash2::Tensor;

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

// Device memory, filled with ones (NaN in every dtype) unless given contents.
class Device {
 public:
  explicit Device(size_t bytes) : bytes_(bytes) {
    require(cudaMalloc(&data_, std::max<size_t>(bytes, 16)), "cudaMalloc");
    require(cudaMemset(data_, 0xff, std::max<size_t>(bytes, 16)), "cudaMemset");
  }
  template <class T>
  explicit Device(const std::vector<T>& host) : Device(host.size() * sizeof(T)) {
    if (bytes_) require(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice), "copy to device");
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(data_); }
  void* get() const { return data_; }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> host(bytes_ / sizeof(T));
    if (bytes_) require(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), "copy from device");
    return host;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// Strides of a tensor [B (or two axes), length, heads, D]; a batch of one that others share has stride 0.
Tensor describe(const Case& c, const Tensor16& t, const Device& memory) {
  Tensor r;
  r.data = memory.get();
  const int64_t batch = t.B == c.B ? int64_t(t.length) * t.row : 0;
  r.batch[0] = c.two_axes ? batch * (c.B / 2) : batch, r.batch[1] = c.two_axes ? batch : 0;
  r.row = t.row, r.head = t.D, r.col = 1;
  return r;
}

// float32 [B, N, T], and one value a batch row.
Tensor describe_rows(const Case& c, const Device& memory) {
  Tensor r;
  r.data = memory.get();
  const int64_t batch = int64_t(c.N) * c.T;
  r.batch[0] = c.two_axes ? batch * (c.B / 2) : batch, r.batch[1] = c.two_axes ? batch : 0;
  r.head = c.T, r.row = 1;
  return r;
}
Tensor describe_scalars(const Case& c, const Device& memory) {
  Tensor r;
  r.data = memory.get();
  r.batch[0] = c.two_axes ? c.B / 2 : 1, r.batch[1] = c.two_axes ? 1 : 0;
  return r;
}

struct Call {
  Device q, k, v, query_lens, key_lens, scale;
  Problem p{};

  Call(const Case& c, const Inputs& in)
      : q(in.q.raw), k(in.k.raw), v(in.v.raw), query_lens(c.query_lens), key_lens(c.key_lens), scale(c.traced_scale) {
    p.dtype = c.type == Type::bf16 ? jax_flash2::DType::kBF16 : jax_flash2::DType::kF16;
    p.B = c.B, p.T = c.T, p.S = c.S, p.N = c.N, p.K = c.K, p.D = p.Dv = c.D;
    p.batch_sizes[0] = c.two_axes ? 2 : c.B, p.batch_sizes[1] = c.two_axes ? c.B / 2 : 1;
    p.batch_sizes[2] = p.batch_sizes[3] = 1;
    p.spec.scale = c.scale_of(0), p.spec.softcap = c.softcap;
    p.spec.window_left = c.left, p.spec.window_right = c.right, p.spec.bottom_right = c.bottom_right;
    p.q = describe(c, in.q, q), p.k = describe(c, in.k, k), p.v = describe(c, in.v, v);
    if (!c.query_lens.empty()) p.extras.query_lens = describe_scalars(c, query_lens);
    if (!c.key_lens.empty()) p.extras.key_lens = describe_scalars(c, key_lens);
    if (!c.traced_scale.empty()) p.extras.scale = describe_scalars(c, scale), p.spec.scale = 777;
  }
};

template <class Element>
Status run_forward(const Problem& p) {
  if (p.D <= 64) return arch::forward<Element, 64>(p, nullptr);
  if (p.D <= 96) return arch::forward<Element, 96>(p, nullptr);
  if (p.D <= 128) return arch::forward<Element, 128>(p, nullptr);
  if (p.D <= 192) return arch::forward<Element, 192>(p, nullptr);
  return arch::forward<Element, 256>(p, nullptr);
}

// The first thing wrong with a forward result, or nothing. `worst` is the largest share of the tolerance used up.
std::string judge(const Case& c, const Truth& truth, const Tensor16& out, const std::vector<float>& lse,
                  double& worst) {
  const auto at = [&](int b, int n, int i, int d) {
    return " at b" + std::to_string(b) + " n" + std::to_string(n) + " i" + std::to_string(i) + " d" + std::to_string(d);
  };
  for (int b = 0; b < c.B; b++)
    for (int i = 0; i < c.T; i++) {
      for (int n = 0; n < c.N; n++) {
        const size_t row = (size_t(b) * c.N + n) * c.T + i;
        const bool empty = truth.lse[row] == -INFINITY;
        const double lse_tolerance = truth.lse_error[row] + 4e-7 * std::fabs(truth.lse[row]);
        const double lse_error = empty ? (lse[row] == -INFINITY ? 0 : INFINITY) : std::fabs(lse[row] - truth.lse[row]);
        if (!(lse_error <= lse_tolerance))
          return "lse " + std::to_string(lse[row]) + " for " + std::to_string(truth.lse[row]) + at(b, n, i, -1);
        if (!empty) worst = std::max(worst, lse_error / lse_tolerance);
        for (int d = 0; d < c.D; d++) {
          const double want = truth.out[row * c.D + d], got = out.get(b, i, n, d);
          // Ten standard deviations of independent roundings; scores that are off move all by their part.
          double tolerance = 6 * truth.spread[row * c.D + d] + truth.lse_error[row] + 1e-7;
          if (empty || c.data == Data::huge) tolerance = 0;
          if (!(std::fabs(got - want) <= tolerance))
            return "out " + std::to_string(got) + " for " + std::to_string(want) + " +- " + std::to_string(tolerance) +
                   at(b, n, i, d);
          if (tolerance > 0) worst = std::max(worst, std::fabs(got - want) / tolerance);
        }
      }
      for (int x = c.N * c.D; x < out.row; x++)
        if (out.raw[out.index(b, i, 0, x)] != 0xffff) return "wrote between rows" + at(b, -1, i, x);
    }
  return "";
}

std::string check_forward(const Case& c, double& worst) {
  const Inputs in(c);
  Call call(c, in);
  Tensor16 out(c, c.B, c.T, c.N);
  const Device out_memory(out.raw.size() * 2), lse_memory(size_t(c.B) * c.N * c.T * 4), queue_memory(4);
  call.p.out = describe(c, out, out_memory), call.p.lse = describe_rows(c, lse_memory);
  call.p.queue.data = queue_memory.get();
  const Status status =
      c.type == Type::bf16 ? run_forward<jax_flash2::cuda::bf16>(call.p) : run_forward<jax_flash2::cuda::f16>(call.p);
  if (!status.ok()) return status.error;
  require(cudaGetLastError(), c.name.c_str());
  require(cudaDeviceSynchronize(), c.name.c_str());
  out.raw = out_memory.read<uint16_t>();
  return judge(c, forward_truth(c, in), out, lse_memory.read<float>(), worst);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || std::strcmp(argv[1], "check")) {
    std::printf("usage: %s check [small] [words ...]\n", argv[0]);
    return 2;
  }
  int passed = 0, failed = 0;
  for (const Case& c : all()) {
    bool wanted = true;
    for (int a = 2; a < argc; a++)
      wanted &= !std::strcmp(argv[a], "small") ? c.work() < 2e7 : c.name.find(argv[a]) != std::string::npos;
    if (!wanted) continue;
    double worst = 0;
    const std::string trouble = check_forward(c, worst);
    std::printf("%s forward %s (%.2f of tolerance) %s\n", trouble.empty() ? "ok  " : "FAIL", c.name.c_str(), worst,
                trouble.c_str());
    trouble.empty() ? passed++ : failed++;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
