"""Finds out which tokens end a text, in the order in which transformers looks for them."""

import json
from pathlib import Path
from typing import Any

from spmd_tx.coordinator.agent.layout import CONFIG, GENERATION

TEXT, KEY = "text_config", "eos_token_id"
MOST_ID = 2**31 - 1


def read_eos_token_ids(transformers: Any, directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return their numbers; none if no file says it. Raises ValueError and others if one is damaged.

    The generation config goes first, then config.json, in which the part about text may have them, and then
    the tokenizer. A file that does not say it is passed over.
    """
    ids = None
    if (directory / GENERATION).is_file():
        ids = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
    if ids is None and (directory / CONFIG).is_file():
        config = json.loads((directory / CONFIG).read_bytes())
        ids = next(
            (found for part in (config, config.get(TEXT) or {}) if (found := part.get(KEY)) is not None), None
        )
    if ids is None and tokenizer.eos_token is not None:
        ids = tokenizer.backend_tokenizer.token_to_id(str(tokenizer.eos_token))
    return () if ids is None else _checked(ids)


def _checked(ids: Any) -> tuple[int, ...]:
    found = tuple(ids) if isinstance(ids, list) else (ids,)
    if not all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each <= MOST_ID for each in found
    ):
        raise ValueError(f"eos_token_id is {ids!r}, which must be the number of a token, or a list of some")
    return found
