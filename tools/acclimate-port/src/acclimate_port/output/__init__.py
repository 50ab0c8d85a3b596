"""What the command prints and writes: diff, text, JSON, SARIF, GitHub annotations, and an HTML page."""
