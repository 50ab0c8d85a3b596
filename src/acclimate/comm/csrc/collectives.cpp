#include "collectives.h"

#include <cstring>

#include "copies.h"

namespace acclimate_comm {
namespace {

constexpr size_t kLine = 64;
// Above this size, each rank reduces a share of the data. Below it, each rank reduces all of it, which saves
// a round.
constexpr size_t kSharedWorkBytes = 16 * 1024, kSharedWorkBytesOfTwo = 64 * 1024;

// Copies into memory that other ranks read next.
void contribute(const Group& group, void* to, const void* from, size_t bytes) {
  if (group.route().is_around_caches()) {
    stream(to, from, bytes);
  } else {
    copy(to, from, bytes);
  }
}

// The size of each of `parts` equal parts of a slot, in whole cache lines.
size_t part_bytes(const Group& group, size_t parts) {
  return group.layout().slot_bytes() / parts / kLine * kLine;
}

// Every rank reads all contributions and does the whole reduction.
void all_reduce_alone(Group& group, const void* from, void* to, Elements elements, Reduce reduce) {
  const void* sources[kMostRanks];
  in_parts(group, Flow::kReduce, elements.bytes(), part_bytes(group, 1), [&](size_t offset, size_t bytes) {
    contribute(group, group.contribution(bytes), at(from, offset), bytes);
    group.exchange();
    for (int rank = 0; rank < group.size(); rank++) sources[rank] = group.contributed(rank, bytes);
    sources[group.rank()] = at(from, offset);
    reduce(at(to, offset), sources, group.size(), bytes / elements.bytes_each, group.size());
  });
}

// Every rank reduces its share of each part. It reads the other shares from the ranks that reduced them, in
// the round in which it contributes the next part.
class SharedReduction {
 public:
  SharedReduction(Group& group, const void* from, void* to, Elements elements, Reduce reduce)
      : group_(group), from_(from), to_(to), elements_(elements), reduce_(reduce) {}

  void run() {
    const size_t bytes = elements_.bytes(), most = part_bytes(group_, 1);
    const size_t parts = (bytes + most - 1) / most;
    group_.route().start(Flow::kReduce, bytes, parts);
    for (size_t part = 0; part <= parts; part++) {
      const size_t offset = part * most;
      const size_t now = part < parts ? std::min(most, bytes - offset) : 0;
      if (part < parts) contribute_others_shares(offset, now);
      group_.exchange();
      if (part > 0) collect(offset - most, std::min(most, bytes - (offset - most)), (part - 1) & 1);
      if (part < parts) reduce_own(offset, now, part & 1);
    }
    group_.route().finish();
  }

 private:
  // Where a rank's share of a part begins: on a cache line.
  size_t share(size_t bytes, int rank) const {
    const size_t even = (bytes + group_.size() - 1) / group_.size();
    return std::min(bytes, (even + kLine - 1) / kLine * kLine * rank);
  }

  void contribute_others_shares(size_t offset, size_t bytes) {
    unsigned char* slot = group_.layout().slot(group_.rank(), group_.parity());
    const size_t begin = share(bytes, group_.rank()), end = share(bytes, group_.rank() + 1);
    contribute(group_, slot, at(from_, offset), begin);
    contribute(group_, slot + end, at(from_, offset + end), bytes - end);
    parity_ = group_.parity();
  }

  void reduce_own(size_t offset, size_t bytes, int parity) {
    const size_t begin = share(bytes, group_.rank()), end = share(bytes, group_.rank() + 1);
    for (int rank = 0; rank < group_.size(); rank++) {
      sources_[rank] = group_.layout().slot(rank, parity_) + begin;
    }
    sources_[group_.rank()] = at(from_, offset + begin);
    reduce_and_contribute(at(to_, offset + begin), end - begin,
                          group_.layout().result(group_.rank(), parity));
  }

  void reduce_and_contribute(char* target, size_t bytes, unsigned char* result) {
    // Half-precision reductions compute long enough to hide pending non-temporal stores. Wider dtypes are
    // limited by memory, and are fastest when they alternate with it in long pieces.
    const size_t piece = elements_.bytes_each == 2 ? kLeastStreamedBytes : bytes;
    const bool is_around = group_.route().is_around_caches();
    bool has_streams = false;
    for (size_t done = 0; done < bytes; done += piece) {
      const size_t now = std::min(piece, bytes - done);
      reduce_(target + done, sources_, group_.size(), now / elements_.bytes_each, group_.size());
      if (is_around) {
        has_streams |= begin_stream(result + done, target + done, now);
      } else {
        copy(result + done, target + done, now);
      }
      for (int rank = 0; rank < group_.size(); rank++) sources_[rank] = at(sources_[rank], now);
    }
    if (has_streams) await_streams();
  }

  void collect(size_t offset, size_t bytes, int parity) {
    for (int rank = 0; rank < group_.size(); rank++) {
      if (rank == group_.rank()) continue;
      const size_t begin = share(bytes, rank), end = share(bytes, rank + 1);
      copy(at(to_, offset + begin), group_.layout().result(rank, parity), end - begin);
    }
  }

  Group& group_;
  const void* from_;
  void* to_;
  Elements elements_;
  Reduce reduce_;
  int parity_ = 0;
  const void* sources_[kMostRanks];
};

}  // namespace

void all_reduce(Group& group, const void* from, void* to, Elements elements, Reduce reduce) {
  if (elements.bytes() > (group.size() > 2 ? kSharedWorkBytes : kSharedWorkBytesOfTwo)) {
    SharedReduction(group, from, to, elements, reduce).run();
  } else {
    all_reduce_alone(group, from, to, elements, reduce);
  }
}

void reduce_to_root(Group& group, const void* from, void* to, Elements elements, Reduce reduce, int root) {
  const void* sources[kMostRanks];
  in_parts(group, Flow::kUneven, elements.bytes(), part_bytes(group, 1), [&](size_t offset, size_t bytes) {
    if (group.rank() != root) contribute(group, group.contribution(bytes), at(from, offset), bytes);
    group.exchange();
    if (group.rank() != root) return;
    for (int rank = 0; rank < group.size(); rank++) sources[rank] = group.contributed(rank, bytes);
    sources[root] = at(from, offset);
    reduce(at(to, offset), sources, group.size(), bytes / elements.bytes_each, group.size());
  });
}

void broadcast(Group& group, void* data, size_t bytes, int root) {
  in_parts(group, Flow::kUneven, bytes, part_bytes(group, 1), [&](size_t offset, size_t now) {
    if (group.rank() == root) contribute(group, group.contribution(now), at(data, offset), now);
    group.exchange();
    if (group.rank() != root) copy(at(data, offset), group.contributed(root, now), now);
  });
}

void all_gather(Group& group, const void* from, const Targets& to, size_t bytes) {
  in_parts(group, Flow::kGather, bytes, part_bytes(group, 1), [&](size_t offset, size_t now) {
    contribute(group, group.contribution(now), at(from, offset), now);
    copy(at(to[group.rank()], offset), at(from, offset), now);
    group.exchange();
    for (int rank = 0; rank < group.size(); rank++) {
      if (rank != group.rank()) copy(at(to[rank], offset), group.contributed(rank, now), now);
    }
  });
}

void reduce_scatter(Group& group, const Sources& from, void* to, Elements elements, Reduce reduce) {
  const size_t part = part_bytes(group, group.size());
  const void* sources[kMostRanks];
  in_parts(group, Flow::kScatter, elements.bytes(), part, [&](size_t offset, size_t now) {
    unsigned char* const slot = group.layout().slot(group.rank(), group.parity());
    for (int rank = 0; rank < group.size(); rank++) {
      if (rank != group.rank()) contribute(group, slot + rank * part, at(from[rank], offset), now);
    }
    const int parity = group.parity();
    group.exchange();
    for (int rank = 0; rank < group.size(); rank++) {
      sources[rank] = group.layout().slot(rank, parity) + group.rank() * part;
    }
    sources[group.rank()] = at(from[group.rank()], offset);
    reduce(at(to, offset), sources, group.size(), now / elements.bytes_each, group.size());
  });
}

void gather(Group& group, const void* from, const Targets& to, size_t bytes, int root) {
  in_parts(group, Flow::kUneven, bytes, part_bytes(group, 1), [&](size_t offset, size_t now) {
    if (group.rank() == root) {
      copy(at(to[root], offset), at(from, offset), now);
    } else {
      contribute(group, group.contribution(now), at(from, offset), now);
    }
    group.exchange();
    for (int rank = 0; group.rank() == root && rank < group.size(); rank++) {
      if (rank != root) copy(at(to[rank], offset), group.contributed(rank, now), now);
    }
  });
}

void scatter(Group& group, const Sources& from, void* to, size_t bytes, int root) {
  const size_t part = part_bytes(group, group.size());
  in_parts(group, Flow::kUneven, bytes, part, [&](size_t offset, size_t now) {
    const int parity = group.parity();
    if (group.rank() == root) {
      unsigned char* const slot = group.layout().slot(root, parity);
      for (int rank = 0; rank < group.size(); rank++) {
        if (rank != root) contribute(group, slot + rank * part, at(from[rank], offset), now);
      }
      copy(at(to, offset), at(from[root], offset), now);
    }
    group.exchange();
    if (group.rank() != root) {
      copy(at(to, offset), group.layout().slot(root, parity) + group.rank() * part, now);
    }
  });
}

void barrier(Group& group) { group.exchange(); }

namespace {

CommError different_sizes(int source, size_t sent, int target, size_t expected) {
  const std::string from = std::to_string(source), to = std::to_string(target);
  return {Reason::kMismatch, "Rank " + from + " called all_to_all with " + std::to_string(sent) +
                                 " elements for rank " + to + ", but rank " + to + " expects " +
                                 std::to_string(expected) + " elements from rank " + from + "."};
}

}  // namespace

void all_to_all(Group& group, const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                const std::vector<size_t>& received, size_t bytes_each) {
  const int size = group.size();
  const size_t row = size * sizeof(size_t);
  const int parity = group.parity();
  unsigned char* const own = group.layout().slot(group.rank(), parity);
  memcpy(own, sent.data(), row);
  memcpy(own + row, received.data(), row);
  group.exchange();
  const auto row_of = [&](int rank) {
    return reinterpret_cast<const size_t*>(group.layout().slot(rank, parity));
  };
  size_t longest = 0;
  for (int source = 0; source < size; source++) {
    for (int target = 0; target < size; target++) {
      const size_t sends = row_of(source)[target], takes = row_of(target)[size + source];
      if (sends != takes) throw different_sizes(source, sends / bytes_each, target, takes / bytes_each);
      if (source != target) longest = std::max(longest, sends);
    }
  }
  copy(to[group.rank()], from[group.rank()], sent[group.rank()]);
  group.route().start(Flow::kUneven, longest, 1);
  const size_t part = part_bytes(group, size);
  for (size_t offset = 0; offset < longest; offset += part) {
    const auto now = [&](size_t bytes) { return offset < bytes ? std::min(part, bytes - offset) : 0; };
    const int filled = group.parity();
    unsigned char* const slot = group.layout().slot(group.rank(), filled);
    for (int rank = 0; rank < size; rank++) {
      if (rank != group.rank() && now(sent[rank]) != 0) {
        contribute(group, slot + rank * part, at(from[rank], offset), now(sent[rank]));
      }
    }
    group.exchange();
    for (int rank = 0; rank < size; rank++) {
      if (rank == group.rank() || now(received[rank]) == 0) continue;
      copy(at(to[rank], offset), group.layout().slot(rank, filled) + group.rank() * part,
           now(received[rank]));
    }
  }
}

}  // namespace acclimate_comm
