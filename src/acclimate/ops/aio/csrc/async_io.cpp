// The operators acclimate::aio_*: engines that move bytes between files and memory. Python opens the files
// and turns what comes back into exceptions; nothing here throws to Python or ends the process.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "engine.h"

namespace acclimate_aio {

static int64_t aio_start(int64_t way, int64_t block_bytes, int64_t depth, bool single_submit,
                         int64_t workers) {
  auto engine = std::make_shared<Engine>(block_bytes);
  const auto clamped = static_cast<unsigned>(std::clamp<int64_t>(depth, 1, kLargestDepth));
  const int error = engine->start(static_cast<Way>(way), clamped, single_submit,
                                  static_cast<unsigned>(std::max<int64_t>(workers, 1)));
  return error != 0 ? -error : engines().add(std::move(engine));
}

// Most file systems serialise direct writes that extend a file. Reserving the space first lets them run in
// parallel, and fails at once if the disk is full.
static int reserve_room(const Request& request) {
  struct stat status;
  if (fstat(request.fd, &status) != 0 || !S_ISREG(status.st_mode)) return 0;
  if (request.offset + request.length <= status.st_size) return 0;
  if (fallocate(request.fd, 0, request.offset, request.length) == 0) return 0;
  return errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? errno : 0;
}

static int64_t aio_submit(int64_t id, int64_t ticket, torch::stable::Tensor buffer, int64_t length,
                          int64_t fd, int64_t direct_fd, int64_t offset, bool writes) {
  const auto engine = engines().find(id);
  if (engine == nullptr) return -EBADF;
  auto request = std::make_unique<Request>();
  request->memory = static_cast<char*>(buffer.data_ptr());
  request->owner = std::make_shared<torch::stable::Tensor>(std::move(buffer));
  request->offset = offset;
  request->length = length;
  request->writes = writes;
  request->fd = static_cast<int>(fd);
  request->direct_fd = static_cast<int>(direct_fd);
  if (direct_fd >= 0) {
    request->alignment = alignment_of(request->direct_fd);
    if (!request->alignment.direct) request->direct_fd = -1;
  }
  if (writes && request->direct_fd >= 0 && length > kPageBytes) {
    if (const int error = reserve_room(*request); error != 0) request->fail(error, offset);
  }
  return engine->queue().submit(ticket, std::move(request)) ? 0 : -EEXIST;
}

static std::tuple<int64_t, int64_t, int64_t> aio_wait(int64_t id, int64_t ticket, int64_t timeout_ms) {
  const auto engine = engines().find(id);
  if (engine == nullptr) return {static_cast<int64_t>(State::kUnknown), EBADF, 0};
  const Outcome outcome = engine->queue().wait(ticket, std::chrono::milliseconds(timeout_ms));
  return {static_cast<int64_t>(outcome.state), outcome.error, outcome.offset};
}

static void aio_forget(int64_t id, int64_t ticket) {
  if (const auto engine = engines().find(id)) engine->queue().forget(ticket);
}

static void aio_stop(int64_t id) {
  if (const auto engine = engines().remove(id)) engine->stop();
}

// A forked child has no workers, so joining them would never return; their memory is leaked instead.
static void aio_abandon(int64_t id) {
  if (auto engine = engines().remove(id)) {
    engine->abandon();
    new std::shared_ptr<Engine>(std::move(engine));
  }
}

}  // namespace acclimate_aio

// No key of a device: five of the six take no tensor.
STABLE_TORCH_LIBRARY_IMPL(acclimate, CompositeExplicitAutograd, m) {
  m.impl("aio_start", TORCH_BOX(&acclimate_aio::aio_start));
  m.impl("aio_submit", TORCH_BOX(&acclimate_aio::aio_submit));
  m.impl("aio_wait", TORCH_BOX(&acclimate_aio::aio_wait));
  m.impl("aio_forget", TORCH_BOX(&acclimate_aio::aio_forget));
  m.impl("aio_stop", TORCH_BOX(&acclimate_aio::aio_stop));
  m.impl("aio_abandon", TORCH_BOX(&acclimate_aio::aio_abandon));
}
