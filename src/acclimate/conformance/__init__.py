"""Does an accelerator keep every promise of the interface? `acclimate conformance`, and a pytest plugin.

Checks observe what a device does: they allocate, draw, queue, capture and compare, and ask no attribute what
it could look at. One module holds the checks of one category; ``docs/conformance.md`` lists them.
"""
