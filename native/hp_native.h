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

#define HP_NATIVE_ABI_VERSION 2

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

/* dst[i] = alpha * src[i] rounded to bfloat16, to nearest even; a NaN stays one. `dst` and `src` are disjoint. */
HP_API void hp_scale_copy_f32_bf16(uint16_t* dst, const float* src, float alpha, size_t count, int32_t threads);

/* dst[i] = scale * (sources[0][i] + sources[1][i] + ...) for i < count: added in float32, in the order of `sources`, and
 * rounded once, so the same bits on every run and instruction set. `terms` sources, at least 1; `dst` may be the first
 * or the second of them and is disjoint from the others. */
HP_API void hp_sum_f32(float* dst, const float* const* sources, int32_t terms, float scale, size_t count,
                       int32_t threads);
HP_API void hp_sum_bf16(uint16_t* dst, const uint16_t* const* sources, int32_t terms, float scale, size_t count,
                        int32_t threads);
HP_API void hp_sum_bf16_f32(float* dst, const uint16_t* const* sources, int32_t terms, float scale, size_t count,
                            int32_t threads);

/* Counters in memory that several processes map. Each is a 32-bit word, aligned to 4 bytes and best alone in a cache
 * line, that one process raises and any may wait for. Values are compared as distances, so they may wrap around, as long
 * as no two that are compared lie 2^31 or more apart. */

/* Sets *counter to `value` and wakes who waits for it. What the caller wrote before is visible to whoever sees it. */
HP_API void hp_counter_publish(uint32_t* counter, uint32_t value);

/* Waits until each of `count` counters, `stride` bytes apart, has reached `target`, at most `timeout_us` microseconds
 * (negative: for ever). Looks `spin` times before it sleeps. Returns -1, or the index of the first one that is behind. */
HP_API int32_t hp_counters_wait(const uint32_t* counters, int32_t count, size_t stride, uint32_t target,
                                int64_t timeout_us, int32_t spin);

/* Enters round `round` of a barrier (1, 2, ...) on `count` counters, of which `own` is the caller's, and waits for the
 * others as above. After a timeout it may be called again with the same round. */
HP_API int32_t hp_barrier(uint32_t* counters, int32_t count, size_t stride, int32_t own, uint32_t round,
                          int64_t timeout_us, int32_t spin);

/* Who lives: a process holds a lock on one byte of a shared file for as long as it does. The kernel drops it when the
 * process ends, however it ends; a child made by fork() does not inherit it. Closing any descriptor of the file in the
 * holder drops it too. */

/* Takes the lock on byte `offset`. Returns 0, or errno. */
HP_API int32_t hp_life_begin(int32_t file, int64_t offset);

/* Whether another process holds the lock on byte `offset`: 1 or 0, or -errno. Of the caller's own lock it says 0. */
HP_API int32_t hp_life_is_held(int32_t file, int64_t offset);

#ifdef __cplusplus
}
#endif

#endif /* HP_NATIVE_H */
