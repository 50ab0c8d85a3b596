"""Checks of operators on the inputs of torch's own tests, which compare a device with the host."""
