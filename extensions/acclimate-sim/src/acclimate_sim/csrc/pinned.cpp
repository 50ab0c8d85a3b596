#include "pinned.h"

#include "devices.h"
#include "streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>

#include <map>
#include <mutex>

namespace sim {
namespace {

std::mutex g_pinned_lock;
std::map<uintptr_t, size_t> g_pinned;  // address to bytes
int64_t g_pinned_bytes = 0, g_pinned_peak = 0;

struct Pinned {
  c10::DataPtr host;
  size_t bytes;
};

void unpin(void* context) {
  auto* block = static_cast<Pinned*>(context);
  forget_deliveries(block->host.get(), block->bytes);
  {
    std::lock_guard<std::mutex> hold(g_pinned_lock);
    g_pinned.erase(reinterpret_cast<uintptr_t>(block->host.get()));
    g_pinned_bytes -= static_cast<int64_t>(block->bytes);
  }
  delete block;
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    auto* block = new Pinned{c10::GetCPUAllocator()->allocate(bytes), bytes};
    void* address = block->host.get();
    {
      std::lock_guard<std::mutex> hold(g_pinned_lock);
      g_pinned[reinterpret_cast<uintptr_t>(address)] = bytes;
      g_pinned_bytes += static_cast<int64_t>(bytes);
      g_pinned_peak = std::max(g_pinned_peak, g_pinned_bytes);
    }
    return {address, block, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> hold(g_pinned_lock);
    at::HostStats stats;
    stats.allocated_bytes.current = g_pinned_bytes;
    stats.allocated_bytes.peak = g_pinned_peak;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {
    std::lock_guard<std::mutex> hold(g_pinned_lock);
    g_pinned_peak = g_pinned_bytes;
  }
};

PinnedAllocator g_pinned_allocator;
at::HostAllocatorRegistry<kSim> g_register_pinned_allocator(&g_pinned_allocator);

}  // namespace

void register_pinned(uintptr_t address, size_t bytes) {
  std::lock_guard<std::mutex> hold(g_pinned_lock);
  g_pinned[address] = bytes;
}

void unregister_pinned(uintptr_t address) {
  std::lock_guard<std::mutex> hold(g_pinned_lock);
  g_pinned.erase(address);
}

c10::Allocator* pinned_allocator() { return &g_pinned_allocator; }

bool is_pinned(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> hold(g_pinned_lock);
  auto after = g_pinned.upper_bound(wanted);
  if (after == g_pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return wanted < begin + bytes;
}

}  // namespace sim
