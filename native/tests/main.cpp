// Runs every test of an executable, or those that are named. Exit code: 0 passed, 1 failed, 77 this CPU lacks what the
// first argument says the kernels were compiled for: --needs=x86-64-v3.
#include <cstring>

#include "check.h"

hp_test::Test* hp_test::Test::first = nullptr;
std::atomic<int> hp_test::failures{0};

namespace {

bool cpu_has(const char* level) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (std::strcmp(level, "x86-64-v4") == 0) return v4;
  if (std::strcmp(level, "x86-64-v3") == 0) return v3;
  return std::strcmp(level, "x86-64-v1") == 0;
#else
  (void)level;
  return false;
#endif
}

bool is_named(const char* name, int count, char** names) {
  for (int index = 0; index < count; ++index) {
    if (std::strcmp(names[index], name) == 0) return true;
  }
  return count == 0;
}

}  // namespace

int main(int count, char** arguments) {
  char** names = arguments + 1;
  --count;
  constexpr char needs[] = "--needs=";
  if (count > 0 && std::strncmp(names[0], needs, sizeof needs - 1) == 0) {
    const char* level = names[0] + sizeof needs - 1;
    if (!cpu_has(level)) {
      std::printf("skipped: this CPU is no %s\n", level);
      return 77;
    }
    ++names;
    --count;
  }
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
