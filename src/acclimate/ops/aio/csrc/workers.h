// Three methods of moving pieces: io_uring and Linux AIO, both by system call, and plain calls.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include <linux/aio_abi.h>
#include <sys/mman.h>
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#include "queue.h"

namespace acclimate_aio {

// Slots for pieces in flight, and which of them are free.
class Slots {
 public:
  explicit Slots(unsigned depth) : pieces_(depth) {
    for (unsigned slot = depth; slot-- > 0;) free_.push_back(slot);
  }
  Piece& operator[](unsigned slot) { return pieces_[slot]; }
  bool has_free() const { return !free_.empty(); }
  bool is_idle() const { return free_.size() == pieces_.size(); }
  unsigned next() const { return free_.back(); }
  void use() { free_.pop_back(); }
  void give_back(unsigned slot) { free_.push_back(slot); }

 private:
  std::vector<Piece> pieces_;
  std::vector<unsigned> free_;
};

inline void pause_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// -- plain calls -------------------------------------------------------------------------------------

class PlainWorker final : public Worker {
 public:
  void run(Queue& queue) override {
    Piece piece;
    while (queue.take(piece, /*may_block=*/true)) {
      const ssize_t count = piece.request->writes
                                ? pwrite(piece.fd, piece.address, piece.io_length, piece.io_offset)
                                : pread(piece.fd, piece.address, piece.io_length, piece.io_offset);
      queue.complete(piece, count < 0 ? -errno : count);
    }
  }
};

// -- Linux AIO ---------------------------------------------------------------------------------------

class LinuxAioWorker final : public Worker {
 public:
  LinuxAioWorker(unsigned depth, bool single_submit) : depth_(depth), single_submit_(single_submit) {}

  ~LinuxAioWorker() override {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
  }

  // 0, or the errno with which the kernel refuses.
  int open() { return syscall(SYS_io_setup, depth_, &context_) == 0 ? 0 : errno; }

  // A child does not inherit its parent's context, so there is nothing to destroy.
  void abandon() override { context_ = 0; }

  void run(Queue& queue) override {
    Slots slots(depth_);
    std::vector<iocb> controls(depth_);
    std::vector<io_event> events(depth_);
    std::vector<iocb*> prepared;
    for (;;) {
      while (slots.has_free() && queue.take(slots[slots.next()], slots.is_idle())) {
        const unsigned slot = slots.next();
        slots.use();
        prepared.push_back(ask(controls[slot], slots[slot], slot));
        if (single_submit_) submit(queue, slots, prepared);
      }
      if (slots.is_idle()) return;
      submit(queue, slots, prepared);
      if (slots.is_idle()) continue;
      const long count =
          syscall(SYS_io_getevents, context_, 1L, static_cast<long>(depth_), events.data(), nullptr);
      if (count < 0 && errno != EINTR) pause_briefly();
      for (long index = 0; index < count; ++index) {
        const auto slot = static_cast<unsigned>(events[index].data);
        queue.complete(slots[slot], events[index].res);
        slots.give_back(slot);
      }
    }
  }

 private:
  static iocb* ask(iocb& control, const Piece& piece, unsigned slot) {
    control = {};
    control.aio_data = slot;
    control.aio_lio_opcode = piece.request->writes ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    control.aio_fildes = static_cast<unsigned>(piece.fd);
    control.aio_buf = reinterpret_cast<uint64_t>(piece.address);
    control.aio_nbytes = static_cast<uint64_t>(piece.io_length);
    control.aio_offset = piece.io_offset;
    return &control;
  }

  // Submits all prepared pieces. A piece that the kernel refuses is completed with its errno at once.
  void submit(Queue& queue, Slots& slots, std::vector<iocb*>& prepared) {
    size_t first = 0;
    while (first < prepared.size()) {
      const long count = syscall(SYS_io_submit, context_, static_cast<long>(prepared.size() - first),
                                 prepared.data() + first);
      if (count > 0) {
        first += static_cast<size_t>(count);
      } else if (count == 0 || errno != EINTR) {
        const auto slot = static_cast<unsigned>(prepared[first++]->aio_data);
        queue.complete(slots[slot], count == 0 ? -EAGAIN : -errno);
        slots.give_back(slot);
      }
    }
    prepared.clear();
  }

  const unsigned depth_;
  const bool single_submit_;
  aio_context_t context_ = 0;
};

// -- io_uring ----------------------------------------------------------------------------------------

#if defined(IORING_FEAT_RW_CUR_POS)

// Linux uses these numbers on all architectures; older C libraries lack the names.
constexpr long kRingSetup = 425;
constexpr long kRingEnter = 426;

class RingWorker final : public Worker {
 public:
  RingWorker(unsigned depth, bool single_submit) : depth_(depth), single_submit_(single_submit) {}

  ~RingWorker() override {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (ring_ != nullptr) munmap(ring_, ring_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  // 0, or the errno with which the kernel refuses.
  int open() {
    io_uring_params params = {};
    fd_ = static_cast<int>(syscall(kRingSetup, depth_, &params));
    if (fd_ < 0) return errno;
    // Linux 5.6 was the first with plain reads and writes; it also maps both rings at once.
    if (!(params.features & IORING_FEAT_RW_CUR_POS)) return ENOSYS;
    const size_t submissions = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t completions = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    ring_bytes_ = std::max(submissions, completions);
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    ring_ = static_cast<char*>(map(ring_bytes_, IORING_OFF_SQ_RING));
    entries_ = static_cast<io_uring_sqe*>(map(entries_bytes_, IORING_OFF_SQES));
    if (ring_ == nullptr || entries_ == nullptr) return ENOMEM;
    submission_tail_ = at<std::atomic<unsigned>>(params.sq_off.tail);
    submission_mask_ = *at<unsigned>(params.sq_off.ring_mask);
    submission_slots_ = at<unsigned>(params.sq_off.array);
    completion_head_ = at<std::atomic<unsigned>>(params.cq_off.head);
    completion_tail_ = at<std::atomic<unsigned>>(params.cq_off.tail);
    completion_mask_ = *at<unsigned>(params.cq_off.ring_mask);
    completions_ = at<io_uring_cqe>(params.cq_off.cqes);
    return 0;
  }

  void abandon() override {
    close(fd_);
    fd_ = -1;
  }

  void run(Queue& queue) override {
    Slots slots(depth_);
    unsigned unsubmitted = 0;
    for (;;) {
      while (slots.has_free() && queue.take(slots[slots.next()], slots.is_idle())) {
        const unsigned slot = slots.next();
        slots.use();
        ask(slots[slot], slot);
        ++unsubmitted;
        if (single_submit_) unsubmitted -= enter(unsubmitted, 0);
      }
      if (slots.is_idle()) return;
      unsubmitted -= enter(unsubmitted, 1);
      unsigned head = completion_head_->load(std::memory_order_relaxed);
      const unsigned tail = completion_tail_->load(std::memory_order_acquire);
      for (; head != tail; ++head) {
        const io_uring_cqe& entry = completions_[head & completion_mask_];
        const auto slot = static_cast<unsigned>(entry.user_data);
        queue.complete(slots[slot], entry.res);
        slots.give_back(slot);
      }
      completion_head_->store(head, std::memory_order_release);
    }
  }

 private:
  template <typename T>
  T* at(unsigned offset) const {
    return reinterpret_cast<T*>(ring_ + offset);
  }

  void* map(size_t bytes, uint64_t offset) const {
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
                              static_cast<off_t>(offset));
    return memory == MAP_FAILED ? nullptr : memory;
  }

  void ask(const Piece& piece, unsigned slot) {
    const unsigned tail = submission_tail_->load(std::memory_order_relaxed);
    const unsigned index = tail & submission_mask_;
    io_uring_sqe& entry = entries_[index];
    std::memset(&entry, 0, sizeof(entry));
    entry.opcode = piece.request->writes ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = piece.fd;
    entry.addr = reinterpret_cast<uint64_t>(piece.address);
    entry.len = static_cast<uint32_t>(piece.io_length);
    entry.off = static_cast<uint64_t>(piece.io_offset);
    entry.user_data = slot;
    submission_slots_[index] = index;
    submission_tail_->store(tail + 1, std::memory_order_release);
  }

  // Returns how many entries the kernel took.
  unsigned enter(unsigned unsubmitted, unsigned wanted) const {
    const long taken =
        syscall(kRingEnter, fd_, unsubmitted, wanted, wanted ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
    if (taken >= 0) return static_cast<unsigned>(taken);
    if (errno != EINTR) pause_briefly();  // EAGAIN, EBUSY: the kernel is short of memory
    return 0;
  }

  const unsigned depth_;
  const bool single_submit_;
  int fd_ = -1;
  char* ring_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  size_t ring_bytes_ = 0, entries_bytes_ = 0;
  std::atomic<unsigned>* submission_tail_ = nullptr;
  std::atomic<unsigned>* completion_head_ = nullptr;
  std::atomic<unsigned>* completion_tail_ = nullptr;
  unsigned submission_mask_ = 0, completion_mask_ = 0;
  unsigned* submission_slots_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
};

#endif

}  // namespace acclimate_aio
