"""Jobs whose ranks restart after a failure and whose hosts may come and go, on torch's elastic agent."""
