// Life locks between real processes.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "check.h"
#include "hp_native.h"

namespace {

// A child that holds the lock on a byte until it is ended. It says over a pipe that it does.
class Holder {
 public:
  Holder(int file, int64_t offset) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    process_ = fork();
    if (process_ == 0) {
      const char result = static_cast<char>(hp_life_begin(file, offset));
      if (write(ends[1], &result, 1) != 1) _exit(1);
      for (;;) pause();
    }
    char result = 1;
    CHECK(read(ends[0], &result, 1) == 1);
    CHECK(result == 0);
    close(ends[0]);
    close(ends[1]);
  }

  ~Holder() { end(); }

  void end() {
    if (process_ <= 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  pid_t process_;
};

int shared_file() {
  const int file = memfd_create("hp-native-test", MFD_CLOEXEC);
  CHECK(file >= 0);
  CHECK(ftruncate(file, 4096) == 0);
  return file;
}

}  // namespace

TEST(a_lock_is_held_until_its_process_is_killed) {
  const int file = shared_file();
  Holder holder(file, 5);
  for (int64_t offset = 3; offset < 8; ++offset) CHECK(hp_life_is_held(file, offset) == (offset == 5 ? 1 : 0));
  holder.end();
  CHECK(hp_life_is_held(file, 5) == 0);
  close(file);
}

TEST(a_child_does_not_inherit_it_and_the_owner_does_not_see_it) {
  const int file = shared_file();
  CHECK(hp_life_begin(file, 0) == 0);
  CHECK(hp_life_is_held(file, 0) == 0);
  const pid_t child = fork();
  // In the child: the parent holds it, so the child does not.
  if (child == 0) _exit(hp_life_is_held(file, 0) == 1 && hp_life_begin(file, 0) != 0 ? 0 : 1);
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  close(file);
}

TEST(a_bad_descriptor_gives_its_errno) {
  CHECK(hp_life_begin(-1, 0) == EBADF);
  CHECK(hp_life_is_held(-1, 0) == -EBADF);
}
