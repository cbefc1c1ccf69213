// What the device did, in the order in which the host asked for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fake_npu {

struct Entry {
  const char* kind;     // what happened, see tests/fake_npu/happens_before.py
  int64_t stream;
  int64_t subject;      // address of a storage, or number of an event
  int64_t start, end;   // bytes of the storage
  std::string name;     // of the kernel or collective
};

class Log {
 public:
  std::atomic<bool> is_on{false};
  std::atomic<bool> events_are_pending{true};  // what a query of an event answers: a device lags behind its host

  void add(const char* kind, int64_t stream, int64_t subject = 0, int64_t start = 0, int64_t end = 0,
           std::string name = {}) {
    if (is_on) {
      const std::lock_guard<std::mutex> guard(mutex_);
      entries_.push_back({kind, stream, subject, start, end, std::move(name)});
    }
  }

  std::vector<Entry> take() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return std::exchange(entries_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

Log& log();
int64_t stream_of_this_thread();
void set_stream_of_this_thread(int64_t stream);
int64_t new_stream();
int64_t new_event();
int64_t allocated_bytes();
int64_t peak_bytes();
void reset_peak();
void register_hooks();
at::Tensor as_cpu(const at::Tensor& tensor);  // a view of the same memory
void log_access(const at::Tensor& tensor, int64_t stream, const char* kind, const std::string& name);

}  // namespace fake_npu
