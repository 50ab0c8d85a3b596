"""The checks, one module a category, and what they observe with."""
