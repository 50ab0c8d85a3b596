// Unmaps pages of mapped files that were read and are not needed soon; they stay in the system's page cache.
#pragma once

#include <cstdint>
#include <vector>

namespace acclimate::inference {

// Unmaps pages after they were read in ascending order, at the latest in the destructor. They no longer count
// as this process's memory, and are mapped again at the next read. Pages without a file behind them stay
// mapped, with the pages around them: the content of a written page of a private mapping exists nowhere else.
// This object keeps the kernel's pagemap file open, which shows these pages.
class FilePages {
 public:
  FilePages();
  ~FilePages();
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  // Reports that these bytes, which follow those of the previous call, were read.
  void was_read(const uint8_t* from, int64_t bytes);

 private:
  void release(uintptr_t first, uintptr_t last);

  int descriptor_;
  uintptr_t begin_ = 0, end_ = 0;  // read, and not yet unmapped
  std::vector<uint64_t> entries_;
};

}  // namespace acclimate::inference
