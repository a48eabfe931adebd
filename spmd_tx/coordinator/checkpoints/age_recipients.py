"""Checks whether texts are public keys that age can encrypt to. Pure; does not use age's library.

That library has been seen to crash on malformed keys. Keys that pass here are well-formed; whether their
numbers make a key is checked by the library, in a child process (age.py).
"""

import base64
import binascii
from collections.abc import Sequence

from spmd_tx.errors import InvalidRequest

BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
KEY_BYTES = 32  # of X25519 and Ed25519
LARGEST_EXPONENT = 2**32
MODULUS_BITS = range(2048, 8192 + 1)


def check_recipients(texts: Sequence[str]) -> list[str]:
    """Check age's own keys, as age1..., and SSH's; the result is without comments. Raises InvalidRequest."""
    return [_checked(text) for text in texts]


def check_bounds(texts: Sequence[str], most: int, longest: int) -> None:
    """Raise InvalidRequest for more than ``most`` keys, or one longer than ``longest`` characters."""
    if len(texts) > most:
        raise InvalidRequest(f"age_encryption_recipients has {len(texts)} entries; encrypt to at most {most}")
    for text in texts:
        if len(text) > longest:
            raise InvalidRequest(
                f"age_encryption_recipients has {_shown(text)}, of {len(text)} characters; "
                f"a public key has at most {longest}"
            )


def _checked(text: str) -> str:
    words = text.split()
    if words and words[0].startswith("age1") and len(words) == 1:
        problem = _problem_of_age(words[0])
    elif len(words) >= 2 and words[0] in ("ssh-ed25519", "ssh-rsa"):
        problem = _problem_of_ssh(words[0], words[1])
    else:
        problem = "it begins neither with age1 nor with ssh-ed25519 or ssh-rsa"
    if problem is not None:
        raise InvalidRequest(not_a_key(text, problem))
    return " ".join(words[:2])


def not_a_key(text: str, problem: str) -> str:
    """The error message for a text that is no public key."""
    return (
        f"age_encryption_recipients has {_shown(text)}, which is no public key ({problem}); "
        "send keys as age1... or ssh-ed25519 ..."
    )


def _shown(text: str) -> str:
    if "SECRET" in text.upper() or "PRIVATE" in text.upper():
        return "what looks like a secret key"
    return ascii(text if len(text) <= 40 else text[:40] + "...")


def _problem_of_age(text: str) -> str | None:
    """The problem of a key of age's own, in Bech32 (BIP 173)."""
    symbols = text.removeprefix("age1")
    if not symbols.isascii() or not set(symbols) <= set(BECH32):
        return "it has characters that Bech32 does not know"
    values = [BECH32.index(symbol) for symbol in symbols]
    if len(values) != (KEY_BYTES * 8 + 4) // 5 + 6:
        return f"it has {len(text)} characters instead of 62"
    prefix = [ord(letter) >> 5 for letter in "age"] + [0] + [ord(letter) & 31 for letter in "age"]
    if _checksum([*prefix, *values]) != 1:
        return "its checksum is wrong"
    if values[-7] & 0b1111:
        return "its last bits are not zero"
    return None


def _checksum(values: Sequence[int]) -> int:
    checksum = 1
    for value in values:
        top = checksum >> 25
        checksum = (checksum & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(GENERATOR):
            checksum ^= generator if top >> bit & 1 else 0
    return checksum


def _problem_of_ssh(kind: str, encoded: str) -> str | None:
    """The problem of an SSH key (RFC 4253, RFC 8709)."""
    try:
        fields = _fields(base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError):
        return "its Base64 is wrong"
    if fields is None or fields[0] != kind.encode():
        return f"it does not hold a key of {kind}"
    if kind == "ssh-ed25519":
        is_one = len(fields) == 2 and len(fields[1]) == KEY_BYTES
        return None if is_one else f"it does not hold {KEY_BYTES} bytes"
    if len(fields) != 3:
        return "it does not hold an exponent and a modulus"
    exponent, modulus = fields[1:]
    return (
        _problem_of_number("exponent", exponent)
        or _problem_of_number("modulus", modulus)
        or _problem_of_rsa(int.from_bytes(exponent, "big"), int.from_bytes(modulus, "big"))
    )


def _fields(content: bytes) -> list[bytes] | None:
    """The strings in a sequence of length-prefixed strings; None if the lengths do not fit."""
    fields = []
    while content:
        size = int.from_bytes(content[:4], "big")
        if len(content) < 4 + size:
            return None
        fields.append(content[4 : 4 + size])
        content = content[4 + size :]
    return fields or None


def _problem_of_number(name: str, number: bytes) -> str | None:
    """The problem of a number, which must be positive, in two's complement and as short as possible."""
    if not number or number[0] >= 0x80:
        return f"its {name} is not positive"
    if number[0] == 0 and (len(number) == 1 or number[1] < 0x80):
        return f"its {name} has leading zeros"
    return None


def _problem_of_rsa(exponent: int, modulus: int) -> str | None:
    if exponent < 3 or exponent % 2 == 0 or exponent >= LARGEST_EXPONENT:
        return "its exponent is not an odd number between 3 and 2^32"
    if modulus.bit_length() not in MODULUS_BITS:
        bits = f"{MODULUS_BITS.start} to {MODULUS_BITS.stop - 1}"
        return f"its modulus has {modulus.bit_length()} bits, and not {bits}"
    return "its modulus is even" if modulus % 2 == 0 else None
