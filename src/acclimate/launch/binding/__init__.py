"""Which cores and memory nodes each rank gets, how it is bound to them, and the diagram of that."""
