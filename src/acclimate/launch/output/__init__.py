"""Tags, shows and logs the ranks' output, and waits for a slow reader."""
