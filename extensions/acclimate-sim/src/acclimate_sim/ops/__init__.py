"""This accelerator's own native ops: a builder, a Python side and native source each, as acclimate's are."""
