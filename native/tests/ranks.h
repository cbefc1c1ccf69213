// Threads that stand for ranks, and counters for them. ThreadSanitizer sees threads only, not other processes.
#ifndef HP_TESTS_RANKS_H
#define HP_TESTS_RANKS_H

#include <cstdint>
#include <thread>
#include <vector>

#include "hp_native.h"

namespace hp_test {

constexpr int64_t kSecond = 1000000;  // microseconds
constexpr int64_t kPatience = 60 * kSecond;

// Counters, each alone in a cache line.
template <int32_t count>
struct Counters {
  struct alignas(64) Line {
    uint32_t word = 0;
  };
  Line lines[count];

  static constexpr size_t stride = sizeof(Line);
  uint32_t* at(int32_t index) { return &lines[index].word; }

  void publish(int32_t index, uint32_t value) { hp_counter_publish(at(index), value); }
  int32_t wait(uint32_t target, int64_t timeout_us = kPatience, int32_t spin = 0) {
    return hp_counters_wait(at(0), count, stride, target, timeout_us, spin);
  }
  int32_t barrier(int32_t own, uint32_t round, int64_t timeout_us = kPatience, int32_t spin = 0) {
    return hp_barrier(at(0), count, stride, own, round, timeout_us, spin);
  }
};

// Runs body(0), body(1), ... at once and waits for all.
template <typename Body>
void run_ranks(int32_t count, const Body& body) {
  std::vector<std::thread> ranks;
  for (int32_t rank = 0; rank < count; ++rank) ranks.emplace_back(body, rank);
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace hp_test

#endif  // HP_TESTS_RANKS_H
