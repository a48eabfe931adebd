"""Makes tokenizers of vocabularies that are published as ranks: ``tekken.json`` and ``tiktoken.model``.

Such a file lists the bytes of tokens, in the order in which byte-level BPE prefers them. Code that a model
has for its tokenizer (``tokenization_*.py``) is never run: what it adds to the file is written down here.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from spmd_tx.errors import StartError

TEKKEN, TIKTOKEN = "tekken.json", "tiktoken.model"
CONFIG = "tokenizer_config.json"

# How words are cut, by the class that tokenizer_config.json names. Kimi cuts before and behind runs of Han.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = {
    "TikTokenTokenizer": "|".join(
        [
            r"[\p{Han}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )
}

# The special tokens of those tekken.json that name none, from rank 0 on.
TEKKEN_SPECIALS = """
<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]
[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]
""".split()
TEKKEN_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@dataclass(frozen=True)
class RankVocabulary:
    """Holds a tokenizer, and which of its tokens have a role where tokenizer_config.json does not say it."""

    tokenizer: Tokenizer
    roles: Mapping[str, str]


def read_tekken(path: Path) -> RankVocabulary:
    """Read the vocabulary of a model of Mistral. Raises ValueError, KeyError and others if it is damaged."""
    raw = json.loads(path.read_bytes())
    config = raw["config"]
    named = raw.get("special_tokens")
    texts = TEKKEN_SPECIALS if named is None else _tekken_specials(named)
    count = config.get("default_num_special_tokens") or len(texts)
    if count < len(texts):
        raise ValueError(f"default_num_special_tokens is {count}, but there are {len(texts)} special tokens")
    texts = [*texts, *(f"<SPECIAL_{number}>" for number in range(len(texts), count))]
    most = config.get("default_vocab_size")
    listed = raw["vocab"] if most is None else raw["vocab"][: most - count]
    ranks = {base64.b64decode(each["token_bytes"]): rank for rank, each in enumerate(listed)}
    specials = {number: _special(text) for number, text in enumerate(texts)}
    tokenizer = _byte_level(ranks, count, config["pattern"], specials)
    first = TEKKEN_ROLES["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, texts.index(first))]
    )
    return RankVocabulary(tokenizer, {role: text for role, text in TEKKEN_ROLES.items() if text in texts})


def _tekken_specials(named: Sequence[Mapping[str, Any]]) -> list[str]:
    by_rank = {each["rank"]: each["token_str"] for each in named}
    if by_rank.keys() != set(range(len(named))):
        raise ValueError(
            f"the ranks of special_tokens are {sorted(by_rank)}, which must be 0, 1, 2 and so on"
        )
    return [by_rank[rank] for rank in range(len(named))]


def read_tiktoken(path: Path) -> RankVocabulary:
    """Read the vocabulary of a model of Moonshot. Raises ValueError and others if it is damaged.

    Raises StartError if it belongs to a tokenizer that is not known.
    """
    config_path = path.with_name(CONFIG)
    config = json.loads(config_path.read_bytes()) if config_path.is_file() else {}
    name = config.get("tokenizer_class")
    if name not in WORDS:
        raise StartError(
            f"{path} is of the tokenizer {name!r} ({CONFIG}), whose way to cut texts into words is in Python "
            f"code, which is never run; known are {', '.join(WORDS)}. Add a tokenizer.json to the model"
        )
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    named = {
        int(number): AddedToken(**token) for number, token in config.get("added_tokens_decoder", {}).items()
    }
    specials = {
        number: named.get(number) or _special(f"<|reserved_token_{number}|>")
        for number in range(len(ranks), max(named, default=-1) + 1)
    }
    return RankVocabulary(_byte_level(ranks, 0, WORDS[name], specials), {})


def _special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)


def _byte_level(
    ranks: Mapping[bytes, int], first: int, words: str, specials: Mapping[int, AddedToken]
) -> Tokenizer:
    """Make a tokenizer whose tokens have the numbers ``first`` + rank, and special ones those given."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if set(ranks.values()) != set(range(len(ranks))):
        raise ValueError(f"the ranks of {len(ranks)} tokens are not 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"there is no token for the byte {missing[0]:#04x}, and texts may have any")
    letters = bytes_to_unicode()
    shown = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    merges = [
        (shown[token[:at]], shown[token[at:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    vocabulary = {shown[token]: first + rank for token, rank in ranks.items()}
    # A special token goes before a plain one of the same text, which no text can yield: it is cut out before.
    vocabulary |= {token.content: number for number, token in specials.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(specials.values()))
    return tokenizer
