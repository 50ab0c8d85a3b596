"""How the ranks' output is tagged, shown and logged, at the pace of whoever reads it."""
