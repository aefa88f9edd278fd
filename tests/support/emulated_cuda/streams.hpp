// What happened before what on streams: a vector clock for each, and the last accesses to memory.
//
// An operation is over when its call returns, so that no value is ever wrong for want of waiting. What
// could be wrong on a GPU is found by order instead: two accesses to the same bytes, of which one
// writes, must be ordered by events or by the host's waiting. Memory that is freed is given out again
// at once to the stream that it was allocated on: its next use comes after all that use it now. Bytes
// are told by first and last: streams that write every other column of one tensor are held to meet.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace emulated {

using Key = std::pair<int, int64_t>;     // device, stream
using Clock = std::map<Key, uint64_t>;  // how many operations of each stream are over before

// Copies inside an operation are no operations of a stream.
inline thread_local int unseen = 0;
struct Unseen {
  Unseen() { ++unseen; }
  ~Unseen() { --unseen; }
};

struct Access {
  Key stream;
  uint64_t number;
  size_t low, high;  // bytes of the memory
  bool writes;
  std::string operation;
};

// A stretch of memory, of a device or page-locked.
struct Region {
  size_t size = 0;
  int64_t offset = -1;  // in this process's file; -1 is another's memory, or page-locked
  bool is_pinned = false;
  int num_open = 0;
  Key allocated_on{0, 0};
  std::vector<Access> accesses;
  std::set<Key> recorded;  // streams that free memory waits for
  std::vector<Access> before;  // of the memory that this may have been, until it is used
};

inline void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, number);
  }
}

inline bool has(const Clock& clock, const Access& access) {
  const auto found = clock.find(access.stream);
  return found != clock.end() && found->second >= access.number;
}

class Order {
 public:
  static Order& held() {
    static auto* held = new Order();
    return *held;
  }
  const Clock& over() const { return over_; }
  Clock at(Key stream) { return clocks_[stream]; }
  Clock all_of(int device) const {
    Clock all;
    for (const auto& [stream, clock] : clocks_) {
      if (stream.first == device) join(all, clock);
    }
    return all;
  }

  // What a stream does from now on comes after this.
  void follow(Key stream, const Clock& before) { join(clocks_[stream], before); }

  // The host has waited. Whatever any thread begins later comes after it.
  void finish(const Clock& done) { join(over_, done); }

  // Begin an operation on a stream; returns its number.
  uint64_t launch(Key stream) {
    auto& clock = clocks_[stream];
    join(clock, over_);
    return ++clock[stream];
  }

  // Note an access; returns what is wrong with it, or nothing.
  std::string see(Region& region, const Access& access) {
    const auto& clock = clocks_[access.stream];
    std::string wrong;
    for (const auto& before : region.before) {
      if (has(clock, before)) continue;
      wrong = told(access) + " uses memory that was freed before the end of " + told(before) +
              ", without record_stream";
    }
    region.before.clear();
    std::vector<Access> kept;
    for (auto& before : region.accesses) {
      const bool meets = before.low < access.high && access.low < before.high;
      const bool ordered = has(clock, before);
      if (meets && !ordered && (before.writes || access.writes)) {
        wrong = told(access) + " is not ordered after " + told(before);
      }
      const bool covered = access.low <= before.low && before.high <= access.high &&
                           (access.writes || (!before.writes && before.stream == access.stream));
      if (!has(over_, before) && !(ordered && covered)) kept.push_back(std::move(before));
    }
    kept.push_back(access);
    region.accesses = std::move(kept);
    return wrong;
  }

  // Memory of a stream comes and goes. What nobody waits for goes on to whatever comes next.
  void allocated(Region& region, Key stream) {
    region.allocated_on = stream;
    auto& left = left_[stream];
    std::erase_if(left, [&](const auto& access) { return is_before(access, stream); });
    region.before = left;
  }
  void freed(const Region& region) {
    for (const auto& access : region.accesses) {
      const bool waits = region.recorded.contains(access.stream);
      if (!waits && !is_before(access, region.allocated_on)) {
        left_[region.allocated_on].push_back(access);
      }
    }
  }

  static std::string told(const Access& access) {
    return access.operation + (access.writes ? " writing on " : " reading on ") +
           name(access.stream);
  }

 private:
  bool is_before(const Access& access, Key stream) {
    return has(clocks_[stream], access) || has(over_, access);
  }
  static std::string name(Key stream) {
    const auto number = std::to_string(stream.second < 0 ? -stream.second : stream.second);
    return "cuda:" + std::to_string(stream.first) +
           (stream.second < 0 ? " group " : " stream ") + number;
  }

  std::map<Key, Clock> clocks_;
  std::map<Key, std::vector<Access>> left_;  // accesses to freed memory
  Clock over_;
};

}  // namespace emulated
