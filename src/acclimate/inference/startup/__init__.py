"""Makes a command start fast: imports less of transformers, and keeps its index of models."""
