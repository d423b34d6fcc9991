// The extension module `_cuda`: CUDA handlers, and what was compiled for which device.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include "cuda/dispatch.h"
#include "cuda/launch.h"
#include "ffi/decode.h"
#include "ffi/source_digest.h"

namespace jax_flash2 {
namespace {

namespace ffi = xla::ffi;
namespace nb = nanobind;

template <Pass kPass>
ffi::Error run(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  Problem p;
  if (ffi::Error e = decode(kPass, args, rets, attrs, &p); e.failure()) return e;
  return to_error(kPass == Pass::kForward ? cuda::forward(p, stream) : cuda::backward(p, stream));
}

// Same work on every call, only in the buffers given, without waiting: a command buffer may record it once.
XLA_FFI_DEFINE_HANDLER(
    kForward, run<Pass::kForward>,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attrs(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(
    kBackward, run<Pass::kBackward>,
    ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().RemainingArgs().RemainingRets().Attrs(),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("registrations", [] {
    nb::dict d;
    d["jax_flash2_forward_v1"] = nb::capsule(reinterpret_cast<void*>(kForward));
    d["jax_flash2_backward_v1"] = nb::capsule(reinterpret_cast<void*>(kBackward));
    return d;
  });
  m.def("instances", [] {
    nb::list rows;
    for (const cuda::Instance& i : cuda::instances()) {
      rows.append(nb::make_tuple(i.arch, i.pass, i.dtype, i.head_dim, i.value_dim));
    }
    return rows;
  });
  m.def("devices", [] {
    nb::list devices;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;  // no driver: no devices
    for (int d = 0; d < count; d++) {
      cudaDeviceProp prop;
      if (cudaGetDeviceProperties(&prop, d) != cudaSuccess) continue;
      nb::dict row;
      row["name"] = nb::str(prop.name);
      row["compute_capability"] = nb::make_tuple(prop.major, prop.minor);
      row["arch"] = cuda::arch_for(prop.major, prop.minor);
      devices.append(row);
    }
    return devices;
  });
  m.def("source_digest", [] { return kSourceDigest; });
}

}  // namespace jax_flash2
