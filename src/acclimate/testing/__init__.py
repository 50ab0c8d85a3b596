"""A project's own tests on any accelerator: a plugin for pytest."""
