// Sums over several sources in a fixed order.
#include "hp_native.h"
#include "loops.h"

namespace {

// Elements of a block: 16 KiB of float32 stay in the first-level cache while the sources stream by.
constexpr size_t kBlock = 4096;

// Up to four sources are read in one pass; more are added to a block that stays in the cache. Where target and sources
// have one type the target may be a source: element i depends on elements i alone.

HP_CLONES void scale_f32(float* dst, const float* a, float scale, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = a[i] * scale;
}

HP_CLONES void add_f32(float* dst, const float* a, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] += a[i];
}

HP_CLONES void sum2_f32(float* dst, const float* a, const float* b, float scale, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = (a[i] + b[i]) * scale;
}

HP_CLONES void sum3_f32(float* dst, const float* a, const float* b, const float* c, float scale, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = (a[i] + b[i] + c[i]) * scale;
}

HP_CLONES void sum4_f32(float* dst, const float* a, const float* b, const float* c, const float* d, float scale,
                        size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = (a[i] + b[i] + c[i] + d[i]) * scale;
}

HP_CLONES void add_bf16(float* __restrict dst, const uint16_t* __restrict a, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] += hp::widen(a[i]);
}

HP_CLONES void widen_bf16(float* __restrict dst, const uint16_t* __restrict a, float scale, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = hp::widen(a[i]) * scale;
}

HP_CLONES void sum2_bf16_f32(float* __restrict dst, const uint16_t* __restrict a, const uint16_t* __restrict b,
                             float scale, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = (hp::widen(a[i]) + hp::widen(b[i])) * scale;
}

HP_CLONES void sum4_bf16_f32(float* __restrict dst, const uint16_t* __restrict a, const uint16_t* __restrict b,
                             const uint16_t* __restrict c, const uint16_t* __restrict d, float scale, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    dst[i] = (hp::widen(a[i]) + hp::widen(b[i]) + hp::widen(c[i]) + hp::widen(d[i])) * scale;
  }
}

HP_CLONES void narrow_f32(uint16_t* __restrict dst, const float* __restrict a, float scale, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = hp::narrow(a[i] * scale);
}

HP_CLONES void sum2_bf16(uint16_t* dst, const uint16_t* a, const uint16_t* b, float scale, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = hp::narrow((hp::widen(a[i]) + hp::widen(b[i])) * scale);
}

HP_CLONES void sum4_bf16(uint16_t* dst, const uint16_t* a, const uint16_t* b, const uint16_t* c, const uint16_t* d,
                         float scale, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) {
    dst[i] = hp::narrow((hp::widen(a[i]) + hp::widen(b[i]) + hp::widen(c[i]) + hp::widen(d[i])) * scale);
  }
}

// A sum of up to four float32 sources.
void sum_few_f32(float* dst, const float* const* s, int32_t terms, float scale, size_t at, size_t count) {
  if (terms == 1) {
    scale_f32(dst, s[0] + at, scale, count);
  } else if (terms == 2) {
    sum2_f32(dst, s[0] + at, s[1] + at, scale, count);
  } else if (terms == 3) {
    sum3_f32(dst, s[0] + at, s[1] + at, s[2] + at, scale, count);
  } else {
    sum4_f32(dst, s[0] + at, s[1] + at, s[2] + at, s[3] + at, scale, count);
  }
}

void sum_f32(float* dst, const float* const* sources, int32_t terms, float scale, size_t begin, size_t length) {
  if (terms <= 4) {
    sum_few_f32(dst + begin, sources, terms, scale, begin, length);
    return;
  }
  const size_t end = begin + length;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at);
    sum_few_f32(dst + at, sources, 4, 1.0f, at, count);
    for (int32_t term = 4; term < terms - 1; ++term) add_f32(dst + at, sources[term] + at, count);
    sum2_f32(dst + at, dst + at, sources[terms - 1] + at, scale, count);
  }
}

// The sum of one block of bfloat16 sources in float32, unscaled.
void sum_block_bf16(float* total, const uint16_t* const* s, int32_t terms, size_t at, size_t count) {
  int32_t term = 1;
  if (terms >= 4) {
    sum4_bf16_f32(total, s[0] + at, s[1] + at, s[2] + at, s[3] + at, 1.0f, count);
    term = 4;
  } else if (terms >= 2) {
    sum2_bf16_f32(total, s[0] + at, s[1] + at, 1.0f, count);
    term = 2;
  } else {
    widen_bf16(total, s[0] + at, 1.0f, count);
  }
  for (; term < terms; ++term) add_bf16(total, s[term] + at, count);
}

void sum_bf16(uint16_t* dst, const uint16_t* const* s, int32_t terms, float scale, size_t begin, size_t length) {
  if (terms == 2) {
    sum2_bf16(dst + begin, s[0] + begin, s[1] + begin, scale, length);
    return;
  }
  if (terms == 4) {
    sum4_bf16(dst + begin, s[0] + begin, s[1] + begin, s[2] + begin, s[3] + begin, scale, length);
    return;
  }
  float total[kBlock];
  const size_t end = begin + length;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at);
    sum_block_bf16(total, s, terms, at, count);
    narrow_f32(dst + at, total, scale, count);
  }
}

void sum_bf16_f32(float* dst, const uint16_t* const* s, int32_t terms, float scale, size_t begin, size_t length) {
  if (terms == 1) {
    widen_bf16(dst + begin, s[0] + begin, scale, length);
    return;
  }
  if (terms == 2) {
    sum2_bf16_f32(dst + begin, s[0] + begin, s[1] + begin, scale, length);
    return;
  }
  if (terms == 4) {
    sum4_bf16_f32(dst + begin, s[0] + begin, s[1] + begin, s[2] + begin, s[3] + begin, scale, length);
    return;
  }
  const size_t end = begin + length;
  for (size_t at = begin; at < end; at += kBlock) {
    const size_t count = std::min(kBlock, end - at);
    sum_block_bf16(dst + at, s, terms, at, count);
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
