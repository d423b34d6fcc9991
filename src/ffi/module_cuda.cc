// The extension module `_cuda`: CUDA handlers, and what was compiled for which device.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>

#include "cuda/dispatch.h"
#include "cuda/extents.h"
#include "cuda/launch.h"
#include "cuda/packs.h"
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

// mask [*B, heads, T, S] -> by_row [*B, 3, T], by_col [*B, 3, S]; see find_extents.
ffi::Error extents(cudaStream_t stream, ffi::Buffer<ffi::PRED> mask, ffi::Result<ffi::Buffer<ffi::S32>> by_row,
                   ffi::Result<ffi::Buffer<ffi::S32>> by_col) {
  const auto dims = mask.dimensions();
  if (dims.size() < 3) return ffi::Error::InvalidArgument("jax_flash2: the mask needs three axes");
  const size_t last = dims.size() - 1;
  int64_t batch = 1;
  for (size_t a = 0; a < last - 2; a++) batch *= dims[a];
  const int64_t heads = dims[last - 2], rows = dims[last - 1], cols = dims[last];
  if (int64_t(by_row->element_count()) != batch * 3 * rows || int64_t(by_col->element_count()) != batch * 3 * cols ||
      rows > kMaxLength || cols > kMaxLength) {
    return ffi::Error::InvalidArgument("jax_flash2: extents do not match the mask");
  }
  if (reinterpret_cast<uintptr_t>(mask.untyped_data()) % 16 != 0) {
    return ffi::Error::InvalidArgument("jax_flash2: the mask is not aligned to 16 bytes");
  }
  return to_error(cuda::find_extents(reinterpret_cast<const uint8_t*>(mask.typed_data()), batch, heads, rows, cols,
                                     by_row->typed_data(), by_col->typed_data(), stream));
}

XLA_FFI_DEFINE_HANDLER(kExtents, extents,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::Buffer<ffi::PRED>>()
                           .Ret<ffi::Buffer<ffi::S32>>()
                           .Ret<ffi::Buffer<ffi::S32>>(),
                       {ffi::Traits::kCmdBufferCompatible});

// query_starts [*P, B + 1], key_starts, query_used and key_used [*P, B], of size zero where they are absent -> key_spans
// [*P, T, 2], query_spans [*P, S, 2], span_flags [*P], positions [*P, T]; see find_rows.
using Numbers = ffi::Buffer<ffi::S32>;
ffi::Error packs(cudaStream_t stream, Numbers query_starts, Numbers key_starts, Numbers query_used, Numbers key_used,
                 ffi::Result<Numbers> key_spans, ffi::Result<Numbers> query_spans, ffi::Result<Numbers> span_flags,
                 ffi::Result<Numbers> positions, int64_t before, int64_t after, bool bottom_right) {
  const auto dims = query_starts.dimensions();
  const int64_t starts = dims.size() == 0 ? 0 : dims.back(), sequences = starts - 1;
  const int64_t count = span_flags->element_count();
  const auto rows = [&](const Numbers& spans) { return count == 0 ? 0 : int64_t(spans.element_count()) / count / 2; };
  const int64_t queries = rows(*key_spans), keys = rows(*query_spans);

  const auto has = [&](const Numbers& x, int64_t of_each) { return int64_t(x.element_count()) == count * of_each; };
  const auto may_have = [&](const Numbers& x, int64_t of_each) { return x.element_count() == 0 || has(x, of_each); };
  const bool starts_match = sequences >= 1 && has(query_starts, starts) && may_have(key_starts, starts);
  const bool lengths_match = may_have(query_used, sequences) && may_have(key_used, sequences);
  const bool rows_match = has(*key_spans, queries * 2) && has(*query_spans, keys * 2) && has(*positions, queries);
  const bool fits = sequences <= cuda::kMostSequences && queries <= kMaxLength && keys <= kMaxLength;
  const bool sees = 0 <= before && before <= kMaxLength && 0 <= after && after <= kMaxLength;
  if (!starts_match || !lengths_match || !rows_match || !fits || !sees) {
    return ffi::Error::InvalidArgument("jax_flash2: packed sequences do not match their rows");
  }

  const auto given = [](const Numbers& x) { return x.element_count() == 0 ? nullptr : x.typed_data(); };
  const auto spans = [](Numbers& x) { return reinterpret_cast<Span*>(x.typed_data()); };
  return to_error(cuda::find_rows({.query_starts = given(query_starts),
                                   .key_starts = given(key_starts),
                                   .query_used = given(query_used),
                                   .key_used = given(key_used),
                                   .packs = count,
                                   .sequences = int(sequences),
                                   .queries = int(queries),
                                   .keys = int(keys),
                                   .before = int(before),
                                   .after = int(after),
                                   .bottom_right = bottom_right},
                                  {.key_spans = spans(*key_spans),
                                   .query_spans = spans(*query_spans),
                                   .span_flags = span_flags->typed_data(),
                                   .positions = positions->typed_data()},
                                  stream));
}

XLA_FFI_DEFINE_HANDLER(kPacks, packs,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<Numbers>()
                           .Arg<Numbers>()
                           .Arg<Numbers>()
                           .Arg<Numbers>()
                           .Ret<Numbers>()
                           .Ret<Numbers>()
                           .Ret<Numbers>()
                           .Ret<Numbers>()
                           .Attr<int64_t>("before")
                           .Attr<int64_t>("after")
                           .Attr<bool>("bottom_right"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

NB_MODULE(_cuda, m) {
  m.def("registrations", [] {
    nb::dict d;
    d["jax_flash2_forward_v1"] = nb::capsule(reinterpret_cast<void*>(kForward));
    d["jax_flash2_backward_v1"] = nb::capsule(reinterpret_cast<void*>(kBackward));
    d["jax_flash2_extents_v1"] = nb::capsule(reinterpret_cast<void*>(kExtents));
    d["jax_flash2_packs_v1"] = nb::capsule(reinterpret_cast<void*>(kPacks));
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
