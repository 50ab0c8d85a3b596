#include "placement.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace acclimate_comm {

void place_near_this_thread(unsigned char* begin, size_t bytes) {
  constexpr size_t kMostNodes = 1024, kWordBits = 8 * sizeof(unsigned long);
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin + bytes) / page * page;
  if (first >= end) return;
  int policy = MPOL_DEFAULT;
  unsigned long nodes[kMostNodes / kWordBits] = {};
  if (syscall(SYS_get_mempolicy, &policy, nodes, kMostNodes, nullptr, 0) != 0) return;
  if (policy == MPOL_DEFAULT) policy = MPOL_LOCAL;
  // mbind moves only pages that this process maps, and a page is mapped when it is touched.
  for (uintptr_t at = first; at < end; at += page) (void)*reinterpret_cast<volatile unsigned char*>(at);
  // The kernel subtracts one from the number of bits.
  syscall(SYS_mbind, first, end - first, policy, nodes, kMostNodes + 1, MPOL_MF_MOVE);
}

}  // namespace acclimate_comm
