"""Damaged model files, each made from a good one and a seed: the same seed always gives the same damage."""

from __future__ import annotations

import copy
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

INTEGERS = (0, 1, 2, 3, 7, 64, 255, 1000, 65_536, 10**5, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 16, 33, 1000, 10**5, 10**6, 10**9, 2**31, 2**63, 10**30),
    *(0.5, -0.0, 1e-45, 1e300, float("nan"), float("inf"), "", "x", "llama", "gpt2", "\x00", "a" * 5000),
    *(
        [],
        [1],
        [[]],
        ["x"],
        [None],
        {},
        {"a": 1},
        {"rope_type": "yarn"},
        {"rope_type": "linear", "factor": 0},
    ),
)
FIELDS = (
    *(
        "num_labels",
        "layer_types",
        "sliding_window",
        "quantization_config",
        "architectures",
        "tie_word_embeddings",
    ),
    *(
        "torch_dtype",
        "dtype",
        "attn_implementation",
        "auto_map",
        "transformers_weights",
        "text_config",
        "id2label",
    ),
    *(
        "pad_token_id",
        "is_encoder_decoder",
        "use_cache",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
    ),
    *("vocab_file", "tokenizer_class", "added_tokens_decoder", "model_max_length", "extra_special_tokens"),
    *("num_beams", "max_length", "cache_implementation", "guidance_scale", "watermarking_config", "top_k"),
    *("stop_strings", "forced_eos_token_id", "max_time", "assistant_model", "bad_words_ids", "typical_p"),
)
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class Case:
    """One damaged model."""

    seed: int
    kind: str
    path: Path
    damage: str


def make_case(seed: int, good: dict[str, Path], target: Path) -> Case:
    """Damages a copy of one of the good files; ``target`` is an empty folder."""
    source = random.Random(seed)
    (kind,) = source.choices(list(WEIGHTS), list(WEIGHTS.values()))
    path, steps = target, []
    if kind == "gguf":
        path, steps = _gguf(source, good[source.choice([name for name in good if "gguf" in name])], target)
    else:
        shutil.copytree(good[source.choice(["folder", "shards"])], target, dirs_exist_ok=True)
        for _ in range(source.choice([1, 1, 1, 2, 3])):
            try:
                steps.append(DAMAGES[kind](source, target))
            except (TypeError, ValueError, AttributeError, LookupError):  # what was damaged before
                steps.append("no more could be damaged")
    return Case(seed, kind, path, "; ".join(steps))


# -- bytes -----------------------------------------------------------------------------------------------


def _damage_bytes(source: random.Random, content: bytes, within: int | None = None) -> tuple[bytes, str]:
    damaged = bytearray(content)
    end = min(within or len(damaged), len(damaged)) or 1
    how = source.choice(["flip", "cut", "insert", "repeat", "zero", "empty", "page", "number"])
    at = source.randrange(end)
    if how == "flip" and damaged:
        for _ in range(source.randint(1, 8)):
            damaged[source.randrange(min(end, len(damaged)))] = source.randrange(256)
    elif how == "cut":
        del damaged[at:]
    elif how == "insert":
        damaged[at:at] = source.randbytes(source.randint(1, 64))
    elif how == "repeat":
        damaged[at:at] = damaged[at : at + source.randint(1, 200)]
    elif how == "zero":
        damaged[at : at + 64] = bytes(len(damaged[at : at + 64]))
    elif how == "empty":
        damaged.clear()
    elif how == "page":
        damaged = bytearray(b"<html>404</html>")
    else:
        damaged[at : at + 8] = struct.pack("<Q", source.choice(INTEGERS))
    return bytes(damaged), f"{how} at {at}"


# -- GGUF ------------------------------------------------------------------------------------------------


@dataclass
class _Gguf:
    version: int
    keys: list[list[Any]]  # name, type, value or (element type, values)
    tensors: list[list[Any]]  # name, sizes, type, offset
    data: bytes
    counts: list[int]
    alignment: int = 32


def _parse(content: bytes) -> _Gguf:
    version, tensor_count, key_count = struct.unpack_from("<IQQ", content, 4)
    at = 24

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, content, at)
        at += struct.calcsize("<" + form)
        return value

    def text() -> bytes:
        nonlocal at
        size = take("Q")
        at += size
        return content[at - size : at]

    keys = []
    for _ in range(key_count):
        name, kind = text(), take("I")
        value: Any
        if kind == 9:
            element, count = take("I"), take("Q")
            value = [element, [text() if element == 8 else take(FORMATS[element]) for _ in range(count)]]
        else:
            value = text() if kind == 8 else take(FORMATS[kind])
        keys.append([name, kind, value])
    tensors = []
    for _ in range(tensor_count):
        name = text()
        sizes = [take("Q") for _ in range(take("I"))]
        tensors.append([name, sizes, take("I"), take("Q")])
    return _Gguf(version, keys, tensors, content[-(-at // 32) * 32 :], [tensor_count, key_count])


def _write(model: _Gguf) -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def scalar(kind: int, value: Any) -> bytes:
        if kind == 8:
            return text(value if isinstance(value, bytes) else str(value).encode())
        if kind not in FORMATS:
            return struct.pack("<Q", 1 << 40)
        form = FORMATS[kind]
        if form in "fd":
            return struct.pack("<" + form, np.float32(value) if isinstance(value, (int, float)) else 1.0)
        number = int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 1e30 else 1
        return (number % 256 ** struct.calcsize("<" + form)).to_bytes(struct.calcsize("<" + form), "little")

    out = [b"GGUF", struct.pack("<IQQ", model.version, *(count % (1 << 64) for count in model.counts))]
    for name, kind, value in model.keys:
        out += [text(name), struct.pack("<I", kind)]
        if kind == 9:
            element, values = value if isinstance(value, list) else (4, [1])
            out.append(struct.pack("<IQ", element, len(values)))
            out += [scalar(element, item) for item in values]
        else:
            out.append(scalar(kind, 1 if isinstance(value, list) else value))
    for name, sizes, kind, offset in model.tensors:
        out += [text(name), struct.pack("<I", len(sizes))]
        out += [struct.pack("<Q", size % (1 << 64)) for size in sizes]
        out.append(struct.pack("<IQ", kind % (1 << 32), offset % (1 << 64)))
    head = b"".join(out)
    return head + bytes(-len(head) % model.alignment) + model.data


def _gguf(source: random.Random, good: Path, target: Path) -> tuple[Path, list[str]]:
    content, steps, path = good.read_bytes(), [], target / "model.gguf"
    if source.random() < 0.3:
        content, step = _damage_bytes(source, content, within=source.choice([32, 2000, 12_000, None]))
        path.write_bytes(content)
        return path, [f"{good.name}: {step}"]
    model = _parse(content)
    for _ in range(source.choice([1, 1, 1, 2, 3])):
        steps.append(_damage_gguf(source, model))
    path.write_bytes(_write(model))
    return path, [good.name, *steps]


def _damage_gguf(source: random.Random, model: _Gguf) -> str:
    # Mostly of the architecture's keys: most of the others are the vocabulary's.
    own = [key for key in model.keys if not key[0].startswith((b"tokenizer.", b"general."))]
    key = source.choice(own if own and source.random() < 0.6 else model.keys)
    tensor = source.choice(model.tensors)
    how = source.choice(list(_GGUF_DAMAGES))
    return f"{how} {_GGUF_DAMAGES[how](source, model, key, tensor)}"


def _key_value(source: random.Random, _model: _Gguf, key: list[Any], _tensor: list[Any]) -> str:
    if isinstance(key[2], list):
        values = key[2][1]
        if values and source.random() < 0.7:
            at = source.randrange(len(values))
            values[at] = (
                source.choice([b"", b"\xff\xfe", b"a" * 3000, b"<s>", values[0]]) if key[2][0] == 8 else 2**31
            )
        else:
            del values[source.randrange(len(values) + 1) :]
    elif isinstance(key[2], bytes):
        key[2] = source.choice(
            [b"", b"\xff", b"llama", b"gpt2", b"x" * 500, b"bert", b"default", key[2] + b"x"]
        )
    else:
        key[2] = source.choice(
            [*INTEGERS, float("nan"), float("inf"), -1, -0.5, 1e-30, 1e30, key[2] + 1, key[2] * 2]
        )
    return f"{key[0]!r} = {str(key[2])[:40]}"


def _key_type(source: random.Random, _model: _Gguf, key: list[Any], _tensor: list[Any]) -> str:
    key[1] = source.choice([*range(13), 13, 99, 2**32 - 1])
    if key[1] == 9 and not isinstance(key[2], list):
        key[2] = [source.choice([0, 4, 6, 8, 9, 50]), [1] * source.choice([0, 1, 2, 5])]
    return f"{key[0]!r} is of {key[1]}"


def _drop_key(_source: random.Random, model: _Gguf, key: list[Any], _tensor: list[Any]) -> str:
    model.keys.remove(key)
    model.counts[1] -= 1
    return repr(key[0])


def _repeat_key(source: random.Random, model: _Gguf, key: list[Any], _tensor: list[Any]) -> str:
    model.keys.insert(source.randrange(len(model.keys)), copy.deepcopy(key))
    model.counts[1] += 1
    return repr(key[0])


def _rename_key(source: random.Random, _model: _Gguf, key: list[Any], _tensor: list[Any]) -> str:
    before = key[0]
    endings = (
        b"rope.scaling.type",
        b"attention.causal",
        b"logit_scale",
        b"expert_count",
        b"nextn_predict_layers",
    )
    key[0] = source.choice(
        [b"", b"x", b"\xff", before + b"x", before.split(b".")[0] + b"." + source.choice(endings)]
    )
    return f"{before!r} to {key[0]!r}"


def _count(source: random.Random, model: _Gguf, _key: list[Any], _tensor: list[Any]) -> str:
    which = source.randrange(2)
    model.counts[which] = source.choice([*INTEGERS, model.counts[which] + 1, model.counts[which] - 1])
    return f"{which} = {model.counts[which]}"


def _drop_tensor(_source: random.Random, model: _Gguf, _key: list[Any], tensor: list[Any]) -> str:
    model.tensors.remove(tensor)
    model.counts[0] -= 1
    return repr(tensor[0])


def _repeat_tensor(source: random.Random, model: _Gguf, _key: list[Any], tensor: list[Any]) -> str:
    again = copy.deepcopy(tensor)
    if source.random() < 0.5:
        again[0] = source.choice(
            [b"blk.7.attn_q.weight", b"output.weight", b"rope_freqs.weight", b"x", b"blk.x"]
        )
    model.tensors.append(again)
    model.counts[0] += 1
    return repr(again[0])


def _rename_tensor(source: random.Random, model: _Gguf, _key: list[Any], tensor: list[Any]) -> str:
    before, other = tensor[0], source.choice(model.tensors)
    tensor[0] = source.choice(
        [other[0], before + b"x", b"", b"\xff", before.replace(b"blk.1", b"blk.99999999")]
    )
    return f"{before!r} to {tensor[0]!r}"


def _swap_tensors(source: random.Random, model: _Gguf, _key: list[Any], tensor: list[Any]) -> str:
    other = source.choice(model.tensors)
    tensor[3], other[3] = other[3], tensor[3]
    return f"{tensor[0]!r} and {other[0]!r}"


def _shape(source: random.Random, _model: _Gguf, _key: list[Any], tensor: list[Any]) -> str:
    sizes = tensor[1]
    how = source.randrange(5)
    if how == 0:
        sizes.reverse()
    elif how == 1:
        sizes.append(source.choice([0, 1, 2]))
    elif how == 2 and sizes:
        sizes.pop()
    elif sizes:
        at = source.randrange(len(sizes))
        sizes[at] = source.choice([*INTEGERS, sizes[at] * 2, sizes[at] // 2, sizes[at] - 1])
    return f"{tensor[0]!r} {sizes}"


def _tensor_type(source: random.Random, _model: _Gguf, _key: list[Any], tensor: list[Any]) -> str:
    tensor[2] = source.choice([*range(42), 99, 2**32 - 1])
    return f"{tensor[0]!r} is of {tensor[2]}"


def _offset(source: random.Random, model: _Gguf, _key: list[Any], tensor: list[Any]) -> str:
    others = [other[3] for other in model.tensors]
    tensor[3] = source.choice(
        [*INTEGERS, *others[:4], tensor[3] + 32, tensor[3] + 1, len(model.data), 2**64 - 32]
    )
    return f"{tensor[0]!r} at {tensor[3]}"


def _data(source: random.Random, model: _Gguf, _key: list[Any], _tensor: list[Any]) -> str:
    model.data = source.choice(
        [model.data[:-1], model.data[:-4096], model.data + bytes(64), b"", model.data[32:]]
    )
    return f"{len(model.data)} bytes"


_GGUF_DAMAGES: dict[str, Callable[[random.Random, _Gguf, list[Any], list[Any]], str]] = {
    "value": _key_value,
    "value again": _key_value,
    "type": _key_type,
    "drop": _drop_key,
    "repeat": _repeat_key,
    "rename": _rename_key,
    "count": _count,
    "drop tensor": _drop_tensor,
    "repeat tensor": _repeat_tensor,
    "rename tensor": _rename_tensor,
    "swap": _swap_tensors,
    "shape": _shape,
    "tensor type": _tensor_type,
    "offset": _offset,
    "data": _data,
}


# -- safetensors, JSON and pickles -------------------------------------------------------------------------


def _safetensors(source: random.Random, folder: Path) -> str:
    path = source.choice(sorted(folder.glob("*.safetensors")))
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    if source.random() < 0.3 or not 0 < size < len(content):
        content, step = _damage_bytes(source, content, within=source.choice([16, size + 8, None]))
        path.write_bytes(content)
        return f"{path.name}: {step}"
    try:
        header = json.loads(content[8 : 8 + size])
    except ValueError:
        return "nothing"
    data, text, step = content[8 + size :], None, ""
    name = source.choice([name for name in header if name != "__metadata__"] or ["x"])
    entry = header.get(name)
    how = source.choice(
        ["dtype", "shape", "offsets", "drop", "rename", "field", "twice", "length", "metadata", "swap"]
    )
    if not isinstance(entry, dict):
        how = "metadata"
    if how == "dtype":
        entry["dtype"] = source.choice(
            ["F16", "BF16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "C64", "X", "", 5, None]
        )
    elif how == "shape":
        shape = entry.get("shape", [])
        entry["shape"] = source.choice(
            [shape[::-1], [*shape, 1], shape[:1], [], [0], [2**40, 2**40], [-1], "x", [1.5]]
        )
    elif how == "offsets":
        start, end = (entry.get("data_offsets") or [0, 0])[:2]
        choices: list[Any] = [
            [end, start],
            [start, end + 4],
            [start - 4, end],
            [0, end],
            [2**63, 2**64],
            [1],
            "x",
            None,
        ]
        entry["data_offsets"] = source.choice(choices)
    elif how == "drop":
        del header[name]
    elif how == "rename":
        header[source.choice(["x", "", "lm_head.weight", name + ".x", name.replace("1", "9")])] = header.pop(
            name
        )
    elif how == "field":
        entry[source.choice(["dtype", "shape", "data_offsets", "more"])] = source.choice(JSON_VALUES)
    elif how == "twice":
        text = json.dumps(header)[:-1] + f', "{name}": ' + json.dumps(entry) + "}"
    elif how == "metadata":
        header["__metadata__"] = source.choice(JSON_VALUES)
    elif how == "swap":
        other = source.choice(list(header))
        header[name], header[other] = header[other], header[name]
    encoded = (text if text is not None else json.dumps(header)).encode()
    length = source.choice([*INTEGERS, len(encoded) + 1]) if how == "length" else len(encoded)
    path.write_bytes((length % 2**64).to_bytes(8, "little") + encoded + data)
    return f"{path.name}: {how} {name} {step}"


def _json_node(source: random.Random, value: Any, depth: int = 0) -> str:
    """Changes one value somewhere below this one."""
    if isinstance(value, dict) and value:
        key: Any = source.choice(list(value))
    elif isinstance(value, list) and value:
        key = source.randrange(len(value))
    else:
        return "nothing"
    inner = value[key]
    if isinstance(inner, (dict, list)) and inner and depth < 6 and source.random() < 0.7:
        return f"{key}.{_json_node(source, inner, depth + 1)}"
    how = source.choice(["drop", "set", "set", "set", "near"])
    if how == "drop":
        del value[key]
    elif how == "near" and isinstance(inner, int):
        value[key] = source.choice([inner + 1, inner - 1, inner * 2, -inner, float(inner), str(inner)])
    else:
        value[key] = source.choice(JSON_VALUES)
        if isinstance(value, dict) and depth == 0 and source.random() < 0.3:
            value[source.choice(FIELDS)] = source.choice(JSON_VALUES)
    return f"{key}: {how}"


def _settings(*names: str) -> Callable[[random.Random, Path], str]:
    def damage(source: random.Random, folder: Path) -> str:
        path = folder / source.choice(names)
        content = path.read_bytes() if path.exists() else b"{}"
        if source.random() < 0.2:
            damaged, step = _damage_bytes(source, content)
            path.write_bytes(damaged)
            return f"{path.name}: {step}"
        try:
            value = json.loads(content)
        except ValueError:
            return "nothing"
        if source.random() < 0.25 and isinstance(value, dict):
            field = source.choice(FIELDS)
            value[field] = source.choice(JSON_VALUES)
            step = f"{field} added"
        else:
            step = _json_node(source, value)
        path.write_text(json.dumps(value))
        return f"{path.name}: {step}"

    return damage


def _index(source: random.Random, folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
        path.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-1.safetensors")}))
    value = json.loads(path.read_bytes())
    if source.random() < 0.4 and isinstance(value.get("weight_map"), dict) and value["weight_map"]:
        name = source.choice(list(value["weight_map"]))
        shards = [shard.name for shard in folder.glob("*.safetensors")]
        choices = [
            *shards,
            "../x.safetensors",
            "/etc/passwd",
            "x.bin",
            "config.json",
            "a" * 300,
            ".",
            "",
            [],
            5,
            None,
        ]
        value["weight_map"][name] = source.choice(choices)
        step = f"{name} in {value['weight_map'][name]!r}"
    else:
        step = _json_node(source, value)
    path.write_text(json.dumps(value))
    return f"index: {step}"


def _pickle(source: random.Random, folder: Path) -> str:
    import torch
    from safetensors.torch import load_file

    weights = {
        name: value for shard in folder.glob("*.safetensors") for name, value in load_file(shard).items()
    }
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        old.unlink()
    path = folder / "pytorch_model.bin"
    if weights:
        name = source.choice(list(weights))
        values: list[Any] = [
            weights[name].t().contiguous(),
            weights[name].int(),
            5,
            "x",
            None,
            [1],
            torch.zeros(()),
        ]
        values += [torch.zeros(1).expand(2**20, 2**12), weights[name].to_sparse()]
        if source.random() < 0.5:
            weights[name] = source.choice(values)
        content: Any = source.choice([weights, weights, weights, [1, 2], {"state_dict": weights}, 5])
        torch.save(content, path, _use_new_zipfile_serialization=source.random() < 0.7)
    if source.random() < 0.6 and path.exists():
        damaged, step = _damage_bytes(source, path.read_bytes())
        path.write_bytes(damaged)
        return f".bin: {step}"
    return ".bin"


DAMAGES: dict[str, Callable[[random.Random, Path], str]] = {
    "safetensors": _safetensors,
    "config": _settings("config.json"),
    "index": _index,
    "tokenizer": _settings("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    "generation": _settings("generation_config.json"),
    "pickle": _pickle,
}
WEIGHTS = {"gguf": 6, "config": 3, "safetensors": 3, "index": 1, "tokenizer": 2, "generation": 1, "pickle": 1}
