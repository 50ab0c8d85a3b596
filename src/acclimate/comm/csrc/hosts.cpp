#include "hosts.h"

#include <cstring>
#include <thread>

#include "copies.h"

namespace acclimate_comm {
namespace {

using std::chrono::milliseconds;

// A leader gives up this much earlier, because only a leader knows which host is missing.
constexpr milliseconds kLeaderFirst{3000};
// How long ranks wait for each other's entries in the status store after a link failed.
constexpr milliseconds kLongestInquiry{1000};
constexpr milliseconds kInquiryPause{20};
// Above this size, each host reduces a share of the data; below it, each host reduces all of it.
constexpr size_t kSharedWorkBytes = 64 * 1024;
// The bytes that a leader buffers at a time for each host.
constexpr size_t kStagedBytes = 8 * 1024 * 1024;

bool leaves_group_usable(Reason reason) {
  return reason == Reason::kMismatch || reason == Reason::kArgument || reason == Reason::kForked;
}

}  // namespace

// A host's call, which its leader sends to the other leaders.
struct Hosts::HostCall {
  Call call;
  char error[kTextBytes];
};

Hosts::Hosts(std::shared_ptr<Group> local, std::vector<HostRanks> hosts, int rank,
             std::unique_ptr<Link> leaders, std::unique_ptr<Link> everyone,
             std::unique_ptr<StatusStore> status, milliseconds timeout)
    : local_(std::move(local)),
      hosts_(std::move(hosts)),
      rank_(rank),
      leaders_(std::move(leaders)),
      everyone_(std::move(everyone)),
      status_(std::move(status)),
      timeout_(timeout) {
  for (const HostRanks& host : hosts_) size_ += static_cast<int>(host.ranks.size());
  places_.resize(static_cast<size_t>(size_));
  for (size_t host = 0; host < hosts_.size(); host++) {
    const auto& ranks = hosts_[host].ranks;
    for (size_t index = 0; index < ranks.size(); index++) {
      places_[static_cast<size_t>(ranks[index])] = {static_cast<int>(host), static_cast<int>(index)};
    }
  }
  host_ = host_of(rank);
  local_->name_ranks(own_ranks());
}

size_t Hosts::most_ranks() const {
  size_t most = 0;
  for (const HostRanks& host : hosts_) most = std::max(most, host.ranks.size());
  return most;
}

void Hosts::set_timeout(milliseconds timeout) {
  timeout_ = bounded(timeout);
  local_->set_timeout(timeout);
}

// -- failures ----------------------------------------------------------------------------------------

template <class Body>
void Hosts::guarded(const Body& body) {
  try {
    body();
  } catch (const LinkError& error) {
    cut();  // so that the ranks at the other ends fail and report too
    give_up(error.is_timeout ? Reason::kTimeout : Reason::kPeerGone, what_is_known(error));
  } catch (const CommError& error) {
    if (leaves_group_usable(error.reason)) throw;
    give_up(error.reason, local_->failure());
  }
}

void Hosts::give_up(Reason reason, const std::string& text) {
  if (status_->get("failure").empty()) status_->put("failure", text);
  cut();
  local_->fail(reason, text);
}

std::string Hosts::what_is_known(const LinkError& error) {
  const auto end = Clock::now() + kLongestInquiry;
  status_->put("answer/" + std::to_string(rank_), "here");
  std::string missing;
  do {
    for (const std::string& text : {local_->failure(), status_->get("failure")}) {
      if (!text.empty()) return text;
    }
    missing = missing_hosts();
    if (missing.empty()) break;
    std::this_thread::sleep_for(kInquiryPause);
  } while (Clock::now() < end);
  const std::string whom = missing.empty() ? "another host" : missing;
  if (error.is_timeout) {
    return "Rank " + std::to_string(rank_) + " gave up after " + time_of(call_timeout_) + ": " + whom +
           " did not take part in " + describe(call_) + ".";
  }
  return "Rank " + std::to_string(rank_) + " lost the connection to " + whom + " in " + describe(call_) +
         ": " + error.what() + ".";
}

// The hosts without a rank that wrote to the status store.
std::string Hosts::missing_hosts() {
  std::string missing;
  for (size_t host = 0; host < hosts_.size(); host++) {
    bool is_here = static_cast<int>(host) == host_;
    std::string ranks;
    for (const int rank : hosts_[host].ranks) {
      is_here = is_here || !status_->get("answer/" + std::to_string(rank)).empty();
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    if (is_here) continue;
    missing += (missing.empty() ? "host " : " and host ") + hosts_[host].name + " (" +
               (hosts_[host].ranks.size() == 1 ? "rank " : "ranks ") + ranks + ")";
  }
  return missing;
}

void Hosts::cut() {
  if (leaders_) leaders_->cut();
  everyone_->cut();
}

void Hosts::abort(const std::string& why) {
  if (was_forked()) return;
  try {
    give_up(Reason::kAborted, why);
  } catch (const CommError&) {  // raised for the waiting ranks
  }
}

void Hosts::leave() {
  if (was_forked()) return;
  local_->leave();
  cut();
}

// -- agreeing on a call ------------------------------------------------------------------------------

void Hosts::begin(const Call& call, milliseconds timeout, bool is_background) {
  guarded([&] {
    call_ = call;
    call_timeout_ = timeout.count() > 0 ? timeout : timeout_;
    local_->begin(call, is_leader() ? call_timeout_ : call_timeout_ + kLeaderFirst, is_background);
    agree();
  });
}

void Hosts::refuse(Call call, milliseconds timeout, bool is_background) {
  call.refused = 1;
  try {
    begin(call, timeout, is_background);
  } catch (const CommError& error) {
    if (error.reason != Reason::kMismatch)
      throw;  // for a mismatch, the caller raises the error about its arguments
  }
}

// First the ranks of each host compare their calls. Then the leaders compare theirs and send the result to
// the ranks of their hosts.
void Hosts::agree() {
  HostCall own{call_, ""};
  std::exception_ptr mismatch;
  try {
    local_->exchange();
  } catch (const CommError& error) {
    if (error.reason != Reason::kMismatch) throw;
    mismatch = std::current_exception();
    strncpy(own.error, error.what(), kTextBytes - 1);
  }
  std::string error;
  if (is_leader()) {
    std::vector<HostCall> all(hosts_.size());
    leaders_->all_gather(&own, all.data(), sizeof own, call_timeout_);
    error = difference(all);
  }
  if (mismatch) std::rethrow_exception(mismatch);  // all ranks of this host have it
  unsigned char differs = error.empty() ? 0 : 1;
  acclimate_comm::broadcast(*local_, &differs, sizeof differs, 0);
  if (differs == 0) return;
  char text[kTextBytes] = "";
  strncpy(text, error.c_str(), kTextBytes - 1);
  acclimate_comm::broadcast(*local_, text, sizeof text, 0);
  throw CommError(Reason::kMismatch, text);
}

std::string Hosts::difference(const std::vector<HostCall>& said) const {
  for (const HostCall& of_host : said) {
    if (of_host.error[0] != '\0') return of_host.error;
  }
  for (int rank = 0; rank < size_; rank++) {
    const Call& call = said[static_cast<size_t>(host_of(rank))].call;
    if (!(call == said[0].call)) return different_calls("0", said[0].call, std::to_string(rank), call);
  }
  return "";
}

// -- collectives -------------------------------------------------------------------------------------

// Replaces each leader's data by the sum over leaders. Every element is summed in the same order, so that all
// leaders get the same bits.
void Hosts::sum_between_hosts(void* data, Elements elements, Reduce reduce) {
  const size_t hosts = hosts_.size();
  const void* sources[kMostRanks];
  const auto sum = [&](void* to, const char* from, size_t count) {
    for (size_t host = 0; host < hosts; host++) sources[host] = from + host * count * elements.bytes_each;
    reduce(to, sources, static_cast<int>(hosts), count, size_);
  };
  if (hosts == 2 || elements.bytes() <= kSharedWorkBytes) {
    std::vector<char> all(hosts * elements.bytes());
    leaders_->all_gather(data, all.data(), elements.bytes(), call_timeout_);
    sum(data, all.data(), elements.count);
    return;
  }
  const size_t share = (elements.count + hosts - 1) / hosts, bytes = share * elements.bytes_each;
  std::vector<char> whole(hosts * bytes), parts(hosts * bytes);
  memcpy(whole.data(), data, elements.bytes());
  const std::vector<size_t> equal(hosts, bytes);
  leaders_->all_to_all(whole.data(), equal, parts.data(), equal, call_timeout_);
  sum(parts.data(), parts.data(), share);
  leaders_->all_gather(parts.data(), whole.data(), bytes, call_timeout_);
  memcpy(data, whole.data(), elements.bytes());
}

void Hosts::all_reduce(const void* from, void* to, Elements elements, Reduce reduce) {
  guarded([&] {
    const size_t most = kStagedBytes / elements.bytes_each * elements.bytes_each;
    in_parts(elements.bytes(), most, [&](size_t offset, size_t bytes) {
      const Elements part{bytes / elements.bytes_each, elements.bytes_each};
      reduce_to_root(*local_, at(from, offset), at(to, offset), part, reduce, 0, 1);
      if (is_leader()) sum_between_hosts(at(to, offset), part, reduce);
      acclimate_comm::broadcast(*local_, at(to, offset), bytes, 0);
    });
  });
}

void Hosts::reduce(const void* from, void* to, Elements elements, Reduce reduce, int root) {
  // Costs the hosts without the root one needless broadcast.
  std::vector<char> scratch(rank_ == root ? 0 : elements.bytes());
  all_reduce(from, rank_ == root ? to : scratch.data(), elements, reduce);
}

void Hosts::broadcast(void* data, size_t bytes, int root) {
  guarded([&] {
    const bool is_here = host_of(root) == host_;
    if (is_here) acclimate_comm::broadcast(*local_, data, bytes, index_of(root));
    if (is_leader()) leaders_->broadcast(data, bytes, host_of(root), call_timeout_);
    if (!is_here) acclimate_comm::broadcast(*local_, data, bytes, 0);
  });
}

void Hosts::all_gather(const void* from, const Targets& to, size_t bytes) {
  guarded([&] {
    const size_t ranks = most_ranks(), hosts = hosts_.size();
    in_parts(bytes, std::max<size_t>(1, kStagedBytes / ranks), [&](size_t offset, size_t now) {
      Targets here;
      for (const int rank : own_ranks()) here.push_back(at(to[static_cast<size_t>(rank)], offset));
      acclimate_comm::all_gather(*local_, at(from, offset), here, now);
      std::vector<char> own(is_leader() ? ranks * now : 0), all(own.size() * hosts);
      if (is_leader()) {
        for (size_t index = 0; now != 0 && index < here.size(); index++) {
          memcpy(own.data() + index * now, here[index], now);
        }
        leaders_->all_gather(own.data(), all.data(), own.size(), call_timeout_);
      }
      for (int rank = 0; rank < size_; rank++) {
        if (host_of(rank) == host_) continue;
        char* const target = at(to[static_cast<size_t>(rank)], offset);
        const size_t place = static_cast<size_t>(host_of(rank)) * ranks + static_cast<size_t>(index_of(rank));
        if (is_leader() && now != 0) memcpy(target, all.data() + place * now, now);
        acclimate_comm::broadcast(*local_, target, now, 0);
      }
    });
  });
}

void Hosts::reduce_scatter(const Sources& from, void* to, Elements elements, Reduce reduce) {
  guarded([&] {
    const size_t ranks = most_ranks(), hosts = hosts_.size(), each = elements.bytes_each;
    const size_t most = std::max<size_t>(1, kStagedBytes / ranks / each) * each;
    in_parts(elements.bytes(), most, [&](size_t offset, size_t now) {
      const Elements part{now / each, each};
      const size_t block = is_leader() ? ranks * now : 0;
      std::vector<char> sums(hosts * block), heard(hosts * block);
      for (int rank = 0; rank < size_; rank++) {
        const size_t place = static_cast<size_t>(host_of(rank)) * ranks + static_cast<size_t>(index_of(rank));
        void* const sum = is_leader() ? sums.data() + place * now : nullptr;
        reduce_to_root(*local_, at(from[static_cast<size_t>(rank)], offset), sum, part, reduce, 0, 1);
      }
      Sources results(own_ranks().size());
      if (is_leader()) {
        const std::vector<size_t> equal(hosts, block);
        leaders_->all_to_all(sums.data(), equal, heard.data(), equal, call_timeout_);
        const void* sources[kMostRanks];
        for (size_t index = 0; index < results.size(); index++) {
          for (size_t host = 0; host < hosts; host++) {
            sources[host] = heard.data() + host * block + index * now;
          }
          reduce(sums.data() + index * now, sources, static_cast<int>(hosts), part.count, size_);
          results[index] = sums.data() + index * now;
        }
      }
      acclimate_comm::scatter(*local_, results, at(to, offset), now, 0);
    });
  });
}

void Hosts::gather(const void* from, const Targets& to, size_t bytes, int root) {
  const bool is_root = rank_ == root;
  std::vector<size_t> sent(static_cast<size_t>(size_), 0), received(sent.size(), is_root ? bytes : 0);
  sent[static_cast<size_t>(root)] = bytes;
  exchange(Sources(sent.size(), from), sent, is_root ? to : Targets(sent.size()), received);
}

void Hosts::scatter(const Sources& from, void* to, size_t bytes, int root) {
  const bool is_root = rank_ == root;
  std::vector<size_t> received(static_cast<size_t>(size_), 0), sent(received.size(), is_root ? bytes : 0);
  received[static_cast<size_t>(root)] = bytes;
  exchange(is_root ? from : Sources(sent.size()), sent, Targets(sent.size(), to), received);
}

void Hosts::all_to_all(const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                       const std::vector<size_t>& received, size_t bytes_each) {
  const size_t size = static_cast<size_t>(size_), row = 2 * size;
  std::vector<size_t> own(sent), all(size * row);
  own.insert(own.end(), received.begin(), received.end());
  Targets rows;
  for (size_t rank = 0; rank < size; rank++) rows.push_back(all.data() + rank * row);
  all_gather(own.data(), rows, row * sizeof(size_t));
  const auto number = [&](int rank, size_t column) { return all[static_cast<size_t>(rank) * row + column]; };
  check_exchange(
      size_, [&](int source, int target) { return number(source, static_cast<size_t>(target)); },
      [&](int source, int target) { return number(target, size + static_cast<size_t>(source)); }, bytes_each);
  exchange(from, sent, to, received);
}

void Hosts::pass_message(const Call& call, int peer, const std::function<void(Link&, milliseconds)>& body) {
  local_->throw_if_failed();
  const milliseconds timeout = timeout_;
  try {
    body(*everyone_, timeout);
  } catch (const LinkError& error) {
    std::string text = local_->failure();
    if (text.empty()) text = status_->get("failure");
    const std::string whom = peer < 0 ? "any rank" : "rank " + std::to_string(peer);
    const std::string way = static_cast<Kind>(call.kind) == Kind::kSend ? " to " : " from ";
    if (text.empty() && error.is_timeout) {
      text = "Rank " + std::to_string(rank_) + " gave up after " + time_of(timeout) + ": " + with_tag(call) +
             way + whom + " did not finish.";
    } else if (text.empty()) {
      text = "Rank " + std::to_string(rank_) + " lost the connection to " + whom + " in " + with_tag(call) +
             ": " + error.what() + ".";
    }
    give_up(error.is_timeout ? Reason::kTimeout : Reason::kPeerGone, text);
  }
}

// The ranks exchange data directly, without leaders.
void Hosts::exchange(const Sources& from, const std::vector<size_t>& sent, const Targets& to,
                     const std::vector<size_t>& received) {
  guarded([&] {
    std::vector<char> outgoing, incoming;
    size_t expected = 0;
    for (size_t rank = 0; rank < sent.size(); rank++) {
      const char* const part = static_cast<const char*>(from[rank]);
      if (sent[rank] != 0) outgoing.insert(outgoing.end(), part, part + sent[rank]);
      expected += received[rank];
    }
    incoming.resize(expected);
    everyone_->all_to_all(outgoing.data(), sent, incoming.data(), received, call_timeout_);
    const char* part = incoming.data();
    for (size_t rank = 0; rank < received.size(); rank++) {
      if (received[rank] != 0) memcpy(to[rank], part, received[rank]);
      part += received[rank];
    }
  });
}

}  // namespace acclimate_comm
