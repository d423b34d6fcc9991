// Runs a counted loop on an Executor. Knows nothing of attention.
//
// A task that an Executor starts late, even after the loop returned, finds no index left and touches nothing but the
// counter it shares; the caller waits only for indices that someone has already taken.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "cpu/kernels.h"

namespace jax_flash2::cpu {

// How many workers, the caller among them, a loop of `count` bodies and `work` multiplications can use. To wake a thread
// takes about as long as a million multiplications.
inline int workers(const Executor& executor, int64_t count, double work) {
  const double all = 1.0 + max_(executor.threads(), 0);
  return static_cast<int>(std::max(1.0, std::min({all, static_cast<double>(count), work * 1e-6})));
}

// Calls body(index, worker) once for every index in [0, count), in any order; worker < `n_workers` names the scratch that
// the call may use alone. Returns when all calls have.
template <class Body>
void parallel_for(Executor& executor, int n_workers, int64_t count, const Body& body) {
  struct Loop {
    std::atomic<int64_t> next{0};
    std::atomic<int> worker{1};  // the caller is worker 0
    int64_t count, done = 0;
    const Body* body;  // lives as long as an index is taken and not done
    std::mutex mutex;
    std::condition_variable all_done;

    void work(int id) {
      int64_t mine = 0;
      for (int64_t i; (i = next.fetch_add(1)) < count; mine++) {
        if (id < 0) id = worker.fetch_add(1);
        (*body)(i, id);
      }
      if (mine == 0) return;
      std::lock_guard lock(mutex);
      done += mine;
      if (done == count) all_done.notify_all();
    }
  };
  std::shared_ptr<Loop> loop;
  try {
    if (n_workers > 1) {
      loop = std::make_shared<Loop>();
      loop->count = count, loop->body = &body;
    }
    for (int w = 1; w < n_workers; w++) executor.schedule([loop] { loop->work(-1); });
  } catch (...) {  // no memory for more helpers: the caller does what they do not
  }
  if (!loop) {
    for (int64_t i = 0; i < count; i++) body(i, 0);
    return;
  }
  loop->work(0);
  std::unique_lock lock(loop->mutex);
  loop->all_done.wait(lock, [&] { return loop->done == count; });
}

}  // namespace jax_flash2::cpu
