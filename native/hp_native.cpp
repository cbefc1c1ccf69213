// Kernels behind hp_native.h. Plain loops that the compiler vectorises, cloned per instruction set where it can.
#include "hp_native.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#if defined(HP_HAVE_TARGET_CLONES)
#define HP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define HP_DISPATCH "cloned for x86-64-v4, x86-64-v3 and the baseline"
#else
#define HP_CLONES
#define HP_DISPATCH "one instruction set"
#endif

#if defined(__x86_64__)
#define HP_ARCHITECTURE "x86_64"
#elif defined(__aarch64__)
#define HP_ARCHITECTURE "aarch64"
#else
#define HP_ARCHITECTURE "unknown architecture"
#endif

#if defined(__clang__)
#define HP_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define HP_COMPILER "gcc " __VERSION__
#else
#define HP_COMPILER "unknown compiler"
#endif

// Element i depends on element i alone, also when dst and src are the same array.
#if defined(__clang__)
#define HP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace {

// Below this many elements a thread costs more to start than it saves.
constexpr size_t kElementsPerThread = size_t{1} << 18;

// A bfloat16 is the upper half of a float32.
inline float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// Written out four times and not as one template: target_clones does not apply to templates.
HP_CLONES void accumulate_f32(float* dst, const float* src, float alpha, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] += alpha * src[i];
}

HP_CLONES void accumulate_bf16(float* __restrict dst, const uint16_t* __restrict src, float alpha, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] += alpha * widen(src[i]);
}

HP_CLONES void scale_copy_f32(float* dst, const float* src, float alpha, size_t count) {
  HP_INDEPENDENT
  for (size_t i = 0; i < count; ++i) dst[i] = alpha * src[i];
}

HP_CLONES void scale_copy_bf16(float* __restrict dst, const uint16_t* __restrict src, float alpha, size_t count) {
  for (size_t i = 0; i < count; ++i) dst[i] = alpha * widen(src[i]);
}

// Splits [0, count) into contiguous parts, one thread each; the caller computes the first part itself. Threads live
// for one call only: a pool would not survive fork(), which test and data-loading processes do.
template <typename Source>
void run_split(void (*kernel)(float*, const Source*, float, size_t), float* dst, const Source* src, float alpha,
               size_t count, int32_t threads) {
  const size_t useful = std::max<size_t>(count / kElementsPerThread, 1);
  const size_t parts = std::min(static_cast<size_t>(std::max(threads, 1)), useful);
  // Whole cache lines per part, so that no two threads write to one.
  const size_t part = ((count + parts - 1) / parts + 15) / 16 * 16;

  std::vector<std::thread> workers;
  size_t begin = std::min(part, count);
  try {
    workers.reserve(parts);
    while (begin < count) {
      const size_t length = std::min(part, count - begin);
      workers.emplace_back(kernel, dst + begin, src + begin, alpha, length);
      begin += length;
    }
  } catch (const std::exception&) {
    // No memory or no thread to be had: what was not handed out is computed below. Nothing may leave a C function.
  }
  kernel(dst, src, alpha, std::min(part, count));
  if (begin < count) kernel(dst + begin, src + begin, alpha, count - begin);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

int32_t hp_abi_version(void) { return HP_NATIVE_ABI_VERSION; }

const char* hp_build_info(void) { return HP_COMPILER ", " HP_ARCHITECTURE ", " HP_DISPATCH; }

void hp_accumulate_scaled_f32(float* dst, const float* src, float alpha, size_t count, int32_t threads) {
  run_split(accumulate_f32, dst, src, alpha, count, threads);
}

void hp_accumulate_scaled_bf16(float* dst, const uint16_t* src, float alpha, size_t count, int32_t threads) {
  run_split(accumulate_bf16, dst, src, alpha, count, threads);
}

void hp_scale_copy_f32(float* dst, const float* src, float alpha, size_t count, int32_t threads) {
  run_split(scale_copy_f32, dst, src, alpha, count, threads);
}

void hp_scale_copy_bf16(float* dst, const uint16_t* src, float alpha, size_t count, int32_t threads) {
  run_split(scale_copy_bf16, dst, src, alpha, count, threads);
}
