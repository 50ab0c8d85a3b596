"""The commands of language models: ``acclimate generate``, ``bench`` and ``plan``."""
