// Lets go of pages of mapped files that were read and are not needed soon; they stay in the system's cache.
#pragma once

#include <cstdint>
#include <vector>

namespace acclimate::inference {

// Unmaps what was read, front to back, at the latest when it is destroyed: it no longer counts as this
// process's memory, and is mapped again when it is read. Pages that are not a file's stay, as does what lies
// around them: a page that was written to, of a private mapping, is nowhere else. Which ones are, the kernel
// says in a file that this keeps open.
class FilePages {
 public:
  FilePages();
  ~FilePages();
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  // Says that these bytes, which follow those of the call before, were read.
  void was_read(const uint8_t* from, int64_t bytes);

 private:
  void release(uintptr_t first, uintptr_t last);

  int descriptor_;
  uintptr_t begin_ = 0, end_ = 0;  // read, and not yet unmapped
  std::vector<uint64_t> entries_;
};

}  // namespace acclimate::inference
