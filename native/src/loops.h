// What every kernel file shares: cloning per instruction set, bfloat16, splitting over threads.
#ifndef HP_LOOPS_H
#define HP_LOOPS_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

// Plain loops that the compiler vectorises, cloned per instruction set where it can (AVX-512, AVX2, baseline on x86-64;
// NEON is the baseline of aarch64). The loops are written out per type: target_clones does not apply to templates.
#if defined(HP_HAVE_TARGET_CLONES)
#define HP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
// Kept apart, as clones are: a function of its own can be found in a disassembly.
#define HP_CLONES __attribute__((noinline))
#endif

// Element i depends on element i alone, also when dst and src are the same array.
#if defined(__clang__)
#define HP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace hp {

// A bfloat16 is the upper half of a float32.
inline float widen(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// To nearest, ties to even. A NaN becomes the quiet NaN: adding to its bits could turn it into an infinity.
inline uint16_t narrow(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

// Below this many elements a thread costs more to start than it saves.
constexpr size_t kElementsPerThread = size_t{1} << 18;

// Calls `part(begin, length)` for contiguous parts that cover [0, count), one thread each; the caller computes the first
// part itself. Threads live for one call only: a pool would not survive fork(), which test and data-loading processes do.
template <typename Part>
void split(size_t count, int32_t threads, const Part& part) {
  const size_t useful = std::max<size_t>(count / kElementsPerThread, 1);
  const size_t parts = std::min(static_cast<size_t>(std::max(threads, 1)), useful);
  // Whole cache lines per part, so that no two threads write to one.
  const size_t size = ((count + parts - 1) / parts + 31) / 32 * 32;

  std::vector<std::thread> workers;
  size_t begin = std::min(size, count);
  try {
    workers.reserve(parts);
    while (begin < count) {
      const size_t length = std::min(size, count - begin);
      workers.emplace_back(part, begin, length);
      begin += length;
    }
  } catch (const std::exception&) {
    // No memory or no thread to be had: what was not handed out is computed below. Nothing may leave a C function.
  }
  part(size_t{0}, std::min(size, count));
  if (begin < count) part(begin, count - begin);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace hp

#endif  // HP_LOOPS_H
