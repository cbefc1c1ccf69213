// Runs every test of an executable, or those that are named. Exit code: 0 passed, 1 failed, 77 the CPU lacks what this
// executable was compiled for.
#include <cstring>

#include "check.h"
#include "hp_native.h"

hp_test::Test* hp_test::Test::first = nullptr;
std::atomic<int> hp_test::failures{0};

namespace {

// 2: the CPU must have what x86-64-v2 adds to the baseline, and so on.
bool cpu_has(int level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  return level < 3 || (level == 3 ? v3 : v4);
#else
  return level == 0;
#endif
}

bool is_named(const char* name, int count, char** names) {
  for (int index = 1; index < count; ++index) {
    if (std::strcmp(names[index], name) == 0) return true;
  }
  return count == 1;
}

}  // namespace

int main(int count, char** names) {
  if (!cpu_has(HP_TEST_LEVEL)) {
    std::printf("skipped: this CPU lacks x86-64-v%d\n", HP_TEST_LEVEL);
    return 77;
  }
  std::printf("%s\n", hp_build_info());
  int tests = 0;
  for (const hp_test::Test* test = hp_test::Test::first; test != nullptr; test = test->next) {
    if (!is_named(test->name, count, names)) continue;
    ++tests;
    const int before = hp_test::failures.load();
    test->body();
    const int failed = hp_test::failures.load() - before;
    std::printf("%s %s\n", failed == 0 ? "passed" : "FAILED", test->name);
    std::fflush(stdout);
  }
  if (tests == 0) {
    std::fprintf(stderr, "no test of this executable has such a name\n");
    return 1;
  }
  return hp_test::failures.load() == 0 ? 0 : 1;
}
