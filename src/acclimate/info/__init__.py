"""What this machine has: `acclimate info`."""
