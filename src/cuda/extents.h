// How far a boolean mask reaches, row by row and column by column, whatever lies in between: what spans are made of.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"

namespace jax_flash2::cuda {

// mask [batch, heads, rows, cols], a byte each. by_row [batch, 3, rows]: of the columns that any head keeps, cols less the
// first one, the last one plus 1 (0 and 0: there is none), and how many all heads keep together; by_col [batch, 3, cols]
// likewise of the rows.
Status find_extents(const uint8_t* mask, int64_t batch, int64_t heads, int64_t rows, int64_t cols, int32_t* by_row,
                    int32_t* by_col, cudaStream_t stream);

}  // namespace jax_flash2::cuda
