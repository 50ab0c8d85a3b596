"""Native optimizers: what they share, and one folder for each."""
