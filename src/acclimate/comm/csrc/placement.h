// On which memory node shared memory lies.
#pragma once

#include <cstddef>

namespace acclimate_comm {

// Moves whole pages to where this thread's policy puts new memory: the nodes that it is bound to, else the
// node of its core. Nobody else may have touched them, as the kernel leaves pages that several processes map.
// Does nothing where the kernel refuses, as in containers without CAP_SYS_NICE.
void place_near_this_thread(unsigned char* begin, size_t bytes);

}  // namespace acclimate_comm
