"""Changes the modules of a model so that they work with a rank's shards."""
