#include "cuda/dispatch.h"

#include <cstring>

namespace jax_flash2::cuda {

#define JAX_FLASH2_INSTANCE(arch, pass, dtype, dim, value_dim) \
  Status arch##_##pass##_##dtype##_##dim##_##value_dim(const Problem&, cudaStream_t);
#include "instances.inc"
#undef JAX_FLASH2_INSTANCE

namespace {

constexpr Instance kInstances[] = {
#define JAX_FLASH2_INSTANCE(arch, pass, dtype, dim, value_dim) \
  {#arch, #pass, #dtype, dim, value_dim, arch##_##pass##_##dtype##_##dim##_##value_dim},
#include "instances.inc"
#undef JAX_FLASH2_INSTANCE
};

struct DTypeRow {
  DType dtype;
  const char* name;
  int bytes;
};
constexpr DTypeRow kDTypes[] = {
    {DType::kF16, "f16", 2}, {DType::kBF16, "bf16", 2}, {DType::kF32, "f32", 4}, {DType::kF64, "f64", 8}};

Status dispatch(const char* pass, const Problem& p, cudaStream_t stream) {
  const DTypeRow* row = nullptr;
  for (const DTypeRow& r : kDTypes) row = r.dtype == p.dtype ? &r : row;
  if (!row) return {"CUDA kernels take bfloat16, float16, float32 and float64"};
  const int chunk = 16 / row->bytes;
  if (p.D % chunk != 0 || p.Dv % chunk != 0) return {"CUDA kernels take heads whose rows are multiples of 16 bytes"};
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    return {"the CUDA device could not be queried"};
  }
  const char* arch = arch_for(major, minor);
  if (!arch) return {"CUDA kernels need compute capability 8.0 or newer"};
  for (const char* candidate : {row->bytes > 2 ? "fma" : arch, "sm80"}) {
    for (const Instance& i : kInstances) {
      if (i.head_dim >= p.D && i.value_dim >= p.Dv && !std::strcmp(i.arch, candidate) && !std::strcmp(i.pass, pass) &&
          !std::strcmp(i.dtype, row->name)) {
        return i.run(p, stream);
      }
    }
  }
  return {"no CUDA kernel of this build serves these head dims; see jax_flash2.capabilities()"};
}

}  // namespace

std::span<const Instance> instances() { return kInstances; }

const char* arch_for(int major, int minor) {
  if (major == 9 && minor == 0) return "sm90";
  return major >= 8 ? "sm80" : nullptr;
}

Status forward(const Problem& p, cudaStream_t stream) { return dispatch("forward", p, stream); }

Status backward(const Problem& p, cudaStream_t stream) { return dispatch("backward", p, stream); }

}  // namespace jax_flash2::cuda
