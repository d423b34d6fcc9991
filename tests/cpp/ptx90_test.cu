// The sm_90a instructions, one by one against what they are said to do: `ptx90_test` prints a line a test and
// `N passed, M failed`. Inputs are small integers, so every product is exact and must come out equal. Needs a GPU.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "core/problem.h"
#include "cuda/element.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::
    sm90 {  // kernels stand beside those of the package: an emulation knows where their memory is

// All panels of a tile whose first row is `row` of matrix (head, batch) under the map.
template <class Tile>
__device__ void load_tile(uint32_t tile, const CUtensorMap& map, int row, int head, int batch, uint32_t barrier) {
  ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
  for (int panel = 0; panel < Tile::kPanels; panel++) {
    ptx::cp_async_bulk_tensor_4d_load(tile + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelCols, row, head,
                                      batch, barrier, ptx::kEvictLast);
  }
}

template <int kCols8>
__device__ void write_accumulators(const float (&d)[kCols8][4], float* to) {  // [64][8 kCols8]
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
  for (int x = 0; x < kCols8 * 4; x++)
    to[(row + x / 2 % 2 * 8) * kCols8 * 8 + x / 4 * 8 + col + x % 2] = d[x / 4][x % 4];
}

// twice a[64][kDepth] times b: b[kN][kDepth] along k from shared memory (scores), or b[kDepth][kN] along n with `a` in
// registers (output). The second product adds to the first, which adds to nothing.
template <class Element, int kN, int kDepth, bool kScores>
__global__ void __launch_bounds__(128)
    product_kernel(const __grid_constant__ MappedTensor a, const __grid_constant__ MappedTensor b, const Element* a_g,
                   float* result) {
  using ATile = tile::SharedTile<64, kScores ? kDepth : 64>;
  using BTile = tile::SharedTile<kScores ? kN : kDepth, kScores ? kDepth : kN>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t a_s = ptx::shared_address(shared_memory), b_s = a_s + ATile::kBytes, barrier = b_s + BTile::kBytes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, kScores ? 2 : 1);
    ptx::fence_mbarrier_init();
    if (kScores) load_tile<ATile>(a_s, a.map, 0, 0, 0, barrier);
    load_tile<BTile>(b_s, b.map, 0, 0, 0, barrier);
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(barrier, 0);

  float d[kN / 8][4];
  for (int x = 0; x < kN / 2; x++) d[x / 4][x % 4] = 1e30f;
  if constexpr (kScores) {
    const tile::Operand<ATile, ptx::Major::kK> a_operand(a_s);
    const tile::Operand<BTile, ptx::Major::kK> b_operand(b_s);
    ptx::pin(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 8; k++) {
      ptx::Wgmma<Element, kN>::template ss<ptx::Major::kK>(d, a_operand.step(k % (kDepth / 16)),
                                                           b_operand.step(k % (kDepth / 16)), k > 0);
    }
  } else {
    uint32_t fragments[kDepth / 16][4];
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
    for (int x = 0; x < kDepth / 4; x++) {
      fragments[x / 4][x % 4] =
          *reinterpret_cast<const uint32_t*>(a_g + (row + x % 2 * 8) * kDepth + x / 4 * 16 + x / 2 % 2 * 8 + col);
    }
    const tile::Operand<BTile, ptx::Major::kMN> b_operand(b_s);
    ptx::pin(d), ptx::pin(fragments);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 8; k++) {
      ptx::Wgmma<Element, kN>::template rs<ptx::Major::kMN>(d, fragments[k % (kDepth / 16)],
                                                            b_operand.step(k % (kDepth / 16)), k > 0);
    }
    ptx::pin(fragments);
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::pin(d);
  write_accumulators(d, result);
}

// A tile from (row0, head, batch) of one tensor, as it lies in shared memory, to `seen` [rows][cols]; then through
// registers and stmatrix to rows row0 + 3 .. of another.
template <class Element, int kRows, int kCols>
__global__ void __launch_bounds__(128)
    copy_kernel(const __grid_constant__ MappedTensor from, const __grid_constant__ MappedTensor to, int row0, int head,
                int batch, uint16_t* seen) {
  using Tile = tile::SharedTile<kRows, kCols>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t tile_s = ptx::shared_address(shared_memory), out_s = tile_s + Tile::kBytes;
  const uint32_t barrier = out_s + Tile::kBytes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    load_tile<Tile>(tile_s, from.map, row0, head, batch, barrier);
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(barrier, 0);
  const auto element = [&](int row, int col) {
    return uint16_t(ptx::ld_shared_b32(tile_s + Tile::offset(row, col / 8) + col % 8 / 2 * 4) >> col % 2 * 16);
  };
  for (int x = threadIdx.x; x < kRows * kCols; x += 128) seen[x] = element(x / kCols, x % kCols);

  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  for (int block = threadIdx.x / 32; block < kRows / 16; block += 4) {
    for (int c = 0; c < kCols / 16; c++) {
      const auto pair = [&](int row, int col) {
        return element(block * 16 + row, c * 16 + col) | uint32_t(element(block * 16 + row, c * 16 + col + 1)) << 16;
      };
      ptx::stmatrix_x4(out_s + Tile::offset(block * 16 + lane % 16, 2 * c + lane / 16), pair(g, 2 * q),
                       pair(g + 8, 2 * q), pair(g, 2 * q + 8), pair(g + 8, 2 * q + 8));
    }
  }
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int panel = 0; panel < Tile::kPanels; panel++) {
      ptx::cp_async_bulk_tensor_4d_store(&to.map, panel * Tile::kPanelCols, row0 + 3, head, batch,
                                         out_s + panel * Tile::kPanelBytes);
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
    ptx::cp_async_bulk_wait_group<0>();
  }
}

// A box of rows of packed heads, as it comes to lie.
template <int kRows, int kCols>
__global__ void __launch_bounds__(128)
    packed_kernel(const __grid_constant__ MappedTensor from, int row0, int head, int batch, uint16_t* seen) {
  using Tile = tile::SharedTile<kRows, kCols>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t tile_s = ptx::shared_address(shared_memory), barrier = tile_s + Tile::kBytes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, Tile::kBytes);
    for (int panel = 0; panel < Tile::kPanels; panel++) {
      ptx::cp_async_bulk_tensor_5d_load(tile_s + panel * Tile::kPanelBytes, &from.map, panel * Tile::kPanelCols, 0,
                                        row0, head, batch, barrier, ptx::kEvictFirst);
    }
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(barrier, 0);
  for (int x = threadIdx.x; x < kRows * kCols; x += 128) {
    const int row = x / kCols, col = x % kCols;
    seen[x] = uint16_t(ptx::ld_shared_b32(tile_s + Tile::offset(row, col / 8) + col % 8 / 2 * 4) >> col % 2 * 16);
  }
}

// Two warpgroups write a list in turns, with more registers than they started with; each warp says who leads.
__global__ void __launch_bounds__(384, 1) turns_kernel(int* list, int* leaders) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t marks = ptx::shared_address(shared_memory);
  if (threadIdx.x == 0) ptx::st_shared_b32(marks, 0);
  __syncthreads();
  if (ptx::elect_sync()) leaders[threadIdx.x / 32] = threadIdx.x % 32;
  const int group = int(threadIdx.x / 128) - 1;
  if (group < 0) {
    ptx::setmaxnreg_dec<24>();
    return;
  }
  ptx::setmaxnreg_inc<240>();
  if (group == 1) ptx::bar_arrive(1, 256);
  for (int turn = 0; turn < 8; turn++) {
    ptx::bar_sync(1 + group, 256);
    if (threadIdx.x % 128 == 0) list[turn * 2 + group] = int(ptx::ld_shared_b32(marks));
    if (threadIdx.x % 128 == 0) ptx::red_shared_or_b32(marks, 1u << (turn * 2 + group));
    ptx::bar_arrive(1 + (group ^ 1), 256);
  }
}

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// Adds 1 to what the kernel before has left, a while after it began, and says when it began and when it was done.
__global__ void relay_kernel(const int* from, int* to, int64_t* began, int64_t* done) {
  const int64_t start = nanoseconds();
  ptx::let_kernel_behind_begin();
  ptx::wait_for_kernels_before();
  const int got = *reinterpret_cast<const volatile int*>(from);
  for (const int64_t waits = nanoseconds(); nanoseconds() < waits + 200'000;) {
  }
  *to = got + 1, *began = start, *done = nanoseconds();
}

}  // namespace jax_flash2::cuda::sm90

namespace {

using namespace jax_flash2;
namespace sm90 = jax_flash2::cuda::sm90;

int passed = 0, failed = 0;

void judge(const std::string& name, bool good) {
  std::printf("%s %s\n", good ? "ok  " : "FAIL", name.c_str());
  good ? passed++ : failed++;
}
void require(bool good, const char* what) {
  if (good) return;
  std::printf("%s failed\n", what);
  std::exit(2);
}
void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) std::printf("%s: ", cudaGetErrorString(error));
  require(error == cudaSuccess, what);
}
void require(Status status, const char* what) {
  if (!status.ok()) std::printf("%s: ", status.error);
  require(status.ok(), what);
}

// Never freed: the test is short.
template <class T>
T* device(const std::vector<T>& host) {
  void* memory = nullptr;
  require(cudaMalloc(&memory, host.size() * sizeof(T)), "cudaMalloc");
  require(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy to device");
  return static_cast<T*>(memory);
}
template <class T>
void read(std::vector<T>& host, const void* memory) {
  require(cudaDeviceSynchronize(), "kernel");
  require(cudaMemcpy(host.data(), memory, host.size() * sizeof(T), cudaMemcpyDeviceToHost), "copy from device");
}

template <class Element>
constexpr cases::Type kType = std::is_same_v<Element, cuda::bf16> ? cases::Type::bf16 : cases::Type::f16;

// [batches][rows][heads][cols] under a map of boxes of box_rows rows.
template <class Element>
sm90::MappedTensor map_tensor(void* memory, int batches, int rows, int heads, int cols, int panel_cols, int box_rows,
                              int pack_log2 = -1) {
  Problem p{};
  p.dtype = kType<Element> == cases::Type::bf16 ? DType::kBF16 : DType::kF16;
  for (int a = 0; a < kMaxBatchAxes; a++) p.batch_sizes[a] = a == 2 ? batches : 1;
  Tensor t;
  t.data = memory, t.head = cols, t.row = int64_t(heads) * cols, t.batch[2] = t.row * rows;
  sm90::MappedTensor mapped;
  const sm90::TensorMapShape shape{rows, heads, cols, panel_cols, box_rows, pack_log2};
  require(sm90::encode_tensor_map(sm90::find_tensor_map_encoder(), p, t, shape, &mapped), "tensor map");
  return mapped;
}

template <class Element>
std::vector<uint16_t> integers(size_t count, cases::Random& random) {
  std::vector<uint16_t> r(count);
  for (uint16_t& x : r) x = cases::encode(kType<Element>, float(int(random.uniform() * 17) - 8));
  return r;
}

template <class Element, int kN, int kDepth, bool kScores>
void test_product() {
  using ATile = cuda::tile::SharedTile<64, kScores ? kDepth : 64>;
  using BTile = cuda::tile::SharedTile<kScores ? kN : kDepth, kScores ? kDepth : kN>;
  cases::Random random(kN * 1000 + kDepth);
  const auto a = integers<Element>(64 * kDepth, random), b = integers<Element>(kN * kDepth, random);
  uint16_t *const a_g = device(a), *const b_g = device(b);
  std::vector<float> got(64 * kN);
  float* const result = device(got);
  require(
      cuda::launch_kernel(sm90::product_kernel<Element, kN, kDepth, kScores>, 1, 128, ATile::kBytes + BTile::kBytes + 8,
                          nullptr, map_tensor<Element>(a_g, 1, 64, 1, kDepth, ATile::kPanelCols, 64),
                          map_tensor<Element>(b_g, 1, BTile::kRows, 1, BTile::kCols, BTile::kPanelCols, BTile::kRows),
                          static_cast<const Element*>(static_cast<void*>(a_g)), result),
      "launch");
  read(got, result);
  bool equal = true;
  for (int i = 0; i < 64; i++)
    for (int n = 0; n < kN; n++) {
      float want = 0;
      for (int k = 0; k < kDepth; k++)
        want += 2 * cases::decode(kType<Element>, a[i * kDepth + k]) *
                cases::decode(kType<Element>, b[kScores ? n * kDepth + k : k * kN + n]);
      equal &= got[i * kN + n] == want;
    }
  judge(std::string(kScores ? "wgmma ss, b along k, " : "wgmma rs, b along n, ") +
            (kType<Element> == cases::Type::bf16 ? "bf16" : "f16") + " N" + std::to_string(kN) + " k" +
            std::to_string(kDepth),
        equal);
}

template <class Element, int... kN>
void test_products() {
  (test_product<Element, kN, 64, true>(), ...);
  (test_product<Element, kN, 96, true>(), ...);
  (test_product<Element, kN, 128, true>(), ...);
}
template <class Element, int... kDepth>
void test_outputs() {
  (test_product<Element, 64, kDepth, false>(), ...);
  (test_product<Element, 96, kDepth, false>(), ...);
  (test_product<Element, 128, kDepth, false>(), ...);
  (test_product<Element, 192, kDepth, false>(), ...);
  (test_product<Element, 256, kDepth, false>(), ...);
}

// Tensors of 3 batch rows, 70 rows, 2 heads of `cols` columns; the tile reaches past the last row and column.
template <int kRows, int kCols>
void test_copy(int cols, int row0) {
  using Tile = cuda::tile::SharedTile<kRows, kCols>;
  constexpr int kLength = 70, kHeads = 2, kBatches = 3, kHead = 1, kBatch = 1;
  const auto index = [&](int b, int row, int head, int col) {
    return ((size_t(b) * kLength + row) * kHeads + head) * cols + col;
  };
  std::vector<uint16_t> from(index(kBatches, 0, 0, 0)), to(from.size(), 0xabcd), seen(kRows * kCols, 0xffff);
  for (size_t x = 0; x < from.size(); x++) from[x] = uint16_t(x * 40503 % 65521);
  uint16_t *const from_g = device(from), *const to_g = device(to), *const seen_g = device(seen);
  require(cuda::launch_kernel(sm90::copy_kernel<cuda::bf16, kRows, kCols>, 1, 128, 2 * Tile::kBytes + 8, nullptr,
                              map_tensor<cuda::bf16>(from_g, kBatches, kLength, kHeads, cols, Tile::kPanelCols, kRows),
                              map_tensor<cuda::bf16>(to_g, kBatches, kLength, kHeads, cols, Tile::kPanelCols, kRows),
                              row0, kHead, kBatch, seen_g),
          "launch");
  std::vector<uint16_t> got(to.size());
  read(got, to_g), read(seen, seen_g);
  bool loaded = true;
  for (int x = 0; x < kRows * kCols; x++) {
    const int row = row0 + x / kCols, col = x % kCols;
    const uint16_t want = row < kLength && col < cols ? from[index(kBatch, row, kHead, col)] : 0;
    loaded &= seen[x] == want;
    if (row + 3 < kLength && col < cols) to[index(kBatch, row + 3, kHead, col)] = want;
  }
  const std::string name = std::to_string(kRows) + "x" + std::to_string(kCols) + " of " + std::to_string(cols) +
                           " columns from row " + std::to_string(row0);
  judge("TMA load and swizzle, " + name, loaded);
  judge("stmatrix and TMA store, " + name, got == to);
}

void test_turns() {
  std::vector<int> list(16, -1), leaders(12, -1);
  int *const list_g = device(list), *const leaders_g = device(leaders);
  require(cuda::launch_kernel(sm90::turns_kernel, 1, 384, 16, nullptr, list_g, leaders_g), "launch");
  read(list, list_g), read(leaders, leaders_g);
  bool in_order = true, one = true;
  for (int x = 0; x < 16; x++) in_order &= list[x] == (1 << x) - 1;
  for (const int leader : leaders) one &= leader == leaders[0] && 0 <= leader && leader < 32;
  judge("named barriers, red.shared, setmaxnreg", in_order);
  judge("elect.sync", one);
}

// Kernels in a row, as a stream runs them and as a graph does: each sees what the one before wrote last, though it began
// before that one ended.
void test_relay() {
  constexpr int kKernels = 8, kBlocks = 1;
  std::vector<int> values(kKernels + 1);
  std::vector<int64_t> began(kKernels), done(kKernels);
  int* const values_g = device(values);
  int64_t *const began_g = device(began), *const done_g = device(done);
  cudaStream_t stream;
  require(cudaStreamCreate(&stream), "stream");
  const auto enqueue = [&] {
    for (int x = 0; x < kKernels; x++) {
      require(cuda::launch_kernel({.early = true}, sm90::relay_kernel, kBlocks, 1, 0, stream,
                                  static_cast<const int*>(values_g + x), values_g + x + 1, began_g + x, done_g + x),
              "launch");
    }
  };
  const auto judge_run = [&](const std::string& how) {
    require(cudaStreamSynchronize(stream), "run");
    read(values, values_g), read(began, began_g), read(done, done_g);
    bool in_order = true;
    int early = 0;  // how many: the host may fall behind a stream
    for (int x = 0; x < kKernels; x++) in_order &= values[x + 1] == x + 1;
    for (int x = 1; x < kKernels; x++) early += began[x] < done[x - 1];
    judge("griddepcontrol.wait, " + how, in_order);
    if (cuda::driver_knows_early()) judge("griddepcontrol.launch_dependents, " + how, early > 0);
  };
  const auto clear = [&] { require(cudaMemset(values_g, 0, values.size() * sizeof(int)), "clear"); };
  clear(), enqueue(), judge_run("in a stream");

  cudaGraph_t graph;
  cudaGraphExec_t executable;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  enqueue();
  require(cudaStreamEndCapture(stream, &graph), "capture");
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (int run = 0; run < 2; run++)
    clear(), require(cudaGraphLaunch(executable, stream), "graph"), judge_run("in a graph");
}

template <int kRows, int kCols>
void test_packed(int cols, int pack_log2, int row0) {
  using Element = cuda::bf16;
  using Tile = cuda::tile::SharedTile<kRows, kCols>;
  constexpr int kBatches = 2, kLength = 70, kHeads = 24;
  const int pack = 1 << pack_log2, head = kHeads / pack - 1, batch = 1;
  cases::Random random(7);
  const auto host = integers<Element>(size_t(kBatches) * kLength * kHeads * cols, random);
  std::vector<uint16_t> got(kRows * kCols);
  uint16_t* const seen = device(got);
  require(cuda::launch_kernel(
              sm90::packed_kernel<kRows, kCols>, 1, 128, Tile::kBytes + 8, nullptr,
              map_tensor<Element>(device(host), kBatches, kLength, kHeads, cols, Tile::kPanelCols, kRows, pack_log2),
              row0, head, batch, seen),
          "launch");
  read(got, seen);
  bool equal = true;
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kCols; c++) {
      const int row = row0 + r / pack, n = head * pack + r % pack;
      const bool inside = row < kLength && c < cols;
      equal &= got[r * kCols + c] ==
               (inside ? host[((size_t(batch) * kLength + row) * kHeads + n) * cols + c] : uint16_t(0));
    }
  judge("tma load of packed heads " + std::to_string(cols) + " of " + std::to_string(kCols) + " columns, " +
            std::to_string(pack) + " heads, row " + std::to_string(row0),
        equal);
}

}  // namespace

int main() {
  test_turns();
  test_relay();
  test_packed<64, 64>(64, 0, 10), test_packed<64, 128>(128, 1, 0), test_packed<64, 128>(72, 3, 60);
  test_packed<64, 96>(80, 2, 50), test_packed<64, 256>(256, 3, 66);
  test_copy<64, 64>(64, 0), test_copy<64, 64>(40, 10), test_copy<64, 64>(8, 69);
  test_copy<80, 128>(128, 0), test_copy<48, 128>(72, 30), test_copy<64, 96>(96, 5), test_copy<32, 96>(80, 50);
  test_copy<64, 256>(256, 0);
  test_products<cuda::bf16, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256>();
  test_outputs<cuda::bf16, 64, 80, 96, 128>();
  test_product<cuda::f16, 128, 128, true>(), test_product<cuda::f16, 80, 96, true>();
  test_product<cuda::f16, 128, 128, false>(), test_product<cuda::f16, 96, 80, false>();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
