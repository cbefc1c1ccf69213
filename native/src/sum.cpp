// Sums over several sources in a fixed order.
#include "hp_native.h"
#include "loops.h"

namespace {

// Elements of a block: 16 KiB of float32 stay in the first-level cache while the sources stream by.
constexpr size_t kBlock = 4096;

HP_CLONES void scale_f32(float* dst, const float* a, float scale, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = a[i] * scale;
}

HP_CLONES void add_f32(float* dst, const float* a, const float* b, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = a[i] + b[i];
}

HP_CLONES void add_scale_f32(float* dst, const float* a, const float* b, float scale, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = (a[i] + b[i]) * scale;
}

HP_CLONES void widen_bf16(float* __restrict dst, const uint16_t* __restrict a, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = hp::widen(a[i]);
}

HP_CLONES void add_bf16(float* __restrict dst, const uint16_t* __restrict a, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] += hp::widen(a[i]);
}

HP_CLONES void narrow_f32(uint16_t* __restrict dst, const float* __restrict a, float scale, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = hp::narrow(a[i] * scale);
}

void sum_f32(float* dst, const float* const* sources, int32_t terms, float scale, size_t begin, size_t length) {
  const size_t end = begin + length;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at);
    if (terms == 1) {
      scale_f32(dst + at, sources[0] + at, scale, count);
    } else if (terms == 2) {
      add_scale_f32(dst + at, sources[0] + at, sources[1] + at, scale, count);
    } else {
      add_f32(dst + at, sources[0] + at, sources[1] + at, count);
      for (int32_t term = 2; term < terms - 1; ++term) add_f32(dst + at, dst + at, sources[term] + at, count);
      add_scale_f32(dst + at, dst + at, sources[terms - 1] + at, scale, count);
    }
  }
}

// The sum of one block of bfloat16 sources, in float32 and unscaled.
void sum_block_bf16(float* total, const uint16_t* const* sources, int32_t terms, size_t at, size_t count) {
  widen_bf16(total, sources[0] + at, count);
  for (int32_t term = 1; term < terms; ++term) add_bf16(total, sources[term] + at, count);
}

void sum_bf16(uint16_t* dst, const uint16_t* const* sources, int32_t terms, float scale, size_t begin, size_t length) {
  float total[kBlock];
  const size_t end = begin + length;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at);
    sum_block_bf16(total, sources, terms, at, count);
    narrow_f32(dst + at, total, scale, count);
  }
}

void sum_bf16_f32(float* dst, const uint16_t* const* sources, int32_t terms, float scale, size_t begin,
                  size_t length) {
  const size_t end = begin + length;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at);
    sum_block_bf16(dst + at, sources, terms, at, count);
    if (scale != 1.0f) scale_f32(dst + at, dst + at, scale, count);
  }
}

}  // namespace

void hp_sum_f32(float* dst, const float* const* sources, int32_t terms, float scale, size_t count, int32_t threads) {
  hp::split(count, threads,
            [=](size_t begin, size_t length) { sum_f32(dst, sources, terms, scale, begin, length); });
}

void hp_sum_bf16(uint16_t* dst, const uint16_t* const* sources, int32_t terms, float scale, size_t count,
                 int32_t threads) {
  hp::split(count, threads,
            [=](size_t begin, size_t length) { sum_bf16(dst, sources, terms, scale, begin, length); });
}

void hp_sum_bf16_f32(float* dst, const uint16_t* const* sources, int32_t terms, float scale, size_t count,
                     int32_t threads) {
  hp::split(count, threads,
            [=](size_t begin, size_t length) { sum_bf16_f32(dst, sources, terms, scale, begin, length); });
}
