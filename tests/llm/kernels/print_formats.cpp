// Prints each weight format as C++ has it: its name, number, bits, offset, columns of a block, bytes of a
// block in a GGUF file, where that has its float16 fields, and the bytes of a group of rows of 300 and 512
// columns.
#include <cstdio>

#include "layout.h"

using namespace acclimate::inference;

int main() {
  const auto print = [](const char* name, WeightFormat format) {
    const Layout layout = layout_of(format);
    std::printf("%s %d %d %d %d %d %d %ld %ld\n", name, static_cast<int>(format), layout.bits, layout.offset,
                layout.columns, layout.gguf_bytes, layout.gguf_halves,
                static_cast<long>(group_bytes(format, 300)), static_cast<long>(group_bytes(format, 512)));
  };
#define WEIGHT_FORMAT(name, ...) print(#name, WeightFormat::name);
#include "formats.def"
}
