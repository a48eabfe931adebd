"""The options of sampling, which are part of the server's (config.py)."""

from typing import Annotated, Literal

import msgspec

from spmd_tx.options import AUTO, FROM_ZERO, PLAN, ByteSize, Heading


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the options of sampling."""

    sampler_slots: Annotated[
        int, Heading("Sampling"), "Saved versions that are on the device at once, for sampling.", PLAN
    ] = 8
    decode_rows: Annotated[int, "Sequences sampled at once, per data shard, if memory allows.", PLAN] = 128
    decode_steps: Annotated[int, "Tokens sampled per sequence before new sequences can join.", PLAN] = 16
    page_size: Annotated[int, "Tokens per page of the key-value cache.", PLAN] = 16
    batch_invariant: Annotated[
        bool,
        "Make samples and their log-probabilities independent, to the last bit, of other requests, cached "
        "prompts and restarts; sampling is slower.",
    ] = False
    speculation: Annotated[
        Literal["off", "auto", "mtp"],
        "auto: a step of few sequences reads ahead what other answers to the prompt, or the sequence itself, "
        "have had in a like place. So it draws several tokens at once, where that is likely to pay. The "
        "tokens are the same. mtp: it also reads what the model's own layer for multi-token prediction "
        "expects (DeepSeek-V3, GLM-4.5 and Qwen3.5, and later ones).",
        PLAN,
    ] = "off"
    kv_cache_tokens: Annotated[
        int, FROM_ZERO, "Tokens in the key-value cache, per data shard; 0 uses the memory that is left.", PLAN
    ] = 0
    state_cache: Annotated[
        ByteSize,
        "Memory of each device for states of cached prompts, such as 4GiB, of models whose layers keep "
        "states (Qwen3.5, gpt-oss); auto keeps as many as --decode-rows.",
        PLAN,
    ] = AUTO
