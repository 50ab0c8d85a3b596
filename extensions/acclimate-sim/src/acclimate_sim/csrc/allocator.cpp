#include "allocator.h"

#include "context.h"
#include "devices.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <mutex>

namespace sim {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

// Rounds like CUDA's allocator, so that memory statistics match.
constexpr size_t kGranularity = 512;
size_t rounded(size_t bytes) { return (bytes + kGranularity - 1) / kGranularity * kGranularity; }

struct Pool {
  std::mutex lock;
  DeviceStats stats;
};
Pool g_pools[kMaxDevices];

// All blocks, for getDeviceFromPtr. They are a list, because every operator allocates and frees blocks, and
// getDeviceFromPtr is rarely called.
std::mutex g_blocks_lock;
Block* g_blocks = nullptr;

// Counts an allocation, or refuses it. As in a caching allocator, freed memory stays reserved until
// empty_cache(), or until memory runs out.
void count_in(c10::DeviceIndex device, size_t bytes) {
  Pool& pool = g_pools[device];
  std::lock_guard<std::mutex> hold(pool.lock);
  DeviceStats& stats = pool.stats;
  const auto capacity = settings().capacity_bytes;
  const auto allocated = stats.allocated_bytes[0].current, needed = allocated + static_cast<int64_t>(bytes);
  if (needed > capacity) {
    stats.num_ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes,
                     " bytes on sim:", static_cast<int>(device), ", which has ", capacity, " bytes of which ",
                     capacity - allocated, " are free. ACCLIMATE_SIM=memory=… sets how much a device has.");
  }
  stats.num_device_alloc++;
  stats.allocation[0].increase(1);
  stats.active[0].increase(1);
  stats.allocated_bytes[0].increase(bytes);
  stats.active_bytes[0].increase(bytes);
  stats.requested_bytes[0].increase(bytes);
  auto& reserved = stats.reserved_bytes[0];
  if (needed > reserved.current) reserved.increase(needed - reserved.current);
}

void count_out(c10::DeviceIndex device, size_t bytes) {
  Pool& pool = g_pools[device];
  std::lock_guard<std::mutex> hold(pool.lock);
  DeviceStats& stats = pool.stats;
  stats.num_device_free++;
  stats.allocation[0].decrease(1);
  stats.active[0].decrease(1);
  stats.allocated_bytes[0].decrease(bytes);
  stats.active_bytes[0].decrease(bytes);
  stats.requested_bytes[0].decrease(bytes);
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> hold(g_blocks_lock);
    (block->before ? block->before->after : g_blocks) = block->after;
    if (block->after) block->after->before = block->before;
  }
  count_out(block->device, block->bytes);
  delete block;
}

c10::DataPtr own(c10::DataPtr host, size_t bytes, c10::DeviceIndex device) {
  void* address = host.get();
  auto* block = new Block{std::move(host), bytes, device, {}};
  {
    std::lock_guard<std::mutex> hold(g_blocks_lock);
    block->after = g_blocks;
    if (g_blocks) g_blocks->before = block;
    g_blocks = block;
  }
  return {address, block, &release, c10::Device(kSim, device)};
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    require_context(device);
    if (bytes == 0) return {nullptr, c10::Device(kSim, device)};
    const auto size = rounded(bytes);
    count_in(device, size);  // before the host's memory is touched
    return own(c10::GetCPUAllocator()->allocate(size), size, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (Pool& pool : g_pools) {
      std::lock_guard<std::mutex> hold(pool.lock);
      auto& reserved = pool.stats.reserved_bytes[0];
      reserved.decrease(reserved.current - pool.stats.allocated_bytes[0].current);
    }
  }
  // Work is done when its call returns, so memory is never reused too early.
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> hold(g_pools[device].lock);
    return g_pools[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
    std::lock_guard<std::mutex> hold(g_pools[device].lock);
    g_pools[device].stats.num_ooms = 0;
    g_pools[device].stats.num_device_alloc = 0;
    g_pools[device].stats.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> hold(g_pools[device].lock);
    const auto capacity = settings().capacity_bytes;
    return {capacity - g_pools[device].stats.reserved_bytes[0].current, capacity};
  }

 private:
  template <class Function>
  void for_each_stat(c10::DeviceIndex device, Function change) {
    check_index(device);
    std::lock_guard<std::mutex> hold(g_pools[device].lock);
    DeviceStats& stats = g_pools[device].stats;
    for (auto* stat : {&stats.allocation, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                       &stats.active_bytes, &stats.requested_bytes}) {
      change((*stat)[0]);
    }
  }
};

Allocator g_allocator;
REGISTER_ALLOCATOR(kSim, &g_allocator);

}  // namespace

c10::Allocator* device_allocator() { return &g_allocator; }

c10::DataPtr adopt(c10::DataPtr host, size_t bytes, c10::DeviceIndex device) {
  if (!host.get()) return {nullptr, c10::Device(kSim, device)};
  count_in(device, rounded(bytes));
  return own(std::move(host), rounded(bytes), device);
}

Block* block_of(const c10::DataPtr& pointer) noexcept {
  return pointer.get_deleter() == &release ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

c10::DeviceIndex device_of(const void* address) {
  std::lock_guard<std::mutex> hold(g_blocks_lock);
  for (const Block* block = g_blocks; block; block = block->after) {
    const auto* begin = static_cast<const char*>(block->host.get());
    if (begin <= address && address < begin + block->bytes) return block->device;
  }
  return -1;
}

}  // namespace sim
