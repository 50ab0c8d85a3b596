// Requests huge pages for memory that kernels read; Python does so in acclimate.host.huge_pages.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace acclimate::inference {

// Called before the memory is written. It has no effect on little memory, or if the system refuses.
inline void request_huge_pages([[maybe_unused]] uint8_t* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t least_bytes = 4 << 20, page = 4096;
  if (bytes >= least_bytes) {
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = reinterpret_cast<uintptr_t>(data + bytes) / page * page;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace acclimate::inference
