// The least that tests need: named tests, checks that report and go on, and random numbers that are the same everywhere.
#ifndef HP_TESTS_CHECK_H
#define HP_TESTS_CHECK_H

#include <atomic>
#include <cstdint>
#include <cstdio>

namespace hp_test {

// Tests are linked into a list before main() runs. No container does it: an executable may hold code for instruction
// sets that this CPU lacks, and main() must find that out first.
struct Test {
  Test(const char* test_name, void (*test_body)()) : name(test_name), body(test_body), next(first) { first = this; }

  const char* name;
  void (*body)();
  Test* next;
  static Test* first;
};

// Failed checks so far, of all threads.
extern std::atomic<int> failures;

inline void report(const char* file, int line, const char* condition) {
  // A broken kernel fails for millions of elements: the first few tell enough.
  if (failures.fetch_add(1) < 20) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, condition);
}

// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t bits() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>((mixed ^ (mixed >> 31)) >> 32);
  }

  // Uniform in [-1, 1).
  float number() { return static_cast<float>(static_cast<int32_t>(bits())) * 0x1p-31f; }

 private:
  uint64_t state_;
};

}  // namespace hp_test

#define TEST(name)                                         \
  static void name();                                      \
  static hp_test::Test registered_##name(#name, name);     \
  static void name()

#define CHECK(condition) \
  do {                   \
    if (!(condition)) hp_test::report(__FILE__, __LINE__, #condition); \
  } while (false)

#endif  // HP_TESTS_CHECK_H
