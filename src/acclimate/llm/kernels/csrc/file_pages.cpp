#include "file_pages.h"

#include <algorithm>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace acclimate::inference {

#if defined(__linux__)

namespace {

// Documentation/admin-guide/mm/pagemap.rst of Linux.
constexpr uint64_t is_of_file = uint64_t{1} << 61, is_swapped = uint64_t{1} << 62,
                   is_present = uint64_t{1} << 63;
constexpr uintptr_t huge_page = uintptr_t{2} << 20;

}  // namespace

FilePages::FilePages() : descriptor_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {}

FilePages::~FilePages() {
  if (descriptor_ >= 0) {
    release(begin_, end_);
    close(descriptor_);
  }
}

void FilePages::was_read(const uint8_t* from, int64_t bytes) {
  if (descriptor_ < 0) {
    return;
  }
  if (reinterpret_cast<uintptr_t>(from) != end_) {
    release(begin_, end_);
    begin_ = reinterpret_cast<uintptr_t>(from);
  }
  end_ = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes);
  // The kernel maps all of a huge page at once, and would again with the next read.
  const uintptr_t whole = end_ / huge_page * huge_page;
  if (whole >= begin_ + huge_page) {
    release(begin_, whole);
    begin_ = whole;
  }
}

void FilePages::release(uintptr_t first, uintptr_t last) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  first = (first + page - 1) / page;
  last = last / page;
  if (first >= last) {
    return;
  }
  entries_.resize(last - first);
  const auto size = static_cast<ssize_t>(entries_.size() * sizeof(uint64_t));
  if (pread(descriptor_, entries_.data(), size, static_cast<off_t>(first * sizeof(uint64_t))) != size) {
    return;
  }
  const bool is_file = std::all_of(entries_.begin(), entries_.end(), [](uint64_t entry) {
    return (entry & is_swapped) == 0 && ((entry & is_present) == 0 || (entry & is_of_file) != 0);
  });
  if (is_file) {
    madvise(reinterpret_cast<void*>(first * page), (last - first) * page, MADV_DONTNEED);
  }
}

#else

FilePages::FilePages() : descriptor_(-1) {}
FilePages::~FilePages() = default;
void FilePages::was_read(const uint8_t*, int64_t) {}
void FilePages::release(uintptr_t, uintptr_t) {}

#endif

}  // namespace acclimate::inference
