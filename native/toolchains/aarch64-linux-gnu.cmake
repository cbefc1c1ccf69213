# Cross-compiles for 64-bit Arm Linux with Debian's g++-aarch64-linux-gnu; tests run in QEMU's user emulation.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

find_program(HP_QEMU NAMES qemu-aarch64-static qemu-aarch64)
if(HP_QEMU)
  # -L: where the loader and the C library of the emulated system are.
  set(CMAKE_CROSSCOMPILING_EMULATOR "${HP_QEMU};-L;/usr/aarch64-linux-gnu")
endif()

# Programs are the host's, libraries and headers the target's.
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
