"""Makes other libraries work on accelerators that they do not know; one module per library."""
