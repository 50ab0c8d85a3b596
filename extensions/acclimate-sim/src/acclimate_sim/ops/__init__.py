"""This accelerator's native ops. As in acclimate, each has a builder, a Python module and native source."""
