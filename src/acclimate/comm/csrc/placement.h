// Places shared memory on a NUMA node.
#pragma once

#include <cstddef>

namespace acclimate_comm {

// Moves whole pages to where this thread's memory policy puts new memory: the nodes that it is bound to, else
// the node of its core. No other process may have touched them, because the kernel does not move pages that
// several processes map. Does nothing if the kernel refuses, as in containers without CAP_SYS_NICE.
void place_near_this_thread(unsigned char* begin, size_t bytes);

}  // namespace acclimate_comm
