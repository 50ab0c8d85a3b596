// Many threads submit to one engine and wait for it, for ThreadSanitizer: each its own requests, and one
// thread all of them. Usage: aio_stress FOLDER WAY, where WAY is an engine's number. Exit status 0 if all
// that is read is what was written, 2 where the machine refuses the engine.
#include <atomic>
#include <cstdio>
#include <string>

#include "engine.h"

using namespace acclimate_aio;

namespace {

constexpr int kThreads = 6, kTurns = 30;
std::atomic<int64_t> last_ticket{0};
std::atomic<int> wrong{0};

int64_t submit(int64_t id, std::vector<char>& memory, int fd, bool writes) {
  auto request = std::make_unique<Request>();
  request->memory = memory.data();
  request->length = static_cast<int64_t>(memory.size());
  request->writes = writes;
  request->fd = request->direct_fd = fd;
  request->alignment = alignment_of(fd);
  if (!request->alignment.direct || memory.size() % 2) request->direct_fd = -1;
  const int64_t ticket = ++last_ticket;
  engines().find(id)->queue().submit(ticket, std::move(request));
  return ticket;
}

Outcome wait(int64_t id, int64_t ticket) {
  Outcome outcome;
  do {
    outcome = engines().find(id)->queue().wait(ticket, std::chrono::milliseconds(5));
  } while (outcome.state == State::kPending);
  return outcome;
}

void work(int64_t id, const std::string& folder, int number) {
  const std::string path = folder + "/" + std::to_string(number);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  for (int turn = 0; turn < kTurns; ++turn) {
    std::vector<char> data(1 + (turn * 7919 + number * 104729) % 200000, static_cast<char>(turn + number));
    std::vector<char> found(data.size());
    const int64_t written = submit(id, data, fd, true);
    if (wait(id, written).error != 0) ++wrong;
    engines().find(id)->queue().forget(written);
    const int64_t read = submit(id, found, fd, false);
    std::vector<char> rest(1 << 20);
    const int64_t failed = submit(id, rest, fd, false);  // ends in the middle: an error among the others
    if (wait(id, failed).error != ENODATA) ++wrong;
    if (wait(id, read).error != 0 || found != data) ++wrong;
    engines().find(id)->queue().forget(read);
    engines().find(id)->queue().forget(failed);
  }
  close(fd);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 3;
  auto engine = std::make_shared<Engine>(65536);
  if (engine->start(static_cast<Way>(std::stoi(arguments[2])), 8, false, 2) != 0) return 2;
  const int64_t id = engines().add(std::move(engine));
  std::atomic<bool> is_done{false};
  std::thread everything([&] {
    while (!is_done) {
      for (int64_t ticket = 1; ticket <= last_ticket; ++ticket) {
        engines().find(id)->queue().wait(ticket, std::chrono::milliseconds(1));
      }
    }
  });
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) threads.emplace_back(work, id, arguments[1], number);
  for (auto& thread : threads) thread.join();
  is_done = true;
  everything.join();
  engines().remove(id)->stop();
  std::printf("%d wrong\n", wrong.load());
  return wrong == 0 ? 0 : 1;
}
