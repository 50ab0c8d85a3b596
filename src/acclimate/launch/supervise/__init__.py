"""This host's ranks: started under guards, signalled, and ended together."""
