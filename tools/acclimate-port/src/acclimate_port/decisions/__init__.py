"""Which edits of a file are made: those that depend on each other are made together or not at all."""
