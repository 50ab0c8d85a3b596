"""The ranks of this host: started under guards, signalled, and ended together."""
