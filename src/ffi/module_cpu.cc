// The extension module `_cpu`: CPU handlers, and the lists that Python mirrors.
#include <nanobind/nanobind.h>

#include <utility>

#include "cpu/kernels.h"
#include "ffi/decode.h"
#include "ffi/source_digest.h"

namespace jax_flash2 {
namespace {

namespace ffi = xla::ffi;
namespace nb = nanobind;

class PoolExecutor final : public cpu::Executor {
 public:
  explicit PoolExecutor(ffi::ThreadPool pool) : pool_(std::move(pool)) {}
  int threads() const override { return static_cast<int>(pool_.num_threads()); }
  void schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool pool_;
};

template <Pass kPass>
ffi::Error run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  Problem p;
  if (ffi::Error e = decode(kPass, args, rets, attrs, &p); e.failure()) return e;
  PoolExecutor executor(std::move(pool));
  return to_error(kPass == Pass::kForward ? cpu::forward(p, executor) : cpu::backward(p, executor));
}

XLA_FFI_DEFINE_HANDLER(kForward, run<Pass::kForward>,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kBackward, run<Pass::kBackward>,
                       ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

const char* name_of(DType t) {
  constexpr const char* kNames[] = {"float16", "bfloat16", "float32", "float64", "int32",
                                    "uint32",  "bool",     "real",    "float"};
  return kNames[static_cast<int>(t)];
}

const char* kind_of(double) { return "float"; }
const char* kind_of(int64_t) { return "int"; }
const char* kind_of(bool) { return "bool"; }

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("registrations", [] {
    nb::dict d;
    d["jax_flash2_forward_v1"] = nb::capsule(reinterpret_cast<void*>(kForward));
    d["jax_flash2_backward_v1"] = nb::capsule(reinterpret_cast<void*>(kBackward));
    return d;
  });
  m.def("spec_fields", [] {
    nb::list fields;
#define JAX_FLASH2_FIELD(type, name, neutral) fields.append(nb::make_tuple(#name, kind_of(type{}), type{neutral}));
    JAX_FLASH2_SPEC_FIELDS(JAX_FLASH2_FIELD)
#undef JAX_FLASH2_FIELD
    return fields;
  });
  m.def("max_length", [] { return kMaxLength; });
  m.def("extras", [] {
    nb::list extras;
#define JAX_FLASH2_EXTRA(name, dtype, axes, slot) \
  extras.append(nb::make_tuple(#name, name_of(DType::dtype), axes, slot));
    JAX_FLASH2_EXTRAS(JAX_FLASH2_EXTRA)
#undef JAX_FLASH2_EXTRA
    return extras;
  });
  m.def("source_digest", [] { return kSourceDigest; });
}

}  // namespace jax_flash2
