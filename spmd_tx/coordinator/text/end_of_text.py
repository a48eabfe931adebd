"""Finds out which tokens end a text, in the order in which transformers looks for them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmd_tx.coordinator.agent.layout import CONFIG, GENERATION

TEXT, KEY = "text_config", "eos_token_id"
NOT_SAID = (None, [])
MOST_ID = 2**31 - 1


def read_eos_token_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return their numbers; none if no file says it. Raises ValueError if one is damaged.

    The generation config goes first, then config.json, in which the part about text may have them, and then
    the tokenizer. A file that does not say it is passed over. What else a generation config says has no
    effect here, so that nothing of it can be wrong.
    """
    ids = next((value for part in _parts(directory) if (value := part.get(KEY)) not in NOT_SAID), None)
    if ids is None and tokenizer.eos_token is not None:
        ids = tokenizer.backend_tokenizer.token_to_id(str(tokenizer.eos_token))
    return () if ids is None else _checked(ids)


def _parts(directory: Path) -> Iterator[Mapping[str, Any]]:
    for path in (directory / GENERATION, directory / CONFIG):
        if not path.is_file():
            continue
        read = json.loads(path.read_bytes())
        if not isinstance(read, dict):
            raise ValueError(f"{path.name} holds no JSON object")
        yield read
        if isinstance(inner := read.get(TEXT), dict):
            yield inner


def _checked(ids: Any) -> tuple[int, ...]:
    checked = tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= MOST_ID for each in checked
    ):
        raise ValueError(f"eos_token_id is {ids!r}, which must be the number of a token, or a list of some")
    return checked
