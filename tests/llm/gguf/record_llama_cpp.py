"""Records what llama.cpp makes of tiny files, in llama_cpp_tokens.json and llama_cpp_logits.json.

Run it from this folder, with a Python that has llama-cpp-python and gguf (no other package is needed)::

    pip install llama-cpp-python gguf
    python record_llama_cpp.py NAME...

The names are those of the pre-tokenizers to record. Without names, those recorded before are used.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
from number_files import CASES, COMPARED, TOKENS, write_numbers_file
from vocabulary_files import TEXTS, cases, write_vocabulary_file

RECORD = Path(__file__).with_name("llama_cpp_tokens.json")
LOGITS = Path(__file__).with_name("llama_cpp_logits.json")


def read(path: Path) -> tuple[list[list[int]], list[int]]:
    """Returns llama.cpp's tokens of each text, and its end tokens."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp does not load the file of {path.stem!r}")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    tokens = []
    for text in TEXTS:
        content = text.encode()
        buffer = (llama_cpp.llama_token * (2 * len(content) + 16))()
        count = llama_cpp.llama_tokenize(
            vocabulary, content, len(content), buffer, len(buffer), True, True
        )  # with the tokens at the start and the end, and special tokens in the text
        tokens.append(list(buffer[:count]))
    numbers = range(llama_cpp.llama_vocab_n_tokens(vocabulary))
    ends = [number for number in numbers if llama_cpp.llama_vocab_is_eog(vocabulary, number)]
    llama_cpp.llama_model_free(model)
    return tokens, ends


def logits_of(path: Path) -> list[float]:
    """Returns llama.cpp's first logits after the last token, computed in float32."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load the file of {path.stem!r}")
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.type_k, parameters.type_v = (
        64,
        llama_cpp.GGML_TYPE_F32,
        llama_cpp.GGML_TYPE_F32,
    )
    parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama_cpp.llama_init_from_model(model, parameters)
    tokens = (llama_cpp.llama_token * len(TOKENS))(*TOKENS)
    if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, len(TOKENS))):
        raise SystemExit(f"llama.cpp does not compute the file of {path.stem!r}")
    found = [round(value, 5) for value in llama_cpp.llama_get_logits_ith(context, -1)[:COMPARED]]
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return found


def record_logits() -> None:
    """Writes the logits of each case."""
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: logits_of(write_numbers_file(Path(folder) / f"{number}.gguf", name))
            for number, name in enumerate(CASES)
        }
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in found.items()]
    LOGITS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Writes both records; equal lists of tokens once."""
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    record_logits()
    names = sys.argv[1:] or json.loads(RECORD.read_text())["pre_tokenizers"]
    results: list[list[list[int]]] = []
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, keys) in enumerate(cases(names).items()):
            tokens, ends = read(write_vocabulary_file(Path(folder) / f"{number}.gguf", keys))
            if tokens not in results:
                results.append(tokens)
            recorded[name] = [results.index(tokens), ends]
    lines = [
        f'"made by": "record_llama_cpp.py, llama-cpp-python {llama_cpp.__version__}"',
        f'"pre_tokenizers": {json.dumps(names)}',
        '"tokens": [\n' + ",\n".join(json.dumps(result, separators=(",", ":")) for result in results) + "\n]",
        '"cases": {\n'
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in recorded.items())
        + "\n}",
    ]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
