// Copies within a rank's memory, and into the memory that other ranks read next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace acclimate_comm {

inline const char* at(const void* memory, size_t offset) { return static_cast<const char*>(memory) + offset; }
inline char* at(void* memory, size_t offset) { return static_cast<char*>(memory) + offset; }

inline void copy(void* to, const void* from, size_t bytes) {
  if (bytes != 0 && to != from) memcpy(to, from, bytes);
}

// Below this size, ordinary stores are faster.
constexpr size_t kLeastStreamedBytes = 4096;

// A later store that publishes the data does not wait for non-temporal stores, so this fence does.
inline void await_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Copies with non-temporal stores, for data that another core reads next. If this returns true, call
// await_streams() next; false means that it used ordinary stores.
inline bool begin_stream(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // which does not see these stores
  constexpr size_t kLine = 64;
  if (bytes >= kLeastStreamedBytes && reinterpret_cast<uintptr_t>(to) % kLine == 0) {
    auto* target = static_cast<char*>(to);
    const auto* source = static_cast<const char*>(from);
    const size_t whole = bytes / kLine * kLine;
    for (size_t line = 0; line < whole; line += kLine) {
      __m128i parts[4];
      for (int i = 0; i < 4; i++) {
        parts[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + line) + i);
      }
      for (int i = 0; i < 4; i++) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(target + line) + i, parts[i]);
      }
    }
    copy(target + whole, source + whole, bytes - whole);
    return true;
  }
#endif
  copy(to, from, bytes);
  return false;
}

inline void stream(void* to, const void* from, size_t bytes) {
  if (begin_stream(to, from, bytes)) await_streams();
}

}  // namespace acclimate_comm
