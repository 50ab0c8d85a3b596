"""Native optimizers: a common base, and a folder for each."""
