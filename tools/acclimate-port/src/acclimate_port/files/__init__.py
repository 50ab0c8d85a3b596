"""The files to port: finds, reads and writes them, notebooks too, and ports them in parallel processes."""
