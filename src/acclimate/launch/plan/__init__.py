"""Describes a job: hosts, ranks, their environment, and its outcome. Starts no process."""
