"""`acclimate info`: this machine's accelerator and devices."""
