"""Checks whether an accelerator keeps the promises of the interface, as a command and as a pytest plugin.

Checks observe what a device does: they allocate memory, draw random numbers, queue work and compare results.
An attribute that exists proves nothing. ``docs/conformance.md`` lists the checks.
"""
