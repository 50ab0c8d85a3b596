"""Reads GGUF files: the header, the model's config, its tokenizer and its weights."""
