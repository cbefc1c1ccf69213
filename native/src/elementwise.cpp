// Scaled accumulation and scaled copies with casts.
#include "hp_native.h"
#include "loops.h"

namespace {

HP_CLONES void accumulate_f32(float* dst, const float* src, float alpha, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] += alpha * src[i];
}

HP_CLONES void accumulate_bf16(float* __restrict dst, const uint16_t* __restrict src, float alpha, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] += alpha * hp::widen(src[i]);
}

HP_CLONES void scale_copy_f32(float* dst, const float* src, float alpha, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = alpha * src[i];
}

HP_CLONES void scale_copy_bf16(float* __restrict dst, const uint16_t* __restrict src, float alpha, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = alpha * hp::widen(src[i]);
}

HP_CLONES void scale_copy_f32_bf16(uint16_t* __restrict dst, const float* __restrict src, float alpha, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = hp::narrow(alpha * src[i]);
}

template <typename Target, typename Source>
void run(void (*kernel)(Target*, const Source*, float, size_t), Target* dst, const Source* src, float alpha,
         size_t count, int32_t threads) {
  hp::split(count, threads,
            [=](size_t begin, size_t length) { kernel(dst + begin, src + begin, alpha, length); });
}

}  // namespace

void hp_accumulate_scaled_f32(float* dst, const float* src, float alpha, size_t count, int32_t threads) {
  run(accumulate_f32, dst, src, alpha, count, threads);
}

void hp_accumulate_scaled_bf16(float* dst, const uint16_t* src, float alpha, size_t count, int32_t threads) {
  run(accumulate_bf16, dst, src, alpha, count, threads);
}

void hp_scale_copy_f32(float* dst, const float* src, float alpha, size_t count, int32_t threads) {
  run(scale_copy_f32, dst, src, alpha, count, threads);
}

void hp_scale_copy_bf16(float* dst, const uint16_t* src, float alpha, size_t count, int32_t threads) {
  run(scale_copy_bf16, dst, src, alpha, count, threads);
}

void hp_scale_copy_f32_bf16(uint16_t* dst, const float* src, float alpha, size_t count, int32_t threads) {
  run(scale_copy_f32_bf16, dst, src, alpha, count, threads);
}
