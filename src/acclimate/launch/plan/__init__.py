"""What a job runs: hosts, ranks, their environment, and how a job ended; nothing here starts a process."""
