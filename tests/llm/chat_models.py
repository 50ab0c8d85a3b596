"""A tiny model with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_models import save_tiny_model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_chat_model(folder: Path, *, context: int = 4096, end: int = 1, kind: str = "llama") -> Path:
    """Args: end: the end token; one that the vocabulary lacks makes answers endless."""
    save_tiny_model(kind, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
