// Sums while publishers publish: the reduce-scatter of the shared-memory transport in small, with threads as ranks. Every
// rank writes its whole operand into its slot, announces it, sums its own slice of all slots, and reuses its slot once
// all have read it. Slots and totals are plain memory: the counters alone keep the ranks apart.
#include "check.h"
#include "naive.h"
#include "ranks.h"

using hp_test::Counters;
using hp_test::run_ranks;

namespace {

constexpr int32_t kRanks = 4;
constexpr size_t kSlice = 1000;

float value_of(int32_t rank, uint32_t round, size_t index) {
  return static_cast<float>((static_cast<size_t>(rank) * 31 + round * 7 + index) % 64) * 0.25f;
}

template <typename T>
struct Exchange {
  using Sum = void (*)(float*, const T* const*, int32_t, float, size_t, int32_t);

  Counters<kRanks> ready, done;
  std::vector<std::vector<T>> slots = std::vector<std::vector<T>>(kRanks, std::vector<T>(kRanks * kSlice));

  void run(Sum sum, uint32_t rounds, int32_t spin) {
    run_ranks(kRanks, [&](int32_t rank) {
      for (uint32_t round = 1; round <= rounds; ++round) reduce(sum, rank, round, spin);
    });
  }

  void reduce(Sum sum, int32_t rank, uint32_t round, int32_t spin) {
    CHECK(done.wait(round - 1, hp_test::kPatience, spin) == -1);
    for (size_t index = 0; index < slots[rank].size(); ++index) {
      naive::store(&slots[rank][index], value_of(rank, round, index));
    }
    ready.publish(rank, round);

    CHECK(ready.wait(round, hp_test::kPatience, spin) == -1);
    const T* sources[kRanks];
    for (int32_t peer = 0; peer < kRanks; ++peer) sources[peer] = slots[peer].data() + rank * kSlice;
    std::vector<float> total(kSlice);
    sum(total.data(), sources, kRanks, 0.5f, kSlice, 1);
    done.publish(rank, round);

    for (size_t index = 0; index < kSlice; ++index) {
      float expected = 0.0f;
      for (int32_t peer = 0; peer < kRanks; ++peer) expected += value_of(peer, round, rank * kSlice + index);
      CHECK(total[index] == expected * 0.5f);
    }
  }
};

}  // namespace

TEST(float32_operands_arrive_whole) {
  for (const int32_t spin : {0, 100}) Exchange<float>().run(hp_sum_f32, 150, spin);
}

TEST(bfloat16_operands_arrive_whole) {
  for (const int32_t spin : {0, 100}) Exchange<uint16_t>().run(hp_sum_bf16_f32, 150, spin);
}
