"""``acclimate run``: starts a script's ranks on this host or on many, bound to cores, and looks after them.

Nothing here imports torch on the way to a rank, so that a rank's own start is all that a user waits for.
"""
