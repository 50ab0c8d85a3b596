// Streams and events, and the proof that work of different streams is ordered.
//
// Work runs when it is called, so a program that forgets to synchronise would still compute the right numbers
// here and the wrong ones on hardware. With sync=check each stream therefore keeps a vector clock, as torch's
// CUDA stream sanitizer does: work carries its stream's count; an event carries all counts its stream had
// seen; waiting merges them. Two uses of the same bytes, one a write, have to be ordered by those counts.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sim {

using Clock = std::vector<uint64_t>;  // by stream number; missing entries are 0

struct Event {
  double time_ms = 0;
  bool measures_time = false;
  c10::DeviceIndex device = -1;  // of the stream that recorded it
  Clock seen;  // what the stream that recorded it had seen
};

c10::Stream make_stream(c10::StreamId id, c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device) noexcept;
void set_current_stream(const c10::Stream& stream) noexcept;

void record_event(Event& event, const c10::Stream& stream);
void wait_for_event(const Event& event, const c10::Stream& stream);
void wait_for_stream(const c10::Stream& waiting, const c10::Stream& awaited);

// The host waits: work that starts later, on any stream, is ordered after it.
void host_waits_for_event(const Event& event);
void host_waits_for_stream(const c10::Stream& stream);
void host_waits_for_device(c10::DeviceIndex device);

// -- uses of memory ------------------------------------------------------------------------------

struct Access {
  size_t begin, end;  // bytes within the allocation
  uint32_t stream;  // its number
  uint64_t count;  // of the stream's work at that use
  bool writes;
  std::string op;
};

// Uses of one allocation that later ones have to be ordered after.
using AccessLog = std::vector<Access>;

// Counts one piece of work on a stream. Every use of memory in it carries the count.
struct Work {
  explicit Work(const c10::Stream& stream, std::string op);
  void uses(AccessLog& log, size_t begin, size_t end, bool writes) const;

  uint32_t stream;
  uint64_t count;
  std::string op;
};

// -- copies to the host that are under way ---------------------------------------------------------

// Holds back the bytes of a non-blocking copy, and leaves poison, until the host has waited for its stream.
void deliver_later(void* destination, size_t bytes, c10::ScalarType dtype, const Work& copy);
// Delivers the held-back copies to these bytes: work ordered after the copy reads them.
void deliver_now(const void* begin, size_t bytes);
// Forgets the copies into freed memory.
void forget_deliveries(const void* begin, size_t bytes) noexcept;

}  // namespace sim
