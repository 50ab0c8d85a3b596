// The collectives over bytes in memory. Each starts after Group::begin().
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "group.h"
#include "reduce.h"

namespace acclimate_comm {

using Sources = std::vector<const void*>;  // one per rank
using Targets = std::vector<void*>;  // one per rank

struct Elements {
  size_t count;
  size_t bytes_each;
  size_t bytes() const { return count * bytes_each; }
};

// `to` may be `from`.
void all_reduce(Group& group, const void* from, void* to, Elements elements, Reduce reduce);
// `to` is used on the root only, and may be `from`.
void reduce_to_root(Group& group, const void* from, void* to, Elements elements, Reduce reduce, int root);
void broadcast(Group& group, void* data, size_t bytes, int root);
void all_gather(Group& group, const void* from, const Targets& to, size_t bytes);
void reduce_scatter(Group& group, const Sources& from, void* to, Elements elements, Reduce reduce);
void gather(Group& group, const void* from, const Targets& to, size_t bytes, int root);
void scatter(Group& group, const Sources& from, void* to, size_t bytes, int root);
void barrier(Group& group);
// Sizes are in bytes, one per rank. Ranks compare them first.
void all_to_all(Group& group, const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                const std::vector<size_t>& received, size_t bytes_each);

// Calls `round(offset, bytes)` for each part, and once if there are no bytes, because every collective waits
// for all ranks.
template <class Round>
void in_parts(size_t bytes, size_t most, const Round& round) {
  size_t offset = 0;
  do {
    const size_t now = std::min(most, bytes - offset);
    round(offset, now);
    offset += now;
  } while (offset < bytes);
}
// The same, where each part is one round of a group.
template <class Round>
void in_parts(Group& group, Flow flow, size_t bytes, size_t most, const Round& round) {
  group.route().start(flow, bytes, (bytes + most - 1) / most);
  in_parts(bytes, most, round);
  group.route().finish();
}

}  // namespace acclimate_comm
