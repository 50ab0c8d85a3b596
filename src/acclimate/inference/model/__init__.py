"""A loaded model: what it offers its user, and how a split one is saved."""
