// Every kernel against its naive reference, bit for bit.
#include <initializer_list>

#include "check.h"
#include "hp_native.h"
#include "naive.h"

namespace {

// Enough for two threads. Few cases use it: sanitizers and emulation are slow.
constexpr size_t kLarge = (size_t{2} << 18) + 5;
// Tails of every vector width, and around a block of the sums.
constexpr size_t kSizes[] = {0, 1, 7, 16, 17, 31, 33, 4095, 4096, 4097, kLarge};
constexpr float kFactors[] = {1.0f, 0.25f, 1.0f / 3.0f, -2.5f};
constexpr int32_t kThreads = 3;

// Numbers of mixed magnitude, and every 16th a pattern of any kind: NaN, infinity, denormal.
void fill(std::vector<float>& values, uint64_t seed) {
  hp_test::Random random(seed);
  for (float& value : values) {
    value = random.bits() % 16 == 0 ? naive::from_bits(random.bits()) : std::ldexp(random.number(), random.bits() % 8);
  }
}

void fill(std::vector<uint16_t>& values, uint64_t seed) {
  hp_test::Random random(seed);
  for (uint16_t& value : values) {
    const uint32_t word = random.bits();
    value = static_cast<uint16_t>(word % 16 == 0 ? word >> 16 : naive::bits(random.number()) >> 16);
  }
}

template <typename T>
std::vector<T> filled(size_t size, uint64_t seed) {
  std::vector<T> values(size);
  fill(values, seed);
  return values;
}

// A copy that begins `offset` elements after an aligned address and has guards on both sides.
template <typename T>
class Guarded {
 public:
  Guarded(const std::vector<T>& values, size_t offset) : size_(values.size()), offset_(offset + 1) {
    memory_.assign(size_ + offset_ + 1, guard());
    std::copy(values.begin(), values.end(), memory_.begin() + static_cast<std::ptrdiff_t>(offset_));
  }

  T* data() { return memory_.data() + offset_; }

  bool guards_hold() const {
    bool hold = naive::same(memory_[size_ + offset_], guard());
    for (size_t i = 0; i < offset_; ++i) hold = hold && naive::same(memory_[i], guard());
    return hold;
  }

 private:
  static T guard() { return static_cast<T>(77); }

  size_t size_, offset_;
  std::vector<T> memory_;
};

template <typename Target, typename Source>
using Sum = void (*)(Target*, const Source* const*, int32_t, float, size_t, int32_t);
template <typename Target, typename Source>
using Scale = void (*)(Target*, const Source*, float, size_t, int32_t);

template <typename Target, typename Source>
void check_sum(Sum<Target, Source> kernel) {
  for (const size_t size : kSizes) {
    for (int32_t terms = 1; terms <= 7; ++terms) {
      if (size == kLarge && terms != 3) continue;
      std::vector<std::vector<Source>> values;
      for (int32_t term = 0; term < terms; ++term) values.push_back(filled<Source>(size, 100 * size + term));
      const float factor = kFactors[static_cast<size_t>(terms) % 4];
      for (const float scale : {1.0f, factor}) {
        const auto expected = naive::sum<Target, Source>(values, scale);
        for (const size_t offset : {0, 1}) {
          if (size == kLarge && offset == 0) continue;
          std::vector<Guarded<Source>> copies;
          for (const auto& value : values) copies.emplace_back(value, offset);
          std::vector<const Source*> sources;
          for (auto& copy : copies) sources.push_back(copy.data());
          Guarded<Target> target(std::vector<Target>(size), offset);
          kernel(target.data(), sources.data(), terms, scale, size, kThreads);
          CHECK(naive::same(target.data(), expected));
          CHECK(target.guards_hold());
          for (size_t term = 0; term < copies.size(); ++term) CHECK(naive::same(copies[term].data(), values[term]));
        }
      }
    }
  }
}

// The target is term 0 or term 1.
template <typename T>
void check_sum_in_place(Sum<T, T> kernel) {
  for (const size_t size : kSizes) {
    for (int32_t terms = 1; terms <= 7; ++terms) {
      if (size == kLarge && terms != 4) continue;
      for (int32_t own = 0; own < std::min(terms, 2); ++own) {
        std::vector<std::vector<T>> values;
        for (int32_t term = 0; term < terms; ++term) values.push_back(filled<T>(size, 7 * size + term));
        const float scale = terms % 2 == 0 ? 1.0f : 1.0f / 3.0f;
        const auto expected = naive::sum<T, T>(values, scale);
        Guarded<T> target(values[own], 1);
        std::vector<const T*> sources;
        for (const auto& value : values) sources.push_back(value.data());
        sources[own] = target.data();
        kernel(target.data(), sources.data(), terms, scale, size, kThreads);
        CHECK(naive::same(target.data(), expected));
        CHECK(target.guards_hold());
      }
    }
  }
}

template <typename Target, typename Source>
void check_scale_copy(Scale<Target, Source> kernel) {
  for (const size_t size : kSizes) {
    const auto source = filled<Source>(size, size + 1);
    for (const float alpha : kFactors) {
      if (size == kLarge && alpha != kFactors[2]) continue;
      Guarded<Target> target(std::vector<Target>(size), size % 2);
      kernel(target.data(), source.data(), alpha, size, kThreads);
      CHECK((naive::same(target.data(), naive::scale_copy<Target, Source>(source, alpha))));
      CHECK(target.guards_hold());
    }
  }
}

template <typename Source>
void check_accumulate(Scale<float, Source> kernel) {
  for (const size_t size : kSizes) {
    const auto before = filled<float>(size, size + 2);
    const auto source = filled<Source>(size, size + 3);
    for (const float alpha : kFactors) {
      if (size == kLarge && alpha != kFactors[2]) continue;
      Guarded<float> target(before, size % 2);
      kernel(target.data(), source.data(), alpha, size, kThreads);
      CHECK(naive::same(target.data(), naive::accumulate(before, source, alpha)));
      CHECK(target.guards_hold());
    }
  }
}

}  // namespace

TEST(sum_of_float32) { check_sum<float, float>(hp_sum_f32); }
TEST(sum_of_bfloat16) { check_sum<uint16_t, uint16_t>(hp_sum_bf16); }
TEST(sum_of_bfloat16_to_float32) { check_sum<float, uint16_t>(hp_sum_bf16_f32); }
TEST(sum_of_float32_into_a_term) { check_sum_in_place<float>(hp_sum_f32); }
TEST(sum_of_bfloat16_into_a_term) { check_sum_in_place<uint16_t>(hp_sum_bf16); }
TEST(scale_copy_of_float32) { check_scale_copy<float, float>(hp_scale_copy_f32); }
TEST(scale_copy_of_bfloat16) { check_scale_copy<float, uint16_t>(hp_scale_copy_bf16); }
TEST(scale_copy_to_bfloat16) { check_scale_copy<uint16_t, float>(hp_scale_copy_f32_bf16); }
TEST(accumulation_of_float32) { check_accumulate<float>(hp_accumulate_scaled_f32); }
TEST(accumulation_of_bfloat16) { check_accumulate<uint16_t>(hp_accumulate_scaled_bf16); }

TEST(float32_kernels_work_in_place) {
  for (const size_t size : kSizes) {
    const auto values = filled<float>(size, size + 4);
    Guarded<float> scaled(values, 1), doubled(values, 0);
    hp_scale_copy_f32(scaled.data(), scaled.data(), 0.75f, size, kThreads);
    CHECK((naive::same(scaled.data(), naive::scale_copy<float, float>(values, 0.75f))));
    hp_accumulate_scaled_f32(doubled.data(), doubled.data(), 0.75f, size, kThreads);
    CHECK(naive::same(doubled.data(), naive::accumulate(values, values, 0.75f)));
  }
}

TEST(rounding_to_bfloat16_of_every_upper_half_around_the_tie) {
  std::vector<float> values;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t lower : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      values.push_back(naive::from_bits(upper << 16 | lower));
    }
  }
  std::vector<uint16_t> copied(values.size()), summed(values.size());
  hp_scale_copy_f32_bf16(copied.data(), values.data(), 1.0f, values.size(), 1);
  CHECK((naive::same(copied.data(), naive::scale_copy<uint16_t, float>(values, 1.0f))));
  for (size_t i = 0; i < values.size(); ++i) CHECK(std::isnan(values[i]) == std::isnan(naive::widen(copied[i])));
}

TEST(products_are_rounded_before_they_are_added) {
  // 3 * (1/3 as float32) is 1 + 2^-25, which rounds to 1; fused with -1 it would be 2^-25.
  const std::vector<float> third(100, 1.0f / 3.0f);
  std::vector<float> target(100, -1.0f);
  hp_accumulate_scaled_f32(target.data(), third.data(), 3.0f, target.size(), 1);
  for (const float value : target) CHECK(value == 0.0f);
}

TEST(the_number_of_threads_changes_nothing) {
  const size_t size = (size_t{3} << 18) + 3;
  const std::vector<std::vector<float>> values = {filled<float>(size, 1), filled<float>(size, 2), filled<float>(size, 3)};
  const float* sources[] = {values[0].data(), values[1].data(), values[2].data()};
  const auto expected = naive::sum<float, float>(values, 0.3f);
  for (const int32_t threads : {-1, 0, 1, 2, 4, 64}) {
    std::vector<float> target(size);
    hp_sum_f32(target.data(), sources, 3, 0.3f, size, threads);
    CHECK(naive::same(target.data(), expected));
  }
}
