// One of the two compiled files. Parsing torch's headers takes most of the time, so files that need the same
// headers are compiled together.
#include "devices.cpp"
#include "context.cpp"
#include "streams.cpp"
#include "allocator.cpp"
#include "pinned.cpp"
#include "generator.cpp"
#include "guard.cpp"
#include "metadata.cpp"
