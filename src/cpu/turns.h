// Lets tasks that run in any order add to shared rows in one order, so that a sum is the same however many threads run.
// Knows nothing of attention.
#pragma once
#include <atomic>
#include <cstdint>

namespace jax_flash2::cpu {

// A task may wait for the turns of tasks with lower indices only: parallel_for has handed those out before, so the
// unfinished task with the lowest index never waits, and there is no deadlock.
class Turn {
 public:
  void wait_for(int32_t turn) const {
    for (int spin = 0; spin < 1000; spin++)
      if (at_.load(std::memory_order_acquire) == turn) return;
    for (int32_t at; (at = at_.load(std::memory_order_acquire)) != turn;) at_.wait(at, std::memory_order_acquire);
  }
  void pass() {
    at_.fetch_add(1, std::memory_order_release);
    at_.notify_all();
  }

 private:
  std::atomic<int32_t> at_{0};
};

}  // namespace jax_flash2::cpu
