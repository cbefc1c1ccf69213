// What the library says of itself.
#include "hp_native.h"

#if defined(HP_HAVE_TARGET_CLONES)
#define HP_DISPATCH "cloned for x86-64-v4, x86-64-v3 and the baseline"
#else
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

int32_t hp_abi_version(void) { return HP_NATIVE_ABI_VERSION; }

const char* hp_build_info(void) { return HP_COMPILER ", " HP_ARCHITECTURE ", " HP_DISPATCH; }
