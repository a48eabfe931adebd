"""Turns tokens into text, with special tokens: as a whole, or token by token. Pure.

Negative ids stand for the tokens of images, which have no text.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from tokenizers import Tokenizer

HALF_CHARACTER = "\ufffd"  # the text of bytes that are no whole character
MOST_HELD = 4  # tokens of an incomplete character: each has a byte at least, and four complete it
IMAGE = "[image]"  # the text of the first token of an image; the others have none
ANCHOR = "a"  # stands before a token, since some decoders drop the space that begins a text


def texts(tokenizer: Tokenizer, sequences: Sequence[Sequence[int]]) -> list[str]:
    """Decode whole sequences. Blocks."""
    if not any(min(tokens, default=0) < 0 for tokens in sequences):
        return tokenizer.decode_batch([list(tokens) for tokens in sequences], skip_special_tokens=False)
    return [
        "".join(
            IMAGE if is_image else tokenizer.decode(list(run), skip_special_tokens=False)
            for is_image, run in groupby(tokens, key=_is_image)
        )
        for tokens in sequences
    ]


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token. A character of several tokens is the last one's. Blocks."""
    if min(tokens, default=0) < 0:
        shown = list[str]()
        for is_image, run in groupby(tokens, key=_is_image):
            alike = list(run)
            shown += [IMAGE, *[""] * (len(alike) - 1)] if is_image else pieces(tokenizer, alike)
        return shown
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False).ids[-1]
    begin = len(tokenizer.decode([anchor], skip_special_tokens=False))
    different = sorted(set(tokens))
    decoded = texts(tokenizer, [[anchor, token] for token in different])
    alone = {token: text[begin:] for token, text in zip(different, decoded, strict=True)}
    shown, held = list[str](), list[int]()
    for token in tokens:
        text = alone[token]
        if held or HALF_CHARACTER in text:
            held.append(token)
            text = tokenizer.decode([anchor, *held], skip_special_tokens=False)[begin:]
            if text.endswith(HALF_CHARACTER) and len(held) < MOST_HELD:
                text = ""
            else:
                held.clear()
        shown.append(text)
    if held:
        shown[-1] = tokenizer.decode([anchor, *held], skip_special_tokens=False)[begin:]
    return shown


def _is_image(token: int) -> bool:
    return token < 0


def pack(sequences: Sequence[Sequence[int]]) -> list[bytes]:
    """Return tokens as int32, for a child process."""
    return [np.asarray(tokens, np.int32).tobytes() for tokens in sequences]


def unpack(sequences: Sequence[bytes]) -> list[list[int]]:
    """Read what ``pack`` has written."""
    return [np.frombuffer(tokens, np.int32).tolist() for tokens in sequences]
