"""Tags, shows and logs the ranks' output, as fast as its reader reads."""
