// What the kernels must compute, one element at a time and in the plainest way.
#ifndef HP_TESTS_NAIVE_H
#define HP_TESTS_NAIVE_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace naive {

inline uint32_t bits(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

inline float from_bits(uint32_t word) {
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

inline float widen(float value) { return value; }
inline float widen(uint16_t value) { return from_bits(static_cast<uint32_t>(value) << 16); }

// To nearest, ties to even, by comparing with the tie.
inline uint16_t narrow(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const uint32_t word = bits(value);
  const auto upper = static_cast<uint16_t>(word >> 16);
  const uint32_t lower = word & 0xFFFF;
  const bool up = lower > 0x8000 || (lower == 0x8000 && upper % 2 == 1);
  return static_cast<uint16_t>(upper + (up ? 1 : 0));
}

inline void store(float* target, float value) { *target = value; }
inline void store(uint16_t* target, float value) { *target = narrow(value); }

template <typename Target, typename Source>
std::vector<Target> sum(const std::vector<std::vector<Source>>& sources, float scale) {
  std::vector<Target> result(sources[0].size());
  for (size_t i = 0; i < result.size(); ++i) {
    float total = widen(sources[0][i]);
    for (size_t term = 1; term < sources.size(); ++term) total = total + widen(sources[term][i]);
    store(&result[i], total * scale);
  }
  return result;
}

template <typename Target, typename Source>
std::vector<Target> scale_copy(const std::vector<Source>& source, float alpha) {
  std::vector<Target> result(source.size());
  for (size_t i = 0; i < result.size(); ++i) store(&result[i], alpha * widen(source[i]));
  return result;
}

template <typename Source>
std::vector<float> accumulate(const std::vector<float>& target, const std::vector<Source>& source, float alpha) {
  std::vector<float> result(source.size());
  for (size_t i = 0; i < result.size(); ++i) {
    const float product = alpha * widen(source[i]);
    result[i] = target[i] + product;
  }
  return result;
}

// Bit patterns alike; any NaN equals any other.
inline bool same(float a, float b) { return bits(a) == bits(b) || (std::isnan(a) && std::isnan(b)); }
inline bool same(uint16_t a, uint16_t b) { return a == b || (std::isnan(widen(a)) && std::isnan(widen(b))); }

template <typename T>
bool same(const T* a, const std::vector<T>& b) {
  for (size_t i = 0; i < b.size(); ++i) {
    if (!same(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace naive

#endif  // HP_TESTS_NAIVE_H
