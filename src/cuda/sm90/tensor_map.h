// Tensors of a Problem as TMA sees them. Host code, and the one device function that finds a batch row in such a map.
// Maps are encoded in each call, for addresses change, and travel as kernel parameters.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace jax_flash2::cuda::sm90 {

// A tensor [*B, length, heads, D] under a map (column, row, head, batch), or, where heads are packed, (column, head of a
// pack, row, pack, batch). All batch axes together are one dimension of the map: its step is the smallest stride among them,
// of which the others are multiples in any dense array.
struct MappedTensor {
  CUtensorMap map;
  int32_t batch_step[kMaxBatchAxes];  // what one step along an axis adds to the map's batch coordinate

  JAX_FLASH2_HD int batch(const Batch& b) const {
    int at = 0;
    for (int a = 0; a < kMaxBatchAxes; a++) at += b.at[a] * batch_step[a];
    return at;
  }
};

// Box: `box_rows` rows of `panel_cols` columns of one head, laid down in shared memory as a panel of tile::SharedTile; or,
// packed (pack_log2 >= 0), box_rows >> pack_log2 rows of 1 << pack_log2 heads each.
struct TensorMapShape {
  int length, heads, head_dim, panel_cols, box_rows;
  int pack_log2 = -1;
};

// The driver's function, found by way of the runtime: a library that needs no driver to be loaded cannot name it. Null when
// the driver has none.
using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);
inline TensorMapEncoder find_tensor_map_encoder() {
  static const TensorMapEncoder kEncoder = [] {  // a fact of the process; asking costs as much as encoding
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<TensorMapEncoder>(symbol)
                                                                        : nullptr;
  }();
  return kEncoder;
}

inline Status encode_tensor_map(TensorMapEncoder encoder, const Problem& p, const Tensor& tensor, TensorMapShape shape,
                                MappedTensor* result) {
  if (!encoder) return {"the CUDA driver has no cuTensorMapEncodeTiled"};
  constexpr int64_t kBytes = 2;  // of an element
  int64_t step = 0;
  for (int a = 0; a < kMaxBatchAxes; a++) {
    const int64_t stride = p.batch_sizes[a] > 1 ? tensor.batch[a] : 0;
    if (stride != 0) step = step == 0 ? stride : std::min(step, stride);
  }
  int64_t batches = 1;
  for (int a = 0; a < kMaxBatchAxes; a++) {
    const int64_t stride = p.batch_sizes[a] > 1 ? tensor.batch[a] : 0;
    if (stride != 0 && stride % step != 0) return {"batch strides that are no multiples of the smallest one"};
    result->batch_step[a] = stride == 0 ? 0 : int32_t(stride / step);
    batches += int64_t(p.batch_sizes[a] - 1) * result->batch_step[a];
  }
  if (batches > INT32_MAX) return {"more batch rows than a tensor map holds"};

  // A stride along an axis of size 1 is never used, but must look like one.
  const auto stride_bytes = [&](int64_t stride, int64_t size) { return cuuint64_t(size > 1 ? stride * kBytes : 16); };
  const cuuint64_t head_dim = shape.head_dim, length = shape.length, heads = shape.heads, cols = shape.panel_cols;
  const bool is_packed = shape.pack_log2 >= 0;
  const int pack = is_packed ? 1 << shape.pack_log2 : 1;
  const cuuint64_t row_bytes = stride_bytes(tensor.row, shape.length), batch_bytes = stride_bytes(step, batches);
  const cuuint64_t head_bytes = stride_bytes(tensor.head, shape.heads), box_rows = shape.box_rows;
  struct Axis {
    cuuint64_t size, stride_bytes, box;
  };
  const Axis unpacked[] = {{head_dim, 0, cols},
                           {length, row_bytes, box_rows},
                           {heads, head_bytes, 1},
                           {cuuint64_t(batches), batch_bytes, 1}};
  const Axis packed[] = {{head_dim, 0, cols},
                         {cuuint64_t(pack), head_bytes, cuuint64_t(pack)},
                         {length, row_bytes, box_rows / pack},
                         {heads / pack, head_bytes * pack, 1},
                         {cuuint64_t(batches), batch_bytes, 1}};
  const Axis* const axes = is_packed ? packed : unpacked;
  const int rank = is_packed ? 5 : 4;
  cuuint64_t sizes[5], strides[5];
  cuuint32_t box[5], element_strides[5];
  for (int a = 0; a < rank; a++) {
    sizes[a] = axes[a].size, box[a] = cuuint32_t(axes[a].box), element_strides[a] = 1;
    if (a > 0) strides[a - 1] = axes[a].stride_bytes;
  }

  const CUresult encoded = encoder(
      &result->map, p.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank,
      tensor.data, sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      shape.panel_cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return {encoded == CUDA_SUCCESS ? nullptr : "an operand's address or strides are none that a tensor map takes"};
}

}  // namespace jax_flash2::cuda::sm90
