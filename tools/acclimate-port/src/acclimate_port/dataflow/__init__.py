"""What a value is, and where it goes: devices, indices, literals and classes, followed through a file."""
