"""What the text of a file says: its tree, the kinds of its values, and the code in it that only CUDA runs."""
