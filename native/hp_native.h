/* The native kernels of hp_plugin: plain C ABI, no dependency beyond the C++ standard library.
 *
 * Every Python version and every torch build loads the same shared object at run time, so nothing here may name a type
 * of either. Raise HP_NATIVE_ABI_VERSION whenever a function changes its arguments or its meaning, or is removed; the
 * loader (hp_plugin/core/kernels/native.py) refuses a library whose number differs from its own.
 *
 * Arithmetic: products and sums are rounded to float32 separately (no fused multiply-add), so the result is the same
 * on every instruction set, and equal to `dst + alpha * float(src)` written as two torch operations.
 */
#ifndef HP_NATIVE_H
#define HP_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define HP_NATIVE_ABI_VERSION 1

#if defined(__GNUC__)
#define HP_API __attribute__((visibility("default")))
#else
#define HP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The ABI number that the library was compiled with. */
HP_API int32_t hp_abi_version(void);

/* One line about the build: compiler, architecture, whether loops are cloned per instruction set. Static storage. */
HP_API const char* hp_build_info(void);

/* dst[i] += alpha * src[i] for i < count. `src` is float32 (_f32) or bfloat16 bit patterns (_bf16).
 * `dst` and `src` are either the same array (_f32 only) or disjoint. At most `threads` threads are used, fewer for
 * small arrays; the values do not depend on their number. */
HP_API void hp_accumulate_scaled_f32(float* dst, const float* src, float alpha, size_t count, int32_t threads);
HP_API void hp_accumulate_scaled_bf16(float* dst, const uint16_t* src, float alpha, size_t count, int32_t threads);

/* dst[i] = alpha * src[i] for i < count; the same rules as above. */
HP_API void hp_scale_copy_f32(float* dst, const float* src, float alpha, size_t count, int32_t threads);
HP_API void hp_scale_copy_bf16(float* dst, const uint16_t* src, float alpha, size_t count, int32_t threads);

#ifdef __cplusplus
}
#endif

#endif /* HP_NATIVE_H */
