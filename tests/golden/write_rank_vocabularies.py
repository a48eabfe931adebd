"""Writes rank_vocabularies.json: a small vocabulary, texts, and their tokens by the makers' libraries.

Needs tiktoken and mistral-common: python -m tests.golden.write_rank_vocabularies
"""

import base64
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from spmd_tx.demo import tiny_model
from tests.support.rank_files import KIMI_TOKENS, TEKKEN_TOKENS, token_bytes, write_tekken

FILE = Path(__file__).with_name("rank_vocabularies.json")
PLAIN, VOCABULARY = 480, 512
# The expressions in the Python code of the tokenizer of Kimi.
KIMI_WORDS = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
PARTS = [
    *(
        "the ",
        " world",
        "don't",
        "I'LL",
        "it'\u017f",
        "HTTPServer",
        "camelCase",
        "http://x.y/z?a=b",
        "def f(x):\n    y\n",
    ),
    *("1234567", "3.14", "½²③", "   ", "\t", "\n\n", "\r\n", "\u3000", "\u00a0", "\u2028", "=====", "..."),
    *(
        "漢字と",
        "世界Hello世界",
        "〇々〆",
        "ひらがなカタカナー",
        "한국어",
        "éüñß",
        "\u041a\u0430ждыйABC",
        "עברית",
        "العربية",
        "हिन्दी",
    ),
    *(
        "ǅǈʰ",
        "e\u0301\u0308",
        "😀👩\u200d👩\u200d👧",
        "𝔘𝟙𠮷",
        "\x00\x7f",
        "bababababa",
        "nananana",
        "aaaaaaa",
    ),
    *("<|im_end|>", "[BOS]", "[INST]", "</s>", "<|tool_call_begin|>", "<|im_", "[INS"),
]


def texts(seed: int, count: int, tokens: Sequence[bytes]) -> list[str]:
    draw = random.Random(seed)
    words = [token.decode() for token in tokens if token.isascii()]
    mixed = ("".join(draw.choices(PARTS, k=draw.randint(2, 5))) for _ in range(count))
    return [*PARTS, *mixed, *("".join(draw.choices(words, k=12)) for _ in range(count))]


def kimi(tokens: Sequence[bytes], given: Sequence[str]) -> list[list[int]]:
    import tiktoken

    specials = {
        KIMI_TOKENS.get(place, f"<|reserved_token_{PLAIN + place}|>"): PLAIN + place
        for place in range(VOCABULARY - PLAIN)
    }
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("kimi", pat_str=KIMI_WORDS, mergeable_ranks=ranks, special_tokens=specials)
    return [encoding.encode(text, allowed_special="all") for text in given]


def mistral(tokens: Sequence[bytes], given: Sequence[str]) -> list[list[int]]:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    with TemporaryDirectory() as place:
        write_tekken(Path(place), tokens, VOCABULARY)
        tokenizer = Tekkenizer.from_file(Path(place) / "tekken.json")
    cut = re.compile("(" + "|".join(map(re.escape, TEKKEN_TOKENS)) + ")")  # the library reads none from texts
    found = []
    for text in given:
        ids: list[int] = []
        for part in cut.split(text):
            is_special = part in TEKKEN_TOKENS
            ids += [TEKKEN_TOKENS.index(part)] if is_special else tokenizer.encode(part, bos=False, eos=False)
        found.append(ids)
    return found


def main() -> None:
    tokens = token_bytes(tiny_model.train_tokenizer(VOCABULARY, seed=0))
    given = texts(0, 60, tokens)
    content = {
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "texts": given,
        "tiktoken": kimi(tokens[:PLAIN], given),
        "tekken": mistral(tokens, given),
    }
    FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(FILE, file=sys.stderr)


if __name__ == "__main__":
    main()
