// The memory that workers put their tiles in, taken once per call. Knows no tile.
#pragma once
#include <cstdint>
#include <memory>
#include <new>

namespace jax_flash2::cpu {

inline constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline constexpr int64_t kLine = 64;  // bytes: a cache line, and the widest vector

struct AlignedDelete {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{kLine}); }
};

template <class T>
using Buffer = std::unique_ptr<T[], AlignedDelete>;

// Null when there is no memory.
template <class T>
Buffer<T> allocate(int64_t count) {
  const auto bytes = static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), kLine) + kLine);
  return Buffer<T>(static_cast<T*>(::operator new(bytes, std::align_val_t{kLine}, std::nothrow)));
}

// Deals a buffer out in pieces; without one it only adds the pieces up.
template <class T>
class Carve {
 public:
  explicit Carve(T* base) : base_(base) {}
  T* operator()(int64_t count) {
    T* piece = base_ ? base_ + used_ : nullptr;
    used_ += round_up(count, kLine / static_cast<int64_t>(sizeof(T)));
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  T* base_;
  int64_t used_ = 0;
};

}  // namespace jax_flash2::cpu
