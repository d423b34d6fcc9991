// What the rest of the package knows of the CPU kernels: two passes over a Problem, done when they return.
#pragma once
#include <functional>

#include "core/problem.h"

namespace jax_flash2::cpu {

// Where tasks may run. The kernels never wait for a task that has not started: the caller does all work that no one
// else takes, so a pool of size one, or a caller that is itself a pool worker, cannot deadlock.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual int threads() const = 0;  // the caller not counted
  virtual void schedule(std::function<void()> task) = 0;
};

// Writes out and lse.
Status forward(const Problem& p, Executor& executor);

// Writes dq, dk, dv and the gradient slots that are present.
Status backward(const Problem& p, Executor& executor);

}  // namespace jax_flash2::cpu
