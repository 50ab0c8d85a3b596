"""One decoder step as one call: a description of the decoder, proved against transformers' own model."""
