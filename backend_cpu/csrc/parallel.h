// Work sharing over torch's own threads, and scratch memory that outlives a call.
#pragma once
#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "error.h"

namespace hal_cpu {

// Tasks are taken as threads come free, a few at a time where there are very many: cores that share
// their time with others finish at different moments, and a counter that all of them add to costs
// more than a short task. Order and split never reach the numbers, since each task owns its outputs.
template <class F>
void run_tasks(int64_t tasks, bool worth_threads, const F& task) {
  const int64_t threads = worth_threads && tasks > 1 ? torch::stable::get_num_threads() : 1;
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  const int64_t many = tasks / (32 * threads), step = many < 1 ? 1 : many;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads < tasks ? threads : tasks, 1, [&](int64_t, int64_t) {
    for (;;) {
      const int64_t first = next.fetch_add(step, std::memory_order_relaxed);
      if (first >= tasks) return;
      for (int64_t i = first; i < tasks && i < first + step; ++i) task(i);
    }
  });
}

// Below this many multiply-adds, waking another thread costs more than it saves; on a machine that others use too, far more.
constexpr int64_t kWorthThreads = int64_t{1} << 18;
// The same for values turned into records, each of which costs more than a multiply-add.
constexpr int64_t kWorthEncoding = int64_t{1} << 16;

// One 64-byte aligned region per calling thread, kept while small: decoding calls the same op
// thousands of times a second, and fresh pages would dominate. A layer, the calls it makes and the
// tasks they run take theirs from different uses, since all may be on the thread that called.
enum class Use { kLayer, kCall, kTask };

template <Use USE>
class ScratchFor {
 public:
  explicit ScratchFor(size_t bytes) {
    Cache& c = cache();
    if (c.size < bytes) {
      std::free(c.data);
      c.size = 0;
      // Large regions begin where a huge page may: without those, a long prompt's records cost
      // more in page faults than in writing.
      const size_t step = bytes < kHuge ? 64 : kHuge;
      c.size = (bytes + step - 1) / step * step;
      c.data = std::aligned_alloc(step, c.size);
      if (!c.data) {
        c.size = 0;
        throw std::bad_alloc();
      }
      if (step == kHuge) (void)madvise(c.data, c.size, MADV_HUGEPAGE);
    }
    next_ = static_cast<char*>(c.data);
    end_ = next_ + c.size;
  }
  ~ScratchFor() {
    Cache& c = cache();
    if (c.size > kKept) {
      std::free(c.data);
      c.data = nullptr;
      c.size = 0;
    }
  }
  ScratchFor(const ScratchFor&) = delete;
  ScratchFor& operator=(const ScratchFor&) = delete;

  static constexpr size_t bytes_for(size_t count, size_t size) {
    return (count * size + 63) / 64 * 64;
  }
  template <class T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(next_);
    const size_t bytes = bytes_for(static_cast<size_t>(count), sizeof(T));
    if (bytes > static_cast<size_t>(end_ - next_)) fail("scratch memory was sized too small");
    next_ += bytes;
    return p;
  }

 private:
  static constexpr size_t kHuge = size_t{2} << 20;
  // What a thread keeps from call to call: enough for a block of experts over a thousand tokens.
  static constexpr size_t kKept = size_t{USE == Use::kTask ? 4 : 64} << 20;
  struct Cache {
    void* data = nullptr;
    size_t size = 0;
    ~Cache() { std::free(data); }
  };
  static Cache& cache() {
    static thread_local Cache c;
    return c;
  }
  char* next_;
  char* end_;
};

using LayerScratch = ScratchFor<Use::kLayer>;
using Scratch = ScratchFor<Use::kCall>;
using TaskScratch = ScratchFor<Use::kTask>;

}  // namespace hal_cpu
