"""The tokenizer of a GGUF file, as the files of a Hugging Face directory.

    tokenizer.ggml.model   gpt2   byte-level BPE, whose text is split by tokenizer.ggml.pre
                           llama  SentencePiece's BPE: a score a token, and none of its merges
    token_type             3 control: a special token; 4 user-defined: an added token; 6 a byte

Source: llama.cpp, src/llama-vocab.cpp; the files are those that transformers 5.23 makes of a GGUF
file (integrations/gguf), compared in tests/formats/test_gguf.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pcg.errors import UnsupportedError, WeightsError
from pcg.gguf_file import GgufHeader
from pcg.units import shown

_CONTROL, _USER_DEFINED = 3, 4
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens of transformers, and their names in GGUF."""
_SPACE = "\u2581"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
"""The pattern that splits text before BPE, by tokenizer.ggml.pre; None for GPT-2's."""
_DIGITS_ALONE = ("smollm",)
"""Tokenizers that split every digit off before GPT-2's pattern."""
_BEGIN_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Tokenizers that put a bos before text unless the file says otherwise."""
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "tekken")
"""Tokenizers that take a word of the vocabulary before its merges."""


def tokenizer_files(header: GgufHeader) -> dict[str, str]:
    """Return the texts of a file's tokenizer.json and the files beside it, by name.

    Raises:
        UnsupportedError: the tokenizer is none that pcg reads; names the known.
        WeightsError: the metadata lacks a part of it.
    """
    metadata = header.metadata
    try:
        content = _tokenizer(header)
        tokens = metadata["tokenizer.ggml.tokens"]
        ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
        named = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
        ends = {
            metadata[key]
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in metadata
        }
    except (KeyError, IndexError) as error:
        raise WeightsError(
            f"{header.path} lacks a part of its tokenizer ({error}); convert the model again"
        ) from error
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    files = {"tokenizer.json": content, "tokenizer_config.json": config}
    if ends:
        files["generation_config.json"] = {"eos_token_id": sorted(ends)}
    texts = {name: json.dumps(each, ensure_ascii=False) for name, each in files.items()}
    template = metadata.get("tokenizer.chat_template")
    if template:
        texts["chat_template.jinja"] = template
    return texts


def _tokenizer(header: GgufHeader) -> dict[str, Any]:
    """Return the content of tokenizer.json."""
    metadata = header.metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kind = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and pre not in _SPLITS):
        raise UnsupportedError(
            f"{header.path} has the tokenizer {shown(kind)}, {shown(pre)}; pcg reads llama, and "
            f"gpt2 with {', '.join(_SPLITS)}: give the directory of the original checkpoint"
        )
    types = metadata.get("tokenizer.ggml.token_type", [])
    added = [
        {
            "id": index, "content": tokens[index], "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": types[index] == _CONTROL,
        }
        for index in range(len(types))
        if types[index] in (_CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    parts = _byte_level(metadata, pre) if kind == "gpt2" else _sentence_piece(metadata)
    begins = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _BEGIN_WITH_BOS)
    ends = metadata.get("tokenizer.ggml.add_eos_token", False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _around(metadata, begins=begins, ends=ends),
        **parts,
    }


def _byte_level(metadata: Mapping[str, Any], pre: str) -> dict[str, Any]:
    split = _SPLITS[pre]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [{**bytes_, "use_regex": split is None}]
    if split is not None:
        pattern = {"Regex": split}
        first = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        steps.insert(0, first)
    elif pre in _DIGITS_ALONE:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    return {
        "normalizer": {"type": "NFC"} if split == _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**bytes_, "add_prefix_space": True, "use_regex": True},
        "model": _bpe(tokens, merges) | {"ignore_merges": pre in _WHOLE_WORDS},
    }


def _sentence_piece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "first" if has_prefix else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, _merges(tokens, metadata["tokenizer.ggml.scores"]))
        | {
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
    }


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all ways to join two tokens to a third, the token of the highest score first."""
    index = {token: at for at, token in enumerate(tokens)}
    ways = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in index and pair[1] in index]
        known.sort(key=lambda pair: (index[pair[0]], index[pair[1]]))
        ways += [(score, pair) for pair in known]
    ways.sort(key=lambda way: (way[0], len(way[1][0]), len(way[1][1])), reverse=True)
    return [pair for _, pair in ways]


def _around(metadata: Mapping[str, Any], begins: bool, ends: bool) -> dict[str, Any] | None:
    """Return the post-processor that puts a bos before text and an eos after it; None for none."""
    first = ["bos"] if begins and "tokenizer.ggml.bos_token_id" in metadata else []
    last = ["eos"] if ends and "tokenizer.ggml.eos_token_id" in metadata else []
    if not first and not last:
        return None
    ids = {name: metadata[f"tokenizer.ggml.{name}_token_id"] for name in (*first, *last)}
    texts = {name: metadata["tokenizer.ggml.tokens"][index] for name, index in ids.items()}

    def part(name: str, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": texts[name], "type_id": type_id}}

    def around(letter: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": letter, "type_id": type_id}}
        before = [part(name, type_id) for name in first]
        return [*before, text, *(part(name, type_id) for name in last)]

    special = {
        texts[name]: {"id": texts[name], "ids": [ids[name]], "tokens": [texts[name]]}
        for name in ids
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": special,
    }
