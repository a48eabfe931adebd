"""Writes small vocabularies as Mistral's ``tekken.json`` and Moonshot's ``tiktoken.model`` have them."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Special tokens of Kimi, by their place behind the plain ones; what is between them has no name.
KIMI_TOKENS = {
    **{0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>"},
    **{6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>"},
    **{11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>"},
    **{14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>"},
    **{30: "[UNK]", 31: "[PAD]"},
}
KIMI_CONFIG = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "clean_up_tokenization_spaces": False,
    "eos_token": "[EOS]",
    "extra_special_tokens": {},
    "pad_token": "[PAD]",
    "tokenizer_class": "TikTokenTokenizer",
    "unk_token": "[UNK]",
}
TEKKEN_TOKENS = "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]".split()
TEKKEN_SPECIALS = 32  # with those that have no name
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes of the plain tokens of byte-level BPE, in the order of their numbers."""
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    ids = sorted((number, text) for text, number in tokenizer.get_vocab().items() if text not in special)
    return [bytes(map(byte_of.__getitem__, text)) for _, text in ids]


def write_tiktoken(path: Path, tokens: Sequence[bytes]) -> dict[str, int]:
    """Write the two files of Kimi's tokenizer, and return the numbers of its special tokens."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(len(tokens) + place): {"content": text, **flags, "special": "tool_call" not in text}
        for place, text in KIMI_TOKENS.items()
    }
    (path / "tokenizer_config.json").write_text(json.dumps(KIMI_CONFIG | {"added_tokens_decoder": added}))
    return {text: len(tokens) + place for place, text in KIMI_TOKENS.items()}


def write_tekken(
    path: Path, tokens: Sequence[bytes], vocab_size: int, *, named: bool = True
) -> dict[str, int]:
    """Write Mistral's file, and return the numbers of the special tokens.

    As in the releases, it holds more plain tokens than the model has. ``named``: whether it names the others.
    """
    tokens = [*(bytes([byte]) for byte in range(256)), *(token for token in tokens if len(token) > 1)]
    config = {
        "pattern": TEKKEN_WORDS,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": vocab_size,
        "default_num_special_tokens": TEKKEN_SPECIALS,
        "version": "v11" if named else "v3",
    }
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    specials = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(TEKKEN_TOKENS)
    ]
    content = {"config": config, "vocab": vocab} | ({"special_tokens": specials} if named else {})
    (path / "tekken.json").write_text(json.dumps(content))
    return {text: rank for rank, text in enumerate(TEKKEN_TOKENS)}
