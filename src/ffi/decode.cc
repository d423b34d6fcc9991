#include "ffi/decode.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace jax_flash2 {
namespace {

namespace ffi = xla::ffi;

// One buffer on its way to a Tensor: what it is called, which axes must follow its batch axes, and where it goes.
struct Slot {
  const char* name;
  const char* axes;
  ffi::DataType dtype;
  Tensor* tensor;
  bool result;
  bool shareable = false;  // its axes may each have size 1
  const void* data = nullptr;
  std::vector<int64_t> dims = {};
  std::vector<int64_t> batch_strides = {};
};

ffi::DataType to_ffi(DType t) {
  switch (t) {
    case DType::kF16: return ffi::DataType::F16;
    case DType::kBF16: return ffi::DataType::BF16;
    case DType::kF32: return ffi::DataType::F32;
    case DType::kF64: return ffi::DataType::F64;
    case DType::kS32: return ffi::DataType::S32;
    case DType::kU32: return ffi::DataType::U32;
    case DType::kBool: return ffi::DataType::PRED;
    case DType::kReal:
    case DType::kFloat: break;  // stand for several
  }
  return ffi::DataType::INVALID;
}

// False: not a floating-point type that is known.
bool from_ffi(ffi::DataType from, DType* to) {
  for (DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    if (to_ffi(t) == from) return *to = t, true;
  }
  return false;
}

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("jax_flash2: " + what); }

ffi::Error decode_spec(ffi::Dictionary attrs, Spec* spec) {
  size_t known = 0;
#define JAX_FLASH2_FIELD(type, name, neutral)                                                  \
  if (attrs.contains(#name)) {                                                                 \
    auto value = attrs.get<type>(#name);                                                       \
    if (!value.has_value()) return invalid("attribute " #name ": " + value.error().message()); \
    spec->name = *value;                                                                       \
    known++;                                                                                   \
  }
  JAX_FLASH2_SPEC_FIELDS(JAX_FLASH2_FIELD)
#undef JAX_FLASH2_FIELD
  if (known != attrs.size()) {
    return invalid("the program carries an attribute this version does not know; it was exported by a newer one");
  }
  return ffi::Error::Success();
}

// Reads the shape of q, k and v into the problem's dims.
ffi::Error read_dims(const Slot& q, const Slot& k, const Slot& v, Problem* p, size_t* batch_rank) {
  const size_t rank = q.dims.size();
  if (rank < 3 || k.dims.size() != rank || v.dims.size() != rank)
    return invalid("q, k and v need one rank, at least 3");
  const auto fit = [](int64_t x, int64_t limit) { return 0 <= x && x <= limit; };
  const int64_t T = q.dims[rank - 3], N = q.dims[rank - 2], D = q.dims[rank - 1];
  const int64_t S = k.dims[rank - 3], K = k.dims[rank - 2], Dv = v.dims[rank - 1];
  if (!fit(T, kMaxLength) || !fit(S, kMaxLength)) return invalid("a length exceeds 2^29");
  if (!fit(N, 1 << 24) || !fit(K, 1 << 24) || !fit(D, 1 << 16) || !fit(Dv, 1 << 16))
    return invalid("a dim is too large");
  if (K == 0 ? N != 0 : N % K != 0) return invalid("query heads are not a multiple of key heads");
  p->T = T, p->N = N, p->D = D, p->S = S, p->K = K, p->Dv = Dv;
  *batch_rank = rank - 3;
  return ffi::Error::Success();
}

// Checks the buffer against its axes and computes its strides, dense and row-major, 0 where it is shared.
ffi::Error attach(Slot& slot, const Problem& p, const std::vector<int64_t>& batch) {
  const size_t trailing = std::strlen(slot.axes);
  const auto wrong = [&](const char* rule) {
    std::string shape;
    for (int64_t d : slot.dims) shape += (shape.empty() ? "" : ", ") + std::to_string(d);
    return invalid(std::string(slot.name) + " [" + shape + "] " + rule);
  };
  if (slot.dims.size() != batch.size() + trailing) return wrong("has the wrong rank");
  if (reinterpret_cast<uintptr_t>(slot.data) % 16 != 0) return wrong("is not aligned to 16 bytes");
  int64_t stride = 1;
  slot.tensor->data = const_cast<void*>(slot.data);
  for (size_t a = trailing; a-- > 0;) {
    const int64_t dim = slot.dims[batch.size() + a];
    int64_t expected = 0, *where = &slot.tensor->col;
    switch (slot.axes[a]) {
      case 'T': expected = p.T, where = &slot.tensor->row; break;
      case 'S': expected = p.S, where = std::strchr(slot.axes, 'T') ? &slot.tensor->col : &slot.tensor->row; break;
      case 'N': expected = p.N, where = &slot.tensor->head; break;
      case 'K': expected = p.K, where = &slot.tensor->head; break;
      case 'D': expected = p.D; break;
      case 'V': expected = p.Dv; break;
      case 'W': expected = 2; break;
      case 'O': expected = order_entries(p.T); break;
    }
    const bool shared = slot.shareable && dim == 1 && expected != 1;
    if (dim != expected && !shared) return wrong("does not match the shapes of q, k and v");
    *where = shared ? 0 : stride;
    stride *= dim;
  }
  slot.batch_strides.assign(batch.size(), 0);
  for (size_t a = batch.size(); a-- > 0;) {
    const bool may_share = slot.shareable || !slot.result;
    if (slot.dims[a] != batch[a] && !(may_share && slot.dims[a] == 1)) return wrong("has other batch axes");
    if (slot.dims[a] != 1) slot.batch_strides[a] = stride;
    stride *= slot.dims[a];
  }
  return ffi::Error::Success();
}

// Merges neighbouring batch axes along which every tensor steps evenly, and hands each tensor its strides.
ffi::Error coalesce(std::vector<Slot*>& slots, const std::vector<int64_t>& batch, Problem* p) {
  std::vector<int64_t> sizes;
  std::vector<size_t> inner;  // the original axis whose strides a merged axis has
  int64_t total = 1;
  for (size_t a = 0; a < batch.size(); a++) {
    total *= batch[a];
    if (batch[a] == 1) continue;
    const bool even = !sizes.empty() && std::all_of(slots.begin(), slots.end(), [&](const Slot* s) {
      return s->batch_strides[inner.back()] == s->batch_strides[a] * batch[a];
    });
    if (even) {
      sizes.back() *= batch[a], inner.back() = a;
    } else {
      sizes.push_back(batch[a]), inner.push_back(a);
    }
  }
  if (sizes.size() > kMaxBatchAxes) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "jax_flash2: the operands are shared along more than 4 separate groups of batch axes; broadcast "
                      "one of them with jax.numpy.broadcast_to, or nest fewer vmaps");
  }
  if (total > std::numeric_limits<int32_t>::max()) return invalid("more than 2^31 batch rows");
  p->B = static_cast<int32_t>(total);
  const size_t unused = kMaxBatchAxes - sizes.size();
  for (size_t a = 0; a < kMaxBatchAxes; a++) {
    p->batch_sizes[a] = a < unused ? 1 : static_cast<int32_t>(sizes[a - unused]);
    for (Slot* s : slots) s->tensor->batch[a] = a < unused ? 0 : s->batch_strides[inner[a - unused]];
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error decode(Pass pass, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs, Problem* p) {
  *p = Problem{};
  if (ffi::Error e = decode_spec(attrs, &p->spec); e.failure()) return e;
  if (args.size() < 3) return invalid("q, k and v are missing");
  auto first = args.get<ffi::AnyBuffer>(0);
  if (!first.has_value()) return first.error();
  const ffi::DataType type = first->element_type();
  if (!from_ffi(type, &p->dtype)) return invalid("q is not a floating-point array this version knows");
  const ffi::DataType real = type == ffi::DataType::F64 ? type : ffi::DataType::F32;
  const ffi::DataType f32 = ffi::DataType::F32, s32 = ffi::DataType::S32;

  // INVALID: its own.
  const auto operand_type = [&](DType t) { return t == DType::kReal ? real : to_ffi(t); };
  const auto slot_type = [&](DType t) { return t == DType::kReal || t == DType::kFloat ? real : f32; };

  const bool backward = pass == Pass::kBackward;
  std::vector<Slot> slots = {{"q", "TND", type, &p->q, false},
                             {"k", "SKD", type, &p->k, false},
                             {"v", "SKV", type, &p->v, false},
                             {"out", "TNV", type, &p->out, !backward},
                             {"lse", "NT", real, &p->lse, !backward}};
  if (backward) {
    slots.push_back({"dout", "TNV", type, &p->dout, false});
    slots.push_back({"dlse", "NT", real, &p->dlse, false});
  }
#define JAX_FLASH2_EXTRA(name, dtype, axes, slot) \
  slots.push_back({#name, axes, operand_type(DType::dtype), &p->extras.name, false, true});
  JAX_FLASH2_EXTRAS(JAX_FLASH2_EXTRA)
#undef JAX_FLASH2_EXTRA
  if (backward) {
    for (Slot s : {Slot{"dq", "TND", type, &p->dq, true}, Slot{"dk", "SKD", type, &p->dk, true},
                   Slot{"dv", "SKV", type, &p->dv, true}, Slot{"delta", "NT", real, &p->delta, true},
                   Slot{"dq_acc", "NTD", f32, &p->dq_acc, true}, Slot{"dk_acc", "KSD", f32, &p->dk_acc, true},
                   Slot{"dv_acc", "KSV", f32, &p->dv_acc, true}, Slot{"order", "NO", s32, &p->order, true}}) {
      slots.push_back(s);
    }
#define JAX_FLASH2_EXTRA(name, dtype, axes, slot) \
  slots.push_back({"d" #name, *slot == '=' ? axes : slot, slot_type(DType::dtype), &p->grads.name, true, *slot == '='});
    JAX_FLASH2_EXTRAS(JAX_FLASH2_EXTRA)
#undef JAX_FLASH2_EXTRA
  } else {
    slots.push_back({"queue", "N", s32, &p->queue, true});
  }

  size_t arg = 0, ret = 0;
  std::vector<Slot*> present;
  for (Slot& slot : slots) {
    if (slot.result ? ret >= rets.size() : arg >= args.size()) continue;
    ffi::AnyBuffer buffer = *first;
    if (slot.result) {
      auto r = rets.get<ffi::AnyBuffer>(ret++);
      if (!r.has_value()) return r.error();
      buffer = **r;
    } else {
      auto r = args.get<ffi::AnyBuffer>(arg++);
      if (!r.has_value()) return r.error();
      buffer = *r;
    }
    const auto dims = buffer.dimensions();
    if (dims.size() == 1 && dims[0] == 0) continue;  // absent
    const bool own = slot.dtype == ffi::DataType::INVALID;
    if (own ? !from_ffi(buffer.element_type(), &p->bias_dtype) : buffer.element_type() != slot.dtype)
      return invalid(std::string(slot.name) + " has the wrong dtype");
    slot.data = buffer.untyped_data();
    slot.dims.assign(dims.begin(), dims.end());
    present.push_back(&slot);
  }
  if (arg != args.size() || ret != rets.size()) return invalid("the program carries arrays this version does not know");
  const auto missing = [](const Slot& s) { return s.dims.empty(); };
  const size_t required = backward ? 6 : 5;
  for (size_t i = 0; i < required; i++) {
    if (missing(slots[i])) return invalid(std::string(slots[i].name) + " is missing");
  }
  size_t batch_rank = 0;
  if (ffi::Error e = read_dims(slots[0], slots[1], slots[2], p, &batch_rank); e.failure()) return e;
  const auto full = std::find_if(slots.begin(), slots.end(), [&](const Slot& s) { return s.result && !missing(s); });
  if (full == slots.end() || full->dims.size() < batch_rank) return invalid("the first result is missing");
  const std::vector<int64_t> batch(full->dims.begin(), full->dims.begin() + batch_rank);
  for (Slot* slot : present) {
    if (ffi::Error e = attach(*slot, *p, batch); e.failure()) return e;
  }
  if (ffi::Error e = coalesce(present, batch, p); e.failure()) return e;
  const Extras& extras = p->extras;
  for (const Tensor* spans : {&extras.key_spans, &extras.query_spans}) {
    if (spans->present() && spans->row != 2) return invalid("spans must be given for every row");
  }
  for (const Tensor* ids : {&extras.query_ids, &extras.key_ids, &extras.positions}) {
    if (ids->present() && ids->row != 1) return invalid("ids and positions must be given for every row");
  }
  if (extras.key_spans.present() != extras.query_spans.present()) return invalid("spans need both sides");
  if (backward && !(p->dq.present() && p->dk.present() && p->dv.present()) && p->B && p->T && p->S) {
    return invalid("dq, dk or dv is missing");
  }
  return ffi::Error::Success();
}

ffi::Error to_error(Status status) {
  return status.ok() ? ffi::Error::Success() : ffi::Error::Internal(std::string("jax_flash2: ") + status.error);
}

}  // namespace jax_flash2
