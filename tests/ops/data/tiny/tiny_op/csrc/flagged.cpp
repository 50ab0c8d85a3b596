int flagged() { return TINY_FLAG; }
