"""The checks, one package for each category, and the functions that they share."""
