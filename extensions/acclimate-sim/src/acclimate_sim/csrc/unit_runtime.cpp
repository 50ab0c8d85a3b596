// One of the two files that the compiler is given. Reading torch's headers takes most of a compilation, so
// the parts that need the same ones are compiled together.
#include "devices.cpp"
#include "streams.cpp"
#include "allocator.cpp"
#include "pinned.cpp"
#include "generator.cpp"
#include "guard.cpp"
#include "metadata.cpp"
