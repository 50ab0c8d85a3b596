"""The vocabulary of a converted tokenizer as a table; a text needs only a few hundred of its entries.

The tokenizers library takes 0.8 s and 180 MB to read a vocabulary of 262,144 with its 514,906 merges. A
text's tokens are substrings of the text, and so is the result of each merge. A tokenizer with only those
tokens and merges, in the same order, gives the same tokens, and is created in milliseconds.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import mmap
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

FILE = "vocabulary.bin"
MOST_CHARACTERS = 4000
"""For a longer text, reading the whole tokenizer is faster than finding the pieces."""

_UNKNOWN = "\ufdd0"  # Unicode reserves it for a program's own use
_NOWHERE = 0xFFFFFFFF
_Format = Literal["B", "H", "I"]
_ARRAYS: dict[str, _Format] = {
    "texts": "B",
    "ends": "I",
    "ids": "I",
    "places": "I",
    "merge_ends": "I",
    "ranks": "I",
    "lefts": "H",
    "rest": "B",
}
"""The arrays after the file's header, in this order, with their number types."""


class UnsuitableError(Exception):
    """A part of the vocabulary may not be enough for a tokenizer or a text."""


class Vocabulary:
    """The tokens of a tokenizer, sorted by their text, each with the merges that result in it."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            first = file.readline()
            header = json.loads(first)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content, start = memoryview(mapped), len(first)
        if hashlib.sha256(content[start:]).hexdigest() != header["sha256"]:
            raise ValueError(f"{path.name} does not match its digest")
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_DONTNEED)  # frees the pages read for the digest; a text needs only a few
        held: dict[str, memoryview[int]] = {}
        for name, kind in _ARRAYS.items():
            end = start + header["bytes"][name]
            held[name] = content[start:end].cast(kind)
            start = end
        self._texts = held["texts"]
        self._ends, self._ids, self._places = held["ends"], held["ids"], held["places"]
        self._merge_ends, self._ranks, self._lefts = held["merge_ends"], held["ranks"], held["lefts"]
        self._rest = json.loads(bytes(held["rest"]))
        self._added: dict[int, str] = {token["id"]: token["content"] for token in self._rest["added_tokens"]}
        self._special = {token["content"] for token in self._rest["added_tokens"] if token["special"]}
        self._longest = header["longest"]
        self._probe = self._tokenizer({}, [], [])
        self._decoder: Any = self._probe.decoder

    @property
    def added(self) -> frozenset[int]:
        """The tokens that are found whole in a text, such as those around a message."""
        return frozenset(self._added)

    # -- texts to tokens -------------------------------------------------------------------------

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """Returns the tokens of a text, equal to the whole tokenizer's; if it is whole, with start and end.

        Raises:
            UnsuitableError: a part of the vocabulary may not be enough for the text.
        """
        if len(text) > MOST_CHARACTERS:
            raise UnsuitableError
        # If there is a normalizer, added tokens are not normalized, and are searched in the original text.
        added = [token for token in self._rest["added_tokens"] if token["content"] in text]
        places = self._pieces(self._symbols(text, added))
        made = self._tokenizer(*self._part(places), added)
        tokens: list[int] = made.encode(text, add_special_tokens=is_whole).ids
        return tokens

    def _symbols(self, text: str, added: list[dict[str, Any]]) -> str:
        """Returns the symbols that a text's merges start from, one character each."""
        seen = set(text)
        normalizer, splitter = self._probe.normalizer, self._probe.pre_tokenizer
        for normalized in {text, text if normalizer is None else normalizer.normalize_str(text)}:
            seen.update(normalized)
            if splitter is not None:
                for piece, _ in splitter.pre_tokenize_str(normalized):
                    seen.update(piece)
        vocabulary = {_UNKNOWN: 1 << 30}
        for token in seen:
            place = self._place(token)
            if place is not None:
                vocabulary[token] = self._ids[place]
        options = {"unk_token": _UNKNOWN, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
        encoded = self._tokenizer(vocabulary, [], added, options).encode(text, add_special_tokens=False)
        # A character that the whole vocabulary may contain, or that becomes bytes.
        if _UNKNOWN in encoded.tokens:
            raise UnsuitableError
        return "".join(encoded.tokens)

    def _pieces(self, symbols: str) -> set[int]:
        """Returns the table positions of all tokens that are a substring of a text."""
        found: set[int] = set()
        ends: dict[bytes, int | None] = {}
        for start in range(len(symbols)):
            low = 0
            for end in range(start + 1, min(len(symbols), start + self._longest) + 1):
                prefix = symbols[start:end].encode()
                if prefix not in ends:
                    place = self._search(prefix, low)
                    ends[prefix] = place if self._text(place).startswith(prefix) else None
                    if ends[prefix] is not None and self._text(place) == prefix:
                        found.add(place)
                known = ends[prefix]
                if known is None:  # no token begins like this
                    break
                low = known
        return found

    def _part(self, places: set[int]) -> tuple[dict[str, int], list[list[str]]]:
        """Returns the vocabulary and merges of the given tokens, and of those that every text may need."""
        vocabulary = {self._text(place).decode(): self._ids[place] for place in places}
        model = self._rest["model"]
        always = [model["unk_token"]] if model.get("unk_token") else []
        if model.get("byte_fallback"):
            always += [f"<0x{byte:02X}>" for byte in range(256)]
        for token in always:
            place = self._place(token)
            if place is not None:
                vocabulary[token] = self._ids[place]
        merges: list[tuple[int, bytes, int]] = []
        for place in places:
            first = self._merge_ends[place - 1] if place else 0
            text = self._text(place)
            merges += [
                (self._ranks[index], text, self._lefts[index])
                for index in range(first, self._merge_ends[place])
            ]
        merges.sort()
        return vocabulary, [[text[:left].decode(), text[left:].decode()] for _, text, left in merges]

    def _tokenizer(
        self,
        vocabulary: dict[str, int],
        merges: list[list[str]],
        added: list[dict[str, Any]],
        options: dict[str, Any] | None = None,
    ) -> Any:
        """Makes a tokenizer with a part of the vocabulary and of the added tokens."""
        from tokenizers import Tokenizer

        known = {token["content"]: token["id"] for token in added}
        model = self._rest["model"] | {"vocab": vocabulary | known, "merges": merges} | (options or {})
        made: Any = Tokenizer.from_str(json.dumps(self._rest | {"model": model, "added_tokens": added}))
        if any(made.token_to_id(content) != number for content, number in known.items()):
            raise UnsuitableError
        return made

    # -- tokens to text --------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of some tokens, without special tokens, as the whole tokenizer does."""
        texts = [text for text in map(self._token, tokens) if text is not None and text not in self._special]
        return str(self._decoder.decode(texts)) if self._decoder is not None else " ".join(texts)

    def _token(self, number: int) -> str | None:
        added = self._added.get(number)
        if added is not None:
            return added
        if not 0 <= number < len(self._places) or self._places[number] == _NOWHERE:
            return None
        return self._text(self._places[number]).decode()

    # -- the table -------------------------------------------------------------------------------

    def _text(self, place: int) -> bytes:
        if place >= len(self._ends):
            return b""
        return bytes(self._texts[self._ends[place - 1] if place else 0 : self._ends[place]])

    def _search(self, text: bytes, low: int = 0) -> int:
        return bisect.bisect_left(range(len(self._ends)), text, low, key=self._text)

    def _place(self, text: str) -> int | None:
        key = text.encode("utf-8", "surrogatepass")
        place = self._search(key)
        return place if place < len(self._ends) and self._text(place) == key else None


# -- making it ---------------------------------------------------------------------------------------


def write_vocabulary(folder: Path) -> None:
    """Writes the table beside a ``tokenizer.json``, if a part of the vocabulary is enough for its kind."""
    content = json.loads((folder / "tokenizer.json").read_bytes())
    try:
        arrays, longest = _table(content)
    except UnsuitableError:
        return
    written = b"".join(arrays.values())
    sizes = {name: len(values) for name, values in arrays.items()}
    facts = {"sha256": hashlib.sha256(written).hexdigest(), "bytes": sizes, "longest": longest}
    (folder / FILE).write_bytes(json.dumps(facts).encode() + b"\n" + written)


def _table(content: dict[str, Any]) -> tuple[dict[str, bytes], int]:
    """Returns the arrays of a tokenizer, and the length of its longest token in characters.

    Raises:
        UnsuitableError: a part of the vocabulary is not enough for this kind of tokenizer.
    """
    model, added = content["model"], content["added_tokens"]
    if model.get("type") != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        raise UnsuitableError
    if content.get("normalizer") is not None and any(token["normalized"] for token in added):
        raise UnsuitableError  # releases of the tokenizers library decode such a token to different texts
    vocabulary: dict[str, int] = model["vocab"]
    # An added token with another id, or the placeholder as a known token, could also be part of a text.
    if any(vocabulary.get(token["content"]) != token["id"] for token in added) or _UNKNOWN in vocabulary:
        raise UnsuitableError
    made: dict[str, list[tuple[int, int]]] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made.setdefault(left + right, []).append((rank, len(left.encode())))
    texts, ids = bytearray(), array("I")
    ends, merge_ends, ranks, lefts = array("I"), array("I"), array("I"), array("H")
    for text, number in sorted((text.encode(), number) for text, number in vocabulary.items()):
        texts += text
        ends.append(len(texts))
        ids.append(number)
        for rank, left_bytes in made.pop(text.decode(), ()):
            ranks.append(rank)
            lefts.append(left_bytes)
        merge_ends.append(len(ranks))
    if made or len(set(ids)) != len(ids) or max(ids, default=0) > 4 * len(ids):
        raise UnsuitableError
    places = array("I", [_NOWHERE]) * (max(ids, default=0) + 1)
    for place, number in enumerate(ids):
        places[number] = place
    rest = content | {"model": {**model, "vocab": {}, "merges": []}}
    arrays = (texts, ends, ids, places, merge_ends, ranks, lefts, json.dumps(rest).encode())
    packed = {name: bytes(values) for name, values in zip(_ARRAYS, arrays, strict=True)}
    return packed, max(map(len, vocabulary), default=0)
