"""The code that a port writes: edits of the text, each target's calls, new imports and functions."""
