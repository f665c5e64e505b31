#include "common/host/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace cula {

namespace {

struct Job {
  int64_t units;
  int max_workers;
  void (*body)(void*, int64_t, int);
  void* context;
  std::atomic<int64_t> next{0};
  int workers = 0;  // that ever joined; the next one's index
  int active = 0;   // that have not left yet
  std::exception_ptr error = nullptr;

  // The units of one worker. Returns when none are left; on an exception the remaining units are dropped.
  std::exception_ptr run(int worker) {
    try {
      for (int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) body(context, unit, worker);
    } catch (...) {
      next.store(units);
      return std::current_exception();
    }
    return nullptr;
  }
};

// Threads are started when first needed and live as long as the process: joining them in a static destructor would
// race with other destructors, so the pool is never destroyed.
class Pool {
 public:
  void run(Job& job) {
    std::unique_lock lock(mutex_);
    const int helpers = static_cast<int>(std::min<int64_t>(job.max_workers, job.units)) - 1;
    while (threads_ < helpers && start_thread()) ++threads_;
    jobs_.push_back(&job);
    job.workers = job.active = 1;
    lock.unlock();
    work_.notify_all();
    std::exception_ptr error = job.run(0);
    lock.lock();
    leave(job, error);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    done_.wait(lock, [&] { return job.active == 0; });
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  // A process may be at its limit of threads; those that there are, the caller at least, do the work.
  bool start_thread() {
    try {
      std::thread([this] { serve(); }).detach();
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      Job* job = nullptr;
      work_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      const int worker = job->workers++;
      ++job->active;
      lock.unlock();
      std::exception_ptr error = job->run(worker);
      lock.lock();
      leave(*job, error);
    }
  }

  Job* open_job() {
    for (Job* job : jobs_) {
      if (job->workers < job->max_workers && job->next.load() < job->units) return job;
    }
    return nullptr;
  }

  void leave(Job& job, const std::exception_ptr& error) {
    if (error && !job.error) job.error = error;
    if (--job.active == 0) done_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<Job*> jobs_;
  int threads_ = 0;
};

std::atomic<Pool*> g_pool{nullptr};

// A forked child has none of its parent's threads, and its copy of the mutex may be locked: it starts a new pool and
// leaves the old one alone.
void forget_pool_in_child() { g_pool.store(nullptr); }

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  static_cast<void>(registered);
  Pool* current = g_pool.load();
  if (current == nullptr) {
    Pool* fresh = new Pool;
    if (g_pool.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;  // another thread was first; it has started nothing in this one
  }
  return *current;
}

}  // namespace

void parallel_for_units(int64_t units, int num_threads, void (*body)(void*, int64_t, int), void* context) {
  if (num_threads <= 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) body(context, unit, 0);
    return;
  }
  Job job{.units = units, .max_workers = num_threads, .body = body, .context = context};
  pool().run(job);
}

}  // namespace cula
