"""Names the tool calls of answers: letters and digits, since clients rewrite other ids. Pure."""

import hashlib
import string

LETTERS = string.ascii_letters + string.digits
LENGTH = 24


def call_id(request_id: str, sample: int, number: int) -> str:
    """Return the id of a call of one sample of a request: the same whenever the answer is made again."""
    digest = hashlib.sha256(f"{request_id}:{sample}:{number}".encode()).digest()
    rest, letters = int.from_bytes(digest), list[str]()
    for _ in range(LENGTH):
        rest, letter = divmod(rest, len(LETTERS))
        letters.append(LETTERS[letter])
    return "call_" + "".join(letters)
