"""Other libraries on an accelerator that they have no name for: one module a library."""
