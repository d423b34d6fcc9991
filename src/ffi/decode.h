// XLA buffers and attributes -> Problem, one way for every handler. Checks what could corrupt memory (ranks, sizes,
// dtypes, alignment); what a caller may ask for was checked in Python, where the message can be kind.
#pragma once
#include <string>
#include <vector>

#include "core/problem.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash2 {

enum class Pass { kForward, kBackward };

// Operands and results, in order:
//   forward:  q k v, extras                      -> out lse queue
//   backward: q k v out lse dout dlse, extras    -> dq dk dv delta dq_acc dk_acc dv_acc order, a slot per extra
// An array of size zero and rank one stands for an absent one, and so does a missing one at the end.
xla::ffi::Error decode(Pass pass, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                       xla::ffi::Dictionary attrs, Problem* p);

// A kernel's answer as XLA's.
xla::ffi::Error to_error(Status status);

}  // namespace jax_flash2
