"""Copies the keys that describe a tokenizer from a GGUF file to a small one without tensors.

transformers decodes every text of a GGUF file to read its tokenizer, and fails at a description in another
encoding than UTF-8. It also opens the file by a path, which may name another file meanwhile.
"""

from __future__ import annotations

import struct
from pathlib import Path

from acclimate.inference.gguf.header import GGUF_MAGIC, GGUFHeader, is_text


def write_keys_only(header: GGUFHeader, target: Path) -> None:
    """Writes the keys of the architecture and of the tokenizer, except texts that are not UTF-8."""
    prefixes = ("general.architecture", f"{header.architecture}.", "tokenizer.")
    entries = [
        header.file.read(entry.end - entry.start, entry.start)
        for key, entry in header.metadata.items()
        if key.startswith(prefixes) and is_text(key) and is_text(entry.value)
    ]
    with target.open("wb") as file:
        file.write(GGUF_MAGIC + struct.pack("<IQQ", header.version, 0, len(entries)))
        for entry in entries:
            file.write(entry)
        file.write(bytes(64))  # the reader looks for data at the next multiple of 32 bytes
