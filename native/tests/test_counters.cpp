// Counters and the barrier, with threads as ranks. Data beside the counters is plain memory on purpose: a counter that
// ordered nothing would be a data race, which ThreadSanitizer reports.
#include <time.h>

#include <limits>

#include "check.h"
#include "ranks.h"

using hp_test::Counters;
using hp_test::kSecond;
using hp_test::run_ranks;

namespace {

int64_t now_us() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000000 + time.tv_nsec / 1000;
}

void sleep_us(int64_t microseconds) {
  const timespec time{static_cast<time_t>(microseconds / 1000000), static_cast<long>(microseconds % 1000000 * 1000)};
  nanosleep(&time, nullptr);
}

}  // namespace

TEST(a_reached_target_needs_no_time) {
  Counters<3> counters;
  for (int32_t index = 0; index < 3; ++index) counters.publish(index, 5);
  CHECK(counters.wait(5, 0) == -1);
  CHECK(counters.wait(4, 0) == -1);
  CHECK(counters.wait(6, 0) == 0);
  CHECK(hp_counters_wait(counters.at(0), 0, counters.stride, 99, 0, 0) == -1);
}

TEST(a_timeout_names_the_first_that_is_behind) {
  Counters<4> counters;
  const uint32_t values[] = {5, 4, 6, 2};
  for (int32_t index = 0; index < 4; ++index) counters.publish(index, values[index]);
  const int64_t began = now_us();
  CHECK(counters.wait(5, 50000) == 1);
  CHECK(now_us() - began >= 50000);
  counters.publish(1, 9);
  CHECK(counters.wait(5, 1000, 100) == 3);
}

TEST(values_wrap_around) {
  Counters<1> counters;
  counters.publish(0, 0xFFFFFFFE);
  CHECK(counters.wait(0xFFFFFFFD, 0) == -1);
  CHECK(counters.wait(1, 0) == 0);
  counters.publish(0, 0);
  CHECK(counters.wait(1, 0) == 0);
  counters.publish(0, 1);
  CHECK(counters.wait(1, 0) == -1);
  CHECK(counters.wait(0xFFFFFFFE, 0) == -1);
}

TEST(a_sleeper_is_woken_whatever_its_limit) {
  for (const int64_t timeout : {int64_t{-1}, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                                int64_t{600} * kSecond}) {
    Counters<1> counters;
    int32_t result = 7;
    std::thread waiter([&] { result = counters.wait(1, timeout); });
    sleep_us(20000);
    counters.publish(0, 1);
    waiter.join();  // or the test hangs, and ctest ends it
    CHECK(result == -1);
  }
}

TEST(what_was_written_before_a_publication_is_read_after_it) {
  constexpr uint32_t rounds = 2000;
  for (const int32_t spin : {0, 200}) {
    Counters<1> written, read;
    uint64_t data[8] = {};
    run_ranks(2, [&](int32_t rank) {
      for (uint32_t round = 1; round <= rounds; ++round) {
        if (rank == 0) {
          for (uint64_t& word : data) word = round;
          written.publish(0, round);
          CHECK(read.wait(round, hp_test::kPatience, spin) == -1);
        } else {
          CHECK(written.wait(round, hp_test::kPatience, spin) == -1);
          for (const uint64_t word : data) CHECK(word == round);
          read.publish(0, round);
        }
      }
    });
  }
}

TEST(nobody_leaves_a_barrier_before_all_are_in) {
  constexpr int32_t ranks = 4;
  constexpr uint32_t first = 0xFFFFFF00;  // wraps around on the way
  for (const int32_t spin : {0, 200}) {
    Counters<ranks> counters;
    for (int32_t rank = 0; rank < ranks; ++rank) counters.publish(rank, first - 1);
    uint32_t data[ranks] = {};
    run_ranks(ranks, [&](int32_t rank) {
      for (uint32_t step = 0; step < 600; ++step) {
        data[rank] = step;
        CHECK(counters.barrier(rank, first + 2 * step, hp_test::kPatience, spin) == -1);
        for (const uint32_t value : data) CHECK(value == step);
        CHECK(counters.barrier(rank, first + 2 * step + 1, hp_test::kPatience, spin) == -1);
      }
    });
  }
}

TEST(a_barrier_names_who_is_missing_and_is_entered_again) {
  Counters<3> counters;
  CHECK(counters.barrier(0, 1, 1000) == 1);
  counters.publish(1, 1);
  CHECK(counters.barrier(0, 1, 1000) == 2);
  std::thread late([&] { CHECK(counters.barrier(2, 1) == -1); });
  CHECK(counters.barrier(0, 1) == -1);
  late.join();
}
