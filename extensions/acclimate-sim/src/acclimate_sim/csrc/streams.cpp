#include "streams.h"

#include "context.h"
#include "devices.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>

namespace sim {
namespace {

std::atomic<c10::StreamId> g_next_stream{1};  // 0 is each device's default stream
thread_local c10::StreamId t_current_stream[kMaxDevices] = {};

struct Delivery {
  char* destination;
  std::vector<char> bytes;
  uint32_t stream;
  uint64_t count;
};

// All clocks of the process. They share one lock, since the check need not be fast.
std::mutex g_lock;
std::vector<Clock> g_seen;  // by stream number: what its next work comes after
std::vector<c10::DeviceIndex> g_device_of;
Clock g_host;  // what the host has waited for
std::vector<Delivery> g_deliveries;

// Streams have numbers without gaps: first each device's default stream, then the others by id.
uint32_t number_of(const c10::Stream& stream) {
  const auto number = stream.id() == 0 ? static_cast<uint32_t>(stream.device_index())
                                       : static_cast<uint32_t>(stream.id() + kMaxDevices - 1);
  if (number >= g_seen.size()) {
    g_seen.resize(number + 1);
    g_device_of.resize(number + 1, -1);
  }
  g_device_of[number] = stream.device_index();
  return number;
}

uint64_t entry(const Clock& clock, uint32_t stream) { return stream < clock.size() ? clock[stream] : 0; }

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

void put(const Delivery& delivery) {
  std::memcpy(delivery.destination, delivery.bytes.data(), delivery.bytes.size());
}

template <class Condition>
void deliver_if(Condition condition) {
  auto due = std::stable_partition(g_deliveries.begin(), g_deliveries.end(),
                                   [&](const Delivery& d) { return !condition(d); });
  std::for_each(due, g_deliveries.end(), put);
  g_deliveries.erase(due, g_deliveries.end());
}

void host_has_seen(const Clock& clock) {
  merge(g_host, clock);
  deliver_if([](const Delivery& d) { return d.count <= entry(g_host, d.stream); });
}

std::string describe(uint32_t stream) {
  if (stream < kMaxDevices) return c10::str("the default stream of sim:", stream);
  return c10::str("stream ", stream - kMaxDevices + 1, " of sim:", static_cast<int>(g_device_of[stream]));
}

bool overlaps(const Delivery& delivery, const void* begin, size_t bytes) {
  const char* first = static_cast<const char*>(begin);
  return delivery.destination < first + bytes && first < delivery.destination + delivery.bytes.size();
}

bool checks() { return settings().checks_synchronisation; }

}  // namespace

c10::Stream make_stream(c10::StreamId id, c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, resolve(device)), id);
}
c10::Stream new_stream(c10::DeviceIndex device) { return make_stream(g_next_stream++, device); }
c10::Stream current_stream(c10::DeviceIndex device) noexcept {
  return make_stream(t_current_stream[resolve(device)], device);
}
void set_current_stream(const c10::Stream& stream) noexcept {
  t_current_stream[stream.device_index()] = stream.id();
}

void record_event(Event& event, const c10::Stream& stream) {
  using namespace std::chrono;
  require_context(stream.device_index());
  event.device = stream.device_index();
  event.time_ms = duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  event.seen = g_seen[number_of(stream)];
  merge(event.seen, g_host);
}

void wait_for_event(const Event& event, const c10::Stream& stream) {
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  merge(g_seen[number_of(stream)], event.seen);
}

void wait_for_stream(const c10::Stream& waiting, const c10::Stream& awaited) {
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  const auto from = number_of(awaited), into = number_of(waiting);  // both first: g_seen may grow
  merge(g_seen[into], g_seen[from]);
}

void host_waits_for_event(const Event& event) {
  if (event.device >= 0) host_learns_of_asserts(event.device);
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  host_has_seen(event.seen);
}

void host_waits_for_stream(const c10::Stream& stream) {
  host_learns_of_asserts(stream.device_index());
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  host_has_seen(g_seen[number_of(stream)]);
}

void host_waits_for_device(c10::DeviceIndex device) {
  host_learns_of_asserts(resolve(device));
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  for (size_t stream = 0; stream < g_seen.size(); stream++) {
    if (g_device_of[stream] == resolve(device)) host_has_seen(g_seen[stream]);
  }
}

// -- uses of memory ------------------------------------------------------------------------------

Work::Work(const c10::Stream& on, std::string name) : op(std::move(name)) {
  std::lock_guard<std::mutex> hold(g_lock);
  stream = number_of(on);
  Clock& seen = g_seen[stream];
  merge(seen, g_host);
  if (seen.size() <= stream) seen.resize(stream + 1);
  count = ++seen[stream];
}

void Work::uses(AccessLog& log, size_t begin, size_t end, bool writes) const {
  std::lock_guard<std::mutex> hold(g_lock);
  const Clock& seen = g_seen[stream];
  for (const Access& before : log) {
    const bool conflicts = (writes || before.writes) && before.begin < end && begin < before.end;
    TORCH_CHECK(
        !conflicts || before.count <= entry(seen, before.stream), "Missing synchronisation: ", op, " on ",
        describe(stream), writes ? " writes" : " reads", " memory that ", before.op, " on ",
        describe(before.stream), before.writes ? " wrote" : " read",
        ", and nothing makes it come after. Before it, let the later stream wait (stream.wait_stream(…) or "
        "stream.wait_event(…)) or the host (synchronize()).");
  }
  // A use can be forgotten once a later one, ordered after it, conflicts with the same uses.
  log.erase(std::remove_if(log.begin(), log.end(),
                           [&](const Access& before) {
                             return begin <= before.begin && before.end <= end &&
                                    before.count <= entry(seen, before.stream) && (writes || !before.writes);
                           }),
            log.end());
  log.push_back({begin, end, stream, count, writes, op});
}

// -- copies to the host that are under way ---------------------------------------------------------

void deliver_later(void* destination, size_t bytes, c10::ScalarType dtype, const Work& copy) {
  std::lock_guard<std::mutex> hold(g_lock);
  auto* place = static_cast<char*>(destination);
  g_deliveries.push_back({place, {place, place + bytes}, copy.stream, copy.count});
  if (dtype == c10::ScalarType::Bool) {
    for (size_t i = 0; i < bytes; i++) place[i] = !place[i];  // any other byte is no bool
  } else {
    // All bits set is NaN in every floating-point type; 0xDB… is easy to recognise in every integer type.
    std::memset(place, c10::isIntegralType(dtype, false) ? 0xDB : 0xFF, bytes);
  }
}

void deliver_now(const void* begin, size_t bytes) {
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  deliver_if([&](const Delivery& d) { return overlaps(d, begin, bytes); });
}

void forget_deliveries(const void* begin, size_t bytes) noexcept {
  if (!checks()) return;
  std::lock_guard<std::mutex> hold(g_lock);
  g_deliveries.erase(std::remove_if(g_deliveries.begin(), g_deliveries.end(),
                                    [&](const Delivery& d) { return overlaps(d, begin, bytes); }),
                     g_deliveries.end());
}

}  // namespace sim
