// Counters in shared memory, waited for with a futex, and locks that tell who lives.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>

#include "hp_native.h"

namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free,
              "a counter is a plain word in shared memory");

std::atomic<uint32_t>* as_atomic(uint32_t* word) { return reinterpret_cast<std::atomic<uint32_t>*>(word); }

const std::atomic<uint32_t>* as_atomic(const uint32_t* word) {
  return reinterpret_cast<const std::atomic<uint32_t>*>(word);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
}

// Not the private variants of the operations: waiters are other processes.
void sleep_while(const uint32_t* word, uint32_t value, int64_t at_most_ns) {
  const timespec limit{static_cast<time_t>(at_most_ns / 1000000000), static_cast<long>(at_most_ns % 1000000000)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, at_most_ns < 0 ? nullptr : &limit, nullptr, 0);
}

// A century, in microseconds: beyond it, nanoseconds would overflow.
constexpr int64_t kLongestTimeout = int64_t{100} * 365 * 86400 * 1000000;

bool has_reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

struct flock byte_lock(int64_t offset) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = offset;
  lock.l_len = 1;
  return lock;
}

}  // namespace

void hp_counter_publish(uint32_t* counter, uint32_t value) {
  as_atomic(counter)->store(value, std::memory_order_release);
  syscall(SYS_futex, counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int32_t hp_counters_wait(const uint32_t* counters, int32_t count, size_t stride, uint32_t target, int64_t timeout_us,
                         int32_t spin) {
  if (timeout_us > kLongestTimeout) timeout_us = -1;
  int64_t deadline = -1;  // read the clock only once something has to be waited for
  for (int32_t index = 0; index < count; ++index) {
    const auto* word = reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(counters) + index * stride);
    for (;;) {
      const uint32_t value = as_atomic(word)->load(std::memory_order_acquire);
      if (has_reached(value, target)) break;
      if (spin > 0) {
        --spin;
        relax();
        continue;
      }
      int64_t rest = -1;
      if (timeout_us >= 0) {
        const int64_t now = now_ns();
        if (deadline < 0) deadline = now + timeout_us * 1000;
        rest = deadline - now;
        if (rest <= 0) return index;
      }
      sleep_while(word, value, rest);
    }
  }
  return -1;
}

int32_t hp_barrier(uint32_t* counters, int32_t count, size_t stride, int32_t own, uint32_t round, int64_t timeout_us,
                   int32_t spin) {
  auto* mine = reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(counters) + own * stride);
  if (as_atomic(mine)->load(std::memory_order_relaxed) != round) hp_counter_publish(mine, round);
  return hp_counters_wait(counters, count, stride, round, timeout_us, spin);
}

int32_t hp_life_begin(int32_t file, int64_t offset) {
  struct flock lock = byte_lock(offset);
  return fcntl(file, F_SETLK, &lock) == 0 ? 0 : errno;
}

int32_t hp_life_is_held(int32_t file, int64_t offset) {
  struct flock lock = byte_lock(offset);
  if (fcntl(file, F_GETLK, &lock) != 0) return -errno;
  return lock.l_type != F_UNLCK;
}
