// GPU unit tests of the rooms under the kernels: each PTX wrapper against host arithmetic, each shared tile layout
// against the plain matrix it stands for. Knows no attention. Usage: ptx_test (needs a GPU and nothing else).
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "cuda/element.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/softmax.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace {

using namespace jax_flash2;
using namespace jax_flash2::cuda;
using cases::Type;

int passed = 0, failed = 0;

void expect(bool right, const std::string& what) {
  std::printf("%s %s\n", right ? "ok  " : "FAIL", what.c_str());
  right ? passed++ : failed++;
}

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error: %s\n", cudaGetErrorString(error));
  std::exit(2);
}

// Runs one block on copies of `in` and a poisoned `out` and brings `out` back.
template <class In, class Out, class... Rest>
std::vector<Out> run(void (*kernel)(const In*, Out*, Rest...), int threads, int shared_bytes, const std::vector<In>& in,
                     size_t out_size, Rest... rest) {
  In* in_g;
  Out* out_g;
  std::vector<Out> out(out_size);
  require(cudaMalloc(&in_g, in.size() * sizeof(In)));
  require(cudaMalloc(&out_g, out_size * sizeof(Out)));
  require(cudaMemcpy(in_g, in.data(), in.size() * sizeof(In), cudaMemcpyHostToDevice));
  require(cudaMemset(out_g, 0xff, out_size * sizeof(Out)));
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<1, threads, shared_bytes>>>(in_g, out_g, rest...);
  require(cudaGetLastError());
  require(cudaDeviceSynchronize());
  require(cudaMemcpy(out.data(), out_g, out_size * sizeof(Out), cudaMemcpyDeviceToHost));
  require(cudaFree(in_g));
  require(cudaFree(out_g));
  return out;
}

// ---- mma, with operands and result placed by the formulas at the head of tile/fragment.cuh ----
// in: A [16][16], B [16][8] 16-bit; out: 2 A B [16][8], for it is added twice.
template <class Element>
__global__ void mma_kernel(const uint16_t* in, float* out) {
  const int g = threadIdx.x / 4, q = threadIdx.x % 4;
  const auto pair = [](uint16_t lo, uint16_t hi) { return uint32_t(lo) | uint32_t(hi) << 16; };
  const auto a_at = [&](int row, int col) { return pair(in[row * 16 + col], in[row * 16 + col + 1]); };
  const auto b_at = [&](int row) { return pair(in[256 + row * 8 + g], in[256 + (row + 1) * 8 + g]); };
  const uint32_t a[4] = {a_at(g, 2 * q), a_at(g + 8, 2 * q), a_at(g, 2 * q + 8), a_at(g + 8, 2 * q + 8)};
  float c[4] = {};
  for (int time = 0; time < 2; time++) ptx::mma_m16n8k16<Element>(c, a, b_at(2 * q), b_at(2 * q + 8));
  for (int e = 0; e < 4; e++) out[(g + e / 2 * 8) * 8 + 2 * q + e % 2] = c[e];
}

template <class Element>
void test_mma(Type type, const char* name) {
  cases::Random random(7);
  std::vector<uint16_t> in(256 + 128);
  for (uint16_t& x : in) x = cases::encode(type, random.normal());
  const std::vector<float> out = run(mma_kernel<Element>, 32, 0, in, 128);
  double worst = 0;
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++) {
      double want = 0;
      for (int k = 0; k < 16; k++)
        want += 2.0 * cases::decode(type, in[i * 16 + k]) * cases::decode(type, in[256 + k * 8 + j]);
      worst = std::max(worst, std::fabs(out[i * 8 + j] - want));
    }
  expect(worst < 1e-5, std::string("mma_m16n8k16 ") + name);
}

// ---- tiles: copies in, fragments out, fragments in, copies out ----
// in: a matrix [kRows + 20][cols] of 16-bit numbers, of which the tile takes rows 8 .. Rows outside [11, kRows + 3) are
// dead. out: for each 16 x 16 block and lane 4 x 4 registers: straight, straight.trans, across, across.trans.
template <class Tile, int kThreads>
__global__ void load_kernel(const uint16_t* in, uint32_t* out, int cols) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t tile = ptx::shared_address(shared);
  for (int x = threadIdx.x; x < Tile::kBytes / 4; x += kThreads) ptx::st_shared_b32(tile + 4 * x, 0xffffffffu);
  __syncthreads();
  tile::Copy<Tile, kThreads>().load(tile, in, cols, cols, 8, Live{{11, Tile::kRows + 3}, nullptr});
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<0>();
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const tile::BlockView<Tile, tile::Lies::kStraight> straight(tile);
  const tile::BlockView<Tile, tile::Lies::kAcross> across(tile);
  for (int block = 0; block < Tile::kRows / 16 * (Tile::kCols / 16); block++) {
    const int row = block / (Tile::kCols / 16), col = block % (Tile::kCols / 16);
    uint32_t r[4][4];
    straight.load(r[0], row, col);
    straight.load_trans(r[1], row, col);
    across.load(r[2], row, col);
    across.load_trans(r[3], row, col);
    for (int x = 0; x < 16; x++) out[(block * 32 + threadIdx.x) * 16 + x] = r[x / 4][x % 4];
  }
}

template <class Tile, int kThreads>
void test_load(int cols) {
  const int rows = Tile::kRows + 20;
  std::vector<uint16_t> in(size_t(rows) * cols);
  for (size_t x = 0; x < in.size(); x++) in[x] = uint16_t(x * 40503u + 1);
  const auto at = [&](int row, int col) -> uint32_t {
    const int i = row + 8;
    return i >= 11 && i < Tile::kRows + 3 && col < cols ? in[size_t(i) * cols + col] : 0;
  };
  const std::vector<uint32_t> out =
      run(load_kernel<Tile, kThreads>, kThreads, Tile::kBytes, in, size_t(Tile::kRows) * Tile::kCols / 256 * 512, cols);
  bool right = true;
  for (size_t x = 0; x < out.size(); x++) {
    const int r = x % 4, how = x / 4 % 4, lane = x / 16 % 32, block = int(x / 512), g = lane / 4, q = lane % 4;
    const int row = block / (Tile::kCols / 16) * 16, col = block % (Tile::kCols / 16) * 16;
    // Matrix r of ldmatrix is (row half, column half) (r % 2, r / 2) of the block, or the other way round.
    const int down = (how < 2 ? r % 2 : r / 2) * 8, along = (how < 2 ? r / 2 : r % 2) * 8;
    const uint32_t want =
        how % 2 == 0 ? at(row + down + g, col + along + 2 * q) | at(row + down + g, col + along + 2 * q + 1) << 16
                     : at(row + down + 2 * q, col + along + g) | at(row + down + 2 * q + 1, col + along + g) << 16;
    right &= out[x] == want;
  }
  expect(right, "load " + std::to_string(Tile::kRows) + " x " + std::to_string(Tile::kCols) + ", " +
                    std::to_string(cols) + " columns, " + std::to_string(kThreads) + " threads");
}

// Element (i, j) of the tile is i * 256 + j, as bf16 pairs of raw bits; rows from 8 to kRows - 3 + 8 are stored.
template <class Tile, int kThreads>
__global__ void store_kernel(const uint16_t*, uint16_t* out, int cols) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t tile = ptx::shared_address(shared);
  if (threadIdx.x < 32) {
    const tile::StoreView<Tile> view(tile);
    const int g = threadIdx.x / 4, q = threadIdx.x % 4;
    for (int row = 0; row < Tile::kRows; row += 16)
      for (int col = 0; col < Tile::kCols; col += 8) {
        const auto pair = [&](int i) {
          return uint32_t(i * 256 + col + 2 * q) | uint32_t(i * 256 + col + 2 * q + 1) << 16;
        };
        view.store(pair(row + g), pair(row + g + 8), row / 16, col / 8);
      }
  }
  __syncthreads();
  tile::Copy<Tile, kThreads>().store(out, cols, cols, 8, 8 + Tile::kRows - 3, tile);
}

template <class Tile, int kThreads>
void test_store(int cols) {
  const size_t rows = Tile::kRows + 20;
  const std::vector<uint16_t> out =
      run(store_kernel<Tile, kThreads>, kThreads, Tile::kBytes, std::vector<uint16_t>(1), rows * cols, cols);
  bool right = true;
  for (size_t x = 0; x < out.size(); x++) {
    const int i = int(x / cols) - 8, j = int(x % cols);
    right &= out[x] == (i >= 0 && i < Tile::kRows - 3 ? uint16_t(i * 256 + j) : 0xffff);
  }
  expect(right, "store " + std::to_string(Tile::kRows) + " x " + std::to_string(Tile::kCols) + ", " +
                    std::to_string(cols) + " columns, " + std::to_string(kThreads) + " threads");
}

// ---- arithmetic ----
__global__ void math_kernel(const float* in, float* out) {
  const int i = threadIdx.x;
  const float x = in[i];
  out[i] = ptx::ex2(x), out[128 + i] = ptx::lg2(fabsf(x)), out[256 + i] = ptx::rcp(x),
  out[384 + i] = Math::scaled_tanh(x, 1, 1);
  out[512 + i] = __uint_as_float(ptx::cvt_x2<bf16>(x, -x)), out[640 + i] = __uint_as_float(ptx::cvt_x2<f16>(x, -x));
  out[768 + i] = quad_max(x), out[896 + i] = quad_sum(x);
  if (i < 32) out[1024 + i] = 0;
  __syncthreads();
  ptx::red_global_add_f32(out + 1024 + i % 32, x);
}

void test_math() {
  cases::Random random(3);
  std::vector<float> in(128);
  for (float& x : in) x = random.normal() * 20;
  in[0] = -INFINITY, in[1] = -200, in[2] = 0, in[3] = 1;
  const std::vector<float> out = run(math_kernel, 128, 0, in, 1056);
  double ex2 = 0, lg2 = 0, rcp = 0, tanh = 0;
  bool cvt = true, quad = true, red = true;
  for (int i = 0; i < 128; i++) {
    const double x = in[i];
    ex2 = std::max(ex2, std::fabs(out[i] - std::exp2(x)) / std::max(std::exp2(x), 0x1p-126));
    if (x != 0 && i != 0) lg2 = std::max(lg2, std::fabs(out[128 + i] - std::log2(std::fabs(x))));
    if (x != 0 && i != 0) rcp = std::max(rcp, std::fabs(out[256 + i] * x - 1));
    tanh = std::max(tanh, std::fabs(out[384 + i] - std::tanh(x)));
    for (const auto& [type, at] : {std::pair{Type::bf16, 512}, {Type::f16, 640}}) {
      const uint32_t pair = cases::float_to_bits(out[at + i]);
      cvt &= pair == (uint32_t(cases::encode(type, in[i])) | uint32_t(cases::encode(type, -in[i])) << 16);
    }
    float top = -INFINITY;
    double sum = 0;
    for (int l = i / 4 * 4; l < i / 4 * 4 + 4; l++) top = std::max(top, in[l]), sum += in[l];
    quad &= out[768 + i] == top && (std::isinf(sum) ? out[896 + i] == sum : std::fabs(out[896 + i] - sum) < 1e-4);
    if (i > 0 && i < 32)
      red &= std::fabs(out[1024 + i] - (double(in[i]) + in[i + 32] + in[i + 64] + in[i + 96])) < 1e-4;
  }
  expect(ex2 < 0x1p-21 && out[0] == 0 && out[1] == 0 && out[2] == 1, "ex2");
  expect(lg2 < 1e-6, "lg2");
  expect(rcp < 0x1p-21, "rcp");
  expect(tanh < 4e-7, "tanh");
  expect(cvt, "cvt_x2");
  expect(quad, "quad_max, quad_sum");
  expect(red, "red_global_add_f32");
}

}  // namespace

int main() {
  test_mma<bf16>(Type::bf16, "bf16");
  test_mma<f16>(Type::f16, "f16");
  test_math();
  test_load<tile::SharedTile<64, 64>, 128>(64);
  test_load<tile::SharedTile<128, 64>, 256>(40);
  test_load<tile::SharedTile<64, 96>, 128>(96);
  test_load<tile::SharedTile<64, 96>, 256>(72);
  test_load<tile::SharedTile<32, 128>, 128>(128);
  test_load<tile::SharedTile<128, 128>, 128>(104);
  test_load<tile::SharedTile<64, 192>, 256>(184);
  test_load<tile::SharedTile<64, 256>, 256>(256);
  test_store<tile::SharedTile<64, 64>, 128>(64);
  test_store<tile::SharedTile<128, 64>, 128>(8);
  test_store<tile::SharedTile<128, 96>, 128>(88);
  test_store<tile::SharedTile<128, 128>, 256>(128);
  test_store<tile::SharedTile<128, 192>, 256>(136);
  test_store<tile::SharedTile<64, 256>, 128>(248);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
