"""What a route says of itself to the guard of all routes, as its ``opt``. A route without a mark is closed.

It then wants a key, counts towards the key's requests per second, and, unless it is a GET, is refused to
read-only keys.
"""

from typing import Any

IS_OPEN = "is_open"
IS_READING = "is_reading"
IS_UNMETERED = "is_unmetered"
IS_SIGNED = "is_signed"
IS_DROPPED = "is_dropped"
HAS_PROMPTS = "has_prompts"
HAS_BATCH = "has_batch"

OPEN: dict[str, Any] = {IS_OPEN: True}  # for probes, which have no key
READS: dict[str, Any] = {IS_READING: True}  # changes nothing, although it is no GET
SIGN_OF_LIFE: dict[str, Any] = {
    IS_UNMETERED: True
}  # the SDK sends it by itself, however little its user does
SIGNED: dict[str, Any] = {IS_SIGNED: True}  # wants no key, but a signature in the URL (signed_urls.py)
SDK_READS: dict[str, Any] = READS | SIGN_OF_LIFE
DROPS: dict[str, Any] = SDK_READS | {IS_DROPPED: True}  # of its body nothing is kept, not even in memory
PROMPTS: dict[str, Any] = {HAS_PROMPTS: True}  # its body may be as large as prompts are
BATCH: dict[str, Any] = {HAS_BATCH: True}  # its body may be as large as any
