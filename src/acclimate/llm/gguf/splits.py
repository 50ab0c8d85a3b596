"""How text is split before byte-pair merges, for each value of ``tokenizer.ggml.pre``.

Each expression splits every piece that the one before left, into its matches and the text between them. The
expressions are those of the models' own tokenizers, in the order in which llama.cpp applies them. Where
llama.cpp approximates classes of letters (``tekken``, ``gpt-4o`` and their kin), the original stands here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """How a vocabulary of byte-level BPE splits text."""

    expressions: tuple[str, ...]
    whole_words: bool = False
    """Whether a piece that is a token stays whole even if no merges lead to it."""
    adds_start: bool = False
    """Whether a text begins with the start token if the file does not say."""


_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+%s|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*%s"
_CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED_WITH_ENDINGS = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT4O = rf"{_CASED_WITH_ENDINGS}|\p{{N}}{{1,3}}|{_CASED_SIGNS}|{_SPACES}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_SIGNS}|{_SPACES}"
_DIGIT, _NEWLINE = r"\p{N}", r"[\r\n]"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Three digits each, counted from the right.
_THREES_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_CHINESE_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# DeepSeek's first tokenizer lists the letters that have a case, as far as its Unicode version knew them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_NOT_HAN = "&&[^\\p{Han}]"
_KIMI_CAPITALS = f"[\\p{{Lu}}\\p{{Lt}}\\p{{Lm}}\\p{{Lo}}\\p{{M}}{_NOT_HAN}]"
_KIMI_SMALL = f"[\\p{{Ll}}\\p{{Lm}}\\p{{Lo}}\\p{{M}}{_NOT_HAN}]"
_KIMI_K2 = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_CAPITALS}*{_KIMI_SMALL}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_CAPITALS}+{_KIMI_SMALL}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_JAIS2_SPACES = "|".join(
    [*(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)"]
)

UNSTATED = Split(
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)
"""What llama.cpp uses, with a warning, if a file names no pre-tokenizer."""

_GROUPS: dict[tuple[str, ...], Split] = {
    (
        *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"),
        *("roberta-bpe", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "mpt", "olmo", "jais"),
        *("trillion", "granite-docling"),
    ): Split((_GPT2,)),
    (*("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),): Split(
        (_DIGIT, _GPT2)
    ),
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        *("jina-v5-nano",),
    ): Split((_LLAMA3,), whole_words=True, adds_start=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): Split((_LLAMA3,)),
    ("glm4", "glm5"): Split((_LLAMA3,), whole_words=True),
    ("minicpm5",): Split((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole_words=True),
    ("jais-2",): Split((_LLAMA3.replace(r"\s+(?!\S)|\s+", rf"{_JAIS2_SPACES}|\s"),)),
    (
        *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open"),
        "grok-2",
    ): Split((_QWEN2,)),
    ("qwen35",): Split((_QWEN35,)),
    ("laguna",): Split((r"[^\n]+|\n+", _QWEN2)),
    ("ufakzeka",): Split((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",)),
    ("seed-coder",): Split((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): Split(
        (
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
            rf"|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("exaone-moe",): Split(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): Split((_GPT4O,)),
    ("tiny_aya", "cohere2moe"): Split((_THREES_FROM_THE_RIGHT, _GPT4O)),
    ("tekken",): Split((_TEKKEN,), whole_words=True, adds_start=True),
    ("youtu",): Split(
        (_YOUTU_SCRIPTS, rf"{_CASED_WITH_ENDINGS}|\p{{N}}|{_CASED_SIGNS}|{_SPACES}"), whole_words=True
    ),
    ("kimi-k2",): Split((_KIMI_K2,)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): Split(
        (r"\p{N}{1,3}", _CHINESE_AND_KANA, _DEEPSEEK3)
    ),
    ("spark2_5",): Split(
        (
            r"\p{N}{1,3}",
            _CHINESE_AND_KANA,
            rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            _DIGIT,
        )
    ),
    ("afmoe",): Split((_THREES_FROM_THE_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK3)),
    ("deepseek-llm",): Split(
        (
            _NEWLINE,
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _ASIAN,
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): Split((_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)),
    ("falcon",): Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    ("bloom", "poro-chat", "gpt3-finnish"): Split((_BLOOM,)),
    ("viking",): Split((_BLOOM, _DIGIT)),
    ("superbpe",): Split((r"\p{N}+", r"(?=(?:\d{3})+(?!\d))")),
    ("chameleon",): Split(
        (
            r"<sentinel:[0-9]+>",
            r"IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            _DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_start=True,
    ),
}

SPLITS = {name: split for names, split in _GROUPS.items() for name in names}
"""By the value of ``tokenizer.ggml.pre``."""
