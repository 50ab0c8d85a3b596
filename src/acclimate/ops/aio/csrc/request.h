// A read or write of one contiguous range of memory, and how it is divided into requests to the kernel.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <fcntl.h>
#include <unistd.h>

namespace acclimate_aio {

// Whole pages, so that a direct and a buffered write never share a page of the page cache.
constexpr int64_t kPageBytes = 4096;
// The largest piece that uses a bounce buffer, so that large blocks do not need large buffers.
constexpr int64_t kBounceBytes = 1 << 20;
// Linux moves at most 0x7ffff000 bytes in one call.
constexpr int64_t kLargestBlockBytes = 1 << 30;
// Reported if a file ends before the request does; read has no errno for that.
constexpr int kEndOfFile = ENODATA;

inline int64_t round_down(int64_t value, int64_t step) { return value - value % step; }
inline int64_t round_up(int64_t value, int64_t step) { return round_down(value + step - 1, step); }

struct Alignment {
  int64_t memory = kPageBytes;
  int64_t offset = kPageBytes;
  bool direct = true;
};

// A file's alignment for direct I/O. Kernels before 6.1 do not report it; a page then suits every file
// system. If a file system refuses direct I/O with EINVAL, the piece is moved through the page cache.
inline Alignment alignment_of(int fd) {
  constexpr unsigned kDirectAlignment = 0x2000;  // STATX_DIOALIGN, absent from older headers
  alignas(8) unsigned char answer[256] = {};  // struct statx
  Alignment found;
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kDirectAlignment, answer) != 0) return found;
  uint32_t mask, memory, offset;
  std::memcpy(&mask, answer, 4);
  std::memcpy(&memory, answer + 0x98, 4);  // stx_dio_mem_align
  std::memcpy(&offset, answer + 0x9c, 4);  // stx_dio_offset_align
  if (!(mask & kDirectAlignment)) return found;
  if (memory == 0 || offset == 0 || offset > kBounceBytes) {
    found.direct = false;
    return found;
  }
  found.memory = memory;
  found.offset = offset;
  return found;
}

struct Request {
  std::shared_ptr<const void> owner;  // keeps the memory alive until the request is collected
  char* memory;
  int64_t offset;  // in the file
  int64_t length;
  bool writes;
  int fd;  // through the page cache
  int direct_fd;  // past it; -1 if the file has no direct I/O
  Alignment alignment;

  // Guarded by the queue's mutex.
  int64_t cursor = 0;  // bytes taken as pieces
  int64_t outstanding = 0;  // pieces in flight
  int error = 0;
  int64_t error_offset = 0;

  bool is_done() const { return cursor == length && outstanding == 0; }

  void fail(int code, int64_t at) {
    if (error == 0 || at < error_offset) {
      error = code;
      error_offset = at;
    }
    cursor = length;  // pieces that were not started never start
  }
};

// Memory aligned for any device, allocated on first use and kept for the next piece.
class Bounce {
 public:
  char* reserve(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(kPageBytes, round_up(bytes, kPageBytes))));
      size_ = memory_ ? bytes : 0;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

struct Piece {
  Request* request = nullptr;
  int64_t start = 0;  // bytes of the request this piece moves: [start, start + length)
  int64_t length = 0;
  int fd = -1;  // the kernel's request: io_length bytes between address and io_offset of fd
  char* address = nullptr;
  int64_t io_offset = 0;
  int64_t io_length = 0;
  bool bounced = false;
  Bounce bounce;

  char* target() const { return request->memory + start; }
  int64_t file_offset() const { return request->offset + start; }
};

// Cuts the next piece off a request. Called with the queue's mutex held, so it touches no data.
inline void cut(Request& request, int64_t block, Piece& piece) {
  const int64_t position = request.offset + request.cursor;
  const int64_t left = request.length - request.cursor;
  const int64_t unit =
      request.writes ? std::max(request.alignment.offset, kPageBytes) : request.alignment.offset;
  const int64_t past = position % unit;
  const auto is_aligned = [&](int64_t ahead) {
    return (reinterpret_cast<uintptr_t>(request.memory) + request.cursor + ahead) %
               request.alignment.memory ==
           0;
  };
  piece.request = &request;
  piece.start = request.cursor;
  piece.bounced = false;
  piece.fd = request.direct_fd;
  block = std::max(round_down(block, unit), unit);

  if (request.direct_fd < 0) {
    piece.fd = request.fd;
    piece.length = std::min(block, left);
  } else if (past == 0 && left >= unit && is_aligned(0)) {
    piece.length = std::min(block, round_down(left, unit));
  } else if (request.writes && (past != 0 || left < unit)) {
    // Part of a page. Reading the rest and writing the whole page back would undo a neighbouring request's
    // write; the page cache merges the two under the kernel's lock.
    piece.fd = request.fd;
    piece.length = std::min(unit - past, left);
  } else {
    piece.bounced = true;
    const bool aligned_later = past != 0 && is_aligned(unit - past);
    const int64_t end =
        aligned_later ? unit : std::max(round_down(std::min(block, kBounceBytes), unit), unit);
    piece.length = std::min(end - past, request.writes ? round_down(left, unit) : left);
  }
  piece.io_offset = piece.bounced ? round_down(position, unit) : position;
  piece.io_length = piece.bounced ? round_up(position + piece.length, unit) - piece.io_offset : piece.length;
  request.cursor += piece.length;
  ++request.outstanding;
}

// Prepares a piece for the kernel. Without memory for a bounce buffer, move_plainly moves it.
inline bool prepare(Piece& piece) {
  piece.address = piece.target();
  if (!piece.bounced) return true;
  piece.address = piece.bounce.reserve(piece.io_length);
  if (piece.address == nullptr) return false;
  if (piece.request->writes) std::memcpy(piece.address, piece.target(), piece.length);
  return true;
}

// Moves the rest of a piece, after `moved` bytes, through the page cache; returns 0 or an errno.
inline int move_plainly(const Piece& piece, int64_t& moved) {
  while (moved < piece.length) {
    char* const memory = piece.target() + moved;
    const int64_t left = piece.length - moved, at = piece.file_offset() + moved;
    const ssize_t count = piece.request->writes ? pwrite(piece.request->fd, memory, left, at)
                                                : pread(piece.request->fd, memory, left, at);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    if (count == 0) return piece.request->writes ? EIO : kEndOfFile;
    moved += count;
  }
  return 0;
}

// Handles the kernel's result (a count, or a negative errno): copies from the bounce buffer, moves the rest
// of a short transfer, and returns 0 or an errno. `moved` is the number of bytes moved.
inline int settle(const Piece& piece, int64_t answer, int64_t& moved) {
  moved = 0;
  if (answer > 0) {
    const int64_t skipped = piece.bounced ? piece.file_offset() - piece.io_offset : 0;
    moved = std::clamp<int64_t>(answer - skipped, 0, piece.length);
    if (piece.bounced && !piece.request->writes) std::memcpy(piece.target(), piece.address + skipped, moved);
  }
  if (moved == piece.length) return 0;
  // With these errors the kernel refuses the method, not the transfer itself.
  const bool refused = answer == -EINVAL || answer == -EOPNOTSUPP || answer == -EAGAIN || answer == -EINTR ||
                       answer == -ENOMEM;
  if (answer < 0 && !refused) return static_cast<int>(-answer);
  return move_plainly(piece, moved);
}

}  // namespace acclimate_aio
