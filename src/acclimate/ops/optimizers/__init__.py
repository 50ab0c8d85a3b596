"""Native optimizers: a common base, and a module for each."""
