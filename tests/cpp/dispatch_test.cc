// Which kernels a call gets on a device of each compute capability, and that a device that is too old is refused by name.
// Linked with the dispatcher, and with a CUDA runtime and kernels that do nothing but say what they were asked.
#include "cuda/dispatch.h"

#include <cstdio>
#include <cstring>
#include <utility>

using jax_flash2::DType;
using jax_flash2::Problem;
using jax_flash2::Status;

namespace {

int g_major = 0, g_minor = 0;  // of the only device there is
const char* g_ran = nullptr;   // the architecture whose kernel was run, and its dtype
const char* g_dtype = nullptr;

struct Row {
  int major, minor;
  const char* arch;  // null: refused
};

constexpr Row kRows[] = {{7, 0, nullptr}, {7, 5, nullptr}, {8, 0, "sm80"}, {8, 6, "sm80"},
                         {8, 7, "sm80"},  {8, 9, "sm80"},  {9, 0, "sm90"}, {10, 0, "sm80"},
                         {10, 3, "sm80"}, {11, 0, "sm80"}, {12, 0, "sm80"}};

constexpr std::pair<DType, const char*> kDTypes[] = {
    {DType::kF16, "f16"}, {DType::kBF16, "bf16"}, {DType::kF32, "f32"}, {DType::kF64, "f64"}};

bool same(const char* a, const char* b) { return a && b ? !std::strcmp(a, b) : a == b; }

}  // namespace

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? g_major : g_minor;
  return cudaSuccess;
}

namespace jax_flash2::cuda {
#define JAX_FLASH2_INSTANCE(arch, pass, dtype, dim, value_dim)                         \
  Status arch##_##pass##_##dtype##_##dim##_##value_dim(const Problem&, cudaStream_t) { \
    return g_ran = #arch, g_dtype = #dtype, Status{};                                  \
  }
#include "instances.inc"
#undef JAX_FLASH2_INSTANCE
}  // namespace jax_flash2::cuda

int main() {
  int checks = 0, failed = 0;
  for (const Row& row : kRows) {
    g_major = row.major, g_minor = row.minor;
    for (const auto& [dtype, name] : kDTypes) {
      g_ran = nullptr, checks++;
      Problem p{};
      p.dtype = dtype, p.D = p.Dv = 64;
      p.extras.bias.data = &p;  // operands do not change who serves a call
      const Status status = jax_flash2::cuda::forward(p, nullptr);
      const bool wide = dtype == DType::kF32 || dtype == DType::kF64;
      const char* const want = row.arch && wide ? "fma" : row.arch;
      const bool said = want ? status.ok() : !status.ok() && std::strstr(status.error, "compute capability 8.0");
      if (said && same(g_ran, want) && (!want || same(g_dtype, name))) continue;
      std::printf("FAILED %d.%d, %s: ran %s, not %s; %s\n", row.major, row.minor, name, g_ran ? g_ran : "nothing",
                  want ? want : "nothing", status.ok() ? "no error" : status.error);
      failed++;
    }
  }
  std::printf("%d checks, %d failed\n", checks, failed);
  return failed != 0;
}
