#!/bin/sh
# Builds the native library with its C++ tests and runs them. Needs a C++ compiler, and Python where CMake is missing.
#
#   tools/native.sh test [FOLDER]       as a user's machine builds it, and once per instruction set
#   tools/native.sh sanitize [FOLDER]   under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer
#   tools/native.sh aarch64 [FOLDER]    cross-built for 64-bit Arm and run in emulation (QEMU)
#
# Nothing is written outside FOLDER (build/native-test and so on). INSTALL=1 lets `aarch64` install Debian's packages.
# CXX chooses the compiler, JOBS how many compilers run at once.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
jobs=${JOBS:-2}

say() { printf 'native: %s\n' "$*" >&2; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Puts a CMake of at least 3.18 into PATH: the machine's, else one that pip installs into the folder $1.
need_cmake() {
    if command -v cmake >/dev/null && command -v ctest >/dev/null; then
        version=$(cmake --version | sed -n '1s/.*version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
        if [ "${version% *}" -gt 3 ] || { [ "${version% *}" -eq 3 ] && [ "${version#* }" -ge 18 ]; }; then return; fi
    fi
    if [ ! -x "$1/cmake/bin/ctest" ]; then
        python=${PYTHON:-python3}
        command -v "$python" >/dev/null ||
            fail "CMake 3.18 or newer is needed, and Python to install it: install cmake, or set PYTHON."
        say "no CMake of version 3.18 or newer is in PATH; installing one into $1/cmake"
        "$python" -m venv "$1/cmake" && "$1/cmake/bin/pip" install --quiet --disable-pip-version-check cmake ||
            fail "CMake could not be installed, see above. Install CMake 3.18 or newer and run this again."
    fi
    PATH="$1/cmake/bin:$PATH"
}

need_compiler() {
    compiler=${CXX:-c++}
    command -v "$compiler" >/dev/null ||
        fail "there is no C++ compiler '$compiler'. Install g++ or clang++, or set CXX to the one to use."
}

# Configures in the folder $1 with the options that follow, and builds.
build() {
    folder=$1
    shift
    cmake -S "$root" -B "$folder" -DCMAKE_BUILD_TYPE=Release -DHP_REQUIRE_NATIVE=ON -DHP_BUILD_TESTS=ON "$@" >"$folder.log" 2>&1 &&
        cmake --build "$folder" --parallel "$jobs" >>"$folder.log" 2>&1 ||
        { cat "$folder.log" >&2 && fail "the build in $folder failed, see above."; }
}

run_tests() { (cd "$1" && shift && "$@" ctest --output-on-failure --no-tests=error); }

test_native() {
    need_compiler
    need_cmake "$1"
    build "$1/build"
    run_tests "$1/build" env
}

# ------------------------------------------------------------------------------------------------------- sanitizers

# Sets `launcher`: what sanitized programs of $2 have to be started with, nothing if they run as they are. Some
# kernels give more bits of randomness to addresses than older ThreadSanitizers can map; setarch -R takes them away.
find_launcher() {
    printf 'int main() { return 0; }\n' >"$1/probe.cpp"
    "${CXX:-c++}" "-fsanitize=$2" "$1/probe.cpp" -o "$1/probe" ||
        fail "programs cannot be linked with -fsanitize=$2. Install the sanitizers' libraries: they come with g++ on\
 Debian and are libasan, libubsan and libtsan on Fedora."
    for launcher in env "setarch $(uname -m) -R"; do
        # shellcheck disable=SC2086  # a command and its arguments
        if $launcher "$1/probe" >/dev/null 2>&1; then return; fi
    done
    fail "a program linked with -fsanitize=$2 does not run here, with addresses randomised or not: $("$1/probe" 2>&1)"
}

sanitize() {
    need_compiler
    need_cmake "$1"
    for sanitizers in address,undefined thread; do
        find_launcher "$1" "$sanitizers"
        say "building with -fsanitize=$sanitizers"
        # What chooses between clones runs while the program is still being linked. gcc instruments it like any function,
        # and ThreadSanitizer's runtime is not up yet: a crash before main(). So no clones there; the tests of single
        # instruction sets cover every loop.
        clones=ON
        [ "$sanitizers" != thread ] || clones=OFF
        folder=$1/${sanitizers%%,*}
        build "$folder" -DHP_SANITIZE="$sanitizers" -DHP_TARGET_CLONES="$clones"
        # shellcheck disable=SC2086
        run_tests "$folder" $launcher
    done
}

# ---------------------------------------------------------------------------------------------------------- aarch64

need_cross_tools() {
    lacking=''
    command -v aarch64-linux-gnu-g++ >/dev/null || lacking='g++-aarch64-linux-gnu'
    command -v qemu-aarch64-static >/dev/null || command -v qemu-aarch64 >/dev/null || lacking="$lacking qemu-user-static"
    [ -n "$lacking" ] || return 0
    if [ "${INSTALL:-}" = 1 ] && command -v apt-get >/dev/null; then
        say "installing $lacking"
        as_root=''
        [ "$(id -u)" -eq 0 ] || as_root=sudo
        # shellcheck disable=SC2086  # a list of packages
        $as_root apt-get update -qq && $as_root apt-get install -y -qq $lacking >/dev/null || fail "apt-get failed, see above."
    else
        fail "the cross-compiler or the emulator is missing. On Debian and Ubuntu: apt-get install $lacking\
 (INSTALL=1 does it). Other systems: a g++ for aarch64-linux-gnu with its binutils, and QEMU's user emulation."
    fi
}

# Whether the loops of the library $1 are NEON, and none of them fuses a product with a sum.
check_vectorised() {
    aarch64-linux-gnu-objdump --disassemble --demangle --no-show-raw-insn "$1" | awk '
        # Loops by name, with the instructions on four floats that each must have.
        BEGIN {
            split("accumulate_f32 fmul fadd/accumulate_bf16 fmul fadd/scale_copy_f32 fmul/scale_copy_bf16 fmul/" \
                  "scale_copy_f32_bf16 fmul/scale_f32 fmul/add_f32 fadd/sum2_f32 fadd fmul/sum3_f32 fadd fmul/" \
                  "sum4_f32 fadd fmul/add_bf16 fadd/widen_bf16 fmul/sum2_bf16_f32 fadd fmul/" \
                  "sum4_bf16_f32 fadd fmul/narrow_f32 fmul/sum2_bf16 fadd fmul/sum4_bf16 fadd fmul", entries, "/")
            for (i in entries) {
                count = split(entries[i], words, " ")
                for (k = 2; k <= count; ++k) wanted[words[1] " " words[k]] = 1
            }
        }
        /^[0-9a-f]+ <.*>:$/ { name = $0; sub(/^[^<]*</, "", name); sub(/\(anonymous namespace\)::/, "", name); sub(/[(>].*/, "", name) }
        $2 ~ /^(fmla|fmls|fmadd|fmsub|fnmadd|fnmsub)$/ { fused = fused "\n  " name ": " $0 }
        $2 ~ /^f(mul|add)$/ && $3 ~ /^v[0-9]+\.4s/ { delete wanted[name " " $2]; ++vectors }
        END {
            for (key in wanted) missing = missing "\n  " key
            if (missing != "") print "error: these loops lack their NEON instruction on four floats:" missing
            if (fused != "") print "error: fused products and sums, which round once instead of twice:" fused
            if (missing != "" || fused != "") exit 1
            print "native: every loop is vectorised with NEON (" vectors " fmul and fadd on v.4s), none is fused"
        }' >&2
}

test_aarch64() {
    need_cross_tools
    need_cmake "$1"
    build "$1/build" -DCMAKE_TOOLCHAIN_FILE="$root/native/toolchains/aarch64-linux-gnu.cmake"
    check_vectorised "$1/build/libhp_native.so"
    run_tests "$1/build" env
}

[ $# -eq 1 ] || [ $# -eq 2 ] || fail 'usage: tools/native.sh test | sanitize | aarch64 [FOLDER]'
target=${2:-$root/build/native-$1}
case $1 in
    test) run=test_native ;;
    sanitize) run=sanitize ;;
    aarch64) run=test_aarch64 ;;
    *) fail 'usage: tools/native.sh test | sanitize | aarch64 [FOLDER]' ;;
esac
mkdir -p "$target"
target=$(CDPATH='' cd -- "$target" && pwd)
"$run" "$target"
