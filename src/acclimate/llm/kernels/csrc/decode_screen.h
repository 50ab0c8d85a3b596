// Rules out most rows of an output head before they are read: its coarse copy gives an upper bound of each
// logit, and only rows that can have the largest one are computed.
//
// For a row w of a dense head, its coarse copy v, an input x and its rounded form z, the product w x differs
// from v z by at most |w| |x - z| + |w - v| |z|. The copy takes 6 bits for each value: codes of 5 bits, and
// scales.
//
// A head in int5 is multiplied by z itself. Its copy lacks the last bit of each code, so that 4.5 bits of 5.5
// remain for each value. A product is largest if the missing bit is set wherever z is positive.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "file_pages.h"
#include "linear.h"

namespace acclimate::inference::decode {

class Screen {
 public:
  // Whether a head is worth a coarse copy: it is dense or in int5, and too large for the caches.
  static bool suits(const Weight& head);

  // Throws std::bad_alloc.
  explicit Screen(const Weight& head);

  // Makes the copy of a thread's share of the rows; call it in each of `threads` threads.
  void fill(int thread, int threads);

  // Whether a thread's share of the rows has not changed since the copy was made.
  bool is_current(int thread, int threads) const;

  // The same for the tiles that begin within some rows, which were just read.
  bool is_current(FilePages& pages, int64_t first_row, int64_t last_row) const;

  const Weight& coarse() const { return coarse_; }

  // The input to multiply by the coarse copy, for which margin() holds. `starts` keeps a part of it.
  Input with_starts(Input rounded, std::vector<int32_t>& starts) const;

  // The norms of an input and of its rounding error; both are 0 for an input that cannot be used.
  struct Lengths {
    float rounded, error;
  };
  static Lengths lengths_of(const float* x, const Input& rounded, int64_t row);

  // An upper bound of the difference between the exact and the approximate product of a row of a group.
  float margin(int64_t group, Lengths lengths) const {
    return errors_[group] * lengths.rounded + norms_[group] * lengths.error + 1e-30f;
  }

 private:
  void fill_group(int64_t group, std::vector<uint32_t>& memory);
  void cut_group(int64_t group);
  uint64_t checksum(int64_t tile) const;
  static uint64_t checksum(const uint8_t* from, int64_t rows, int64_t stride, int64_t bytes);
  void was_read(FilePages& pages, int64_t first, int64_t last) const;

  struct Free {
    void operator()(uint8_t* memory) const;
  };

  Weight head_, coarse_;
  std::unique_ptr<uint8_t, Free> memory_;
  std::vector<float> errors_, norms_;  // the largest of each group
  std::vector<uint64_t> checksums_;  // of each tile of rows
};

}  // namespace acclimate::inference::decode
