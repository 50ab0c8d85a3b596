"""Jobs whose ranks restart after a failure and whose hosts join and leave, on torch's elastic agent."""
