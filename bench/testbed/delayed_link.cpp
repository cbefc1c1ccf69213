// A switch in user space: one TUN device per supernode, a rate and a one-way delay between them.
//
// usage: delayed_link PARENT RATE_MBIT DELAY_MS DEVICE MTU QUEUE_PACKETS NAMESPACE_PATH...
//
// RATE_MBIT 0 means no limit. The namespace with index i owns the address a.b.c.(i + 1), by which packets are routed.
// Prints "ready" once all devices exist, then runs until it is killed or the process PARENT ends.
//
// A packet leaves its supernode when the uplink has sent its last bit, crosses the switch after the delay, and arrives
// when the downlink has delivered its last bit. The downlink forwards while it receives, so a lone stream is serialised
// once; streams from several supernodes to one share its downlink.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <string>
#include <vector>

namespace {

constexpr size_t kLargestPacket = 65536;
constexpr size_t kDestinationOffset = 16;  // of the destination address in an IPv4 header
constexpr size_t kIpv4HeaderBytes = 20;
constexpr double kQueueSeconds = 10e-3;  // of the uplink; the device's own queue comes on top
constexpr size_t kSmallestQueueBytes = 256 * 1024;
constexpr int kReadsPerTurn = 32;  // packets taken from one device before the others get their turn
constexpr double kNever = std::numeric_limits<double>::infinity();

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "%s: %s\n", what.c_str(), strerror(errno));
  exit(1);
}

struct Packet {
  double due;  // when it may go on
  size_t destination;
  std::vector<char> bytes;
};

// One direction of one supernode's link.
struct Lane {
  std::deque<Packet> queue;
  size_t queued_bytes = 0;
  double busy_until = 0;

  void push(Packet packet) {
    queued_bytes += packet.bytes.size();
    queue.push_back(std::move(packet));
  }

  Packet pop() {
    Packet packet = std::move(queue.front());
    queue.pop_front();
    queued_bytes -= packet.bytes.size();
    return packet;
  }

  double next_due() const { return queue.empty() ? kNever : queue.front().due; }
};

struct Supernode {
  int device = -1;
  Lane up;
  Lane down;
};

int open_device(const char* namespace_path, const char* name) {
  const int space = open(namespace_path, O_RDONLY | O_CLOEXEC);
  if (space < 0) fail(namespace_path);
  if (setns(space, CLONE_NEWNET) != 0) fail("setns");
  close(space);
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI;
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (ioctl(device, TUNSETIFF, &request) < 0) fail("TUNSETIFF");
  return device;
}

void set_limits(const char* name, int mtu, int queue_packets) {
  const int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (any < 0) fail("socket");
  ifreq request{};
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  request.ifr_mtu = mtu;
  if (ioctl(any, SIOCSIFMTU, &request) < 0) fail("SIOCSIFMTU");
  request.ifr_qlen = queue_packets;
  if (ioctl(any, SIOCSIFTXQLEN, &request) < 0) fail("SIOCSIFTXQLEN");
  close(any);
}

class Switch {
 public:
  Switch(double bits_per_second, double delay, std::vector<Supernode> supernodes)
      : seconds_per_byte_(bits_per_second > 0 ? 8 / bits_per_second : 0),
        delay_(delay),
        limit_(std::max(kSmallestQueueBytes, static_cast<size_t>(bits_per_second / 8 * kQueueSeconds))),
        supernodes_(std::move(supernodes)) {}

  [[noreturn]] void run() {
    for (;;) {
      forward();
      wait();
      for (Supernode& supernode : supernodes_) take(supernode);
    }
  }

 private:
  // Reads what the supernode sends, as long as its uplink has room; what finds none waits in the device or is dropped.
  void take(Supernode& source) {
    for (int i = 0; i < kReadsPerTurn && source.up.queued_bytes < limit_; i++) {
      const ssize_t size = read(source.device, buffer_, sizeof buffer_);
      if (size <= 0) return;
      const size_t bytes = static_cast<size_t>(size);
      const bool is_ipv4 = bytes >= kIpv4HeaderBytes && (buffer_[0] >> 4) == 4;
      const size_t destination = static_cast<unsigned char>(buffer_[kDestinationOffset + 3]) - size_t{1};
      if (!is_ipv4 || destination >= supernodes_.size()) continue;
      source.up.busy_until = std::max(now(), source.up.busy_until) + static_cast<double>(bytes) * seconds_per_byte_;
      source.up.push({source.up.busy_until + delay_, destination, std::vector<char>(buffer_, buffer_ + bytes)});
    }
  }

  // Moves every packet whose time has come: from uplinks to downlinks, from downlinks into the supernodes.
  void forward() {
    const double time = now();
    for (Supernode& source : supernodes_) {
      while (source.up.next_due() <= time) {
        Packet packet = source.up.pop();
        Lane& down = supernodes_[packet.destination].down;
        const double whole = down.busy_until + static_cast<double>(packet.bytes.size()) * seconds_per_byte_;
        packet.due = down.busy_until = std::max(packet.due, whole);
        down.push(std::move(packet));
      }
    }
    for (Supernode& target : supernodes_) {
      while (target.down.next_due() <= time) {
        const Packet packet = target.down.pop();
        // A packet that the device does not take is lost, as on any link; TCP sends it again.
        if (write(target.device, packet.bytes.data(), packet.bytes.size()) < 0 && errno == EBADF) fail("write");
      }
    }
  }

  void wait() {
    double due = kNever;
    std::vector<pollfd> readable;
    for (const Supernode& supernode : supernodes_) {
      due = std::min({due, supernode.up.next_due(), supernode.down.next_due()});
      if (supernode.up.queued_bytes < limit_) readable.push_back({supernode.device, POLLIN, 0});
    }
    timespec limit{};
    if (due != kNever) {
      const double left = std::max(0.0, due - now());
      limit.tv_sec = static_cast<time_t>(left);
      limit.tv_nsec = static_cast<long>((left - static_cast<double>(limit.tv_sec)) * 1e9);
    }
    ppoll(readable.data(), readable.size(), due == kNever ? nullptr : &limit, nullptr);
  }

  const double seconds_per_byte_;
  const double delay_;
  const size_t limit_;  // bytes that an uplink holds
  std::vector<Supernode> supernodes_;
  char buffer_[kLargestPacket];
};

}  // namespace

int main(int count, char** words) {
  if (count < 9) {
    fprintf(stderr, "usage: %s PARENT RATE_MBIT DELAY_MS DEVICE MTU QUEUE_PACKETS NAMESPACE_PATH...\n", words[0]);
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != atoi(words[1])) return 1;
  prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; the default of 50 us would show in every packet
  std::vector<Supernode> supernodes;
  for (int i = 7; i < count; i++) {
    Supernode supernode;
    supernode.device = open_device(words[i], words[4]);
    set_limits(words[4], atoi(words[5]), atoi(words[6]));
    supernodes.push_back(std::move(supernode));
  }
  puts("ready");
  fflush(stdout);
  Switch link(atof(words[2]) * 1e6, atof(words[3]) * 1e-3, std::move(supernodes));
  link.run();
}
