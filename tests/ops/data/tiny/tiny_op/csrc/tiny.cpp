#include <answer.h>

int flagged();

extern "C" __attribute__((visibility("default"))) int tiny_answer() { return ANSWER + flagged() - 7; }
