"""An op without torch's headers, which compiles in a tenth of a second."""
