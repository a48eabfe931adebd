"""Fields of OpenAI's requests that have no effect here: which are taken, with which values, and why. Pure.

A field without an entry is refused by its name: it would change an answer elsewhere, or is misspelled.
"""

from typing import Any, Final

import msgspec
from msgspec import Raw

from spmd_tx.coordinator.http.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from spmd_tx.coordinator.http.text_generation.field_checks import HarmlessFields

# They never change an answer, whatever their value.
LABELS: Final = {
    "metadata": "labels of stored completions, and none are stored",
    "user": "names the caller's user; owners are known by their keys",
    "safety_identifier": "the same",
    "prompt_cache_key": "routes calls to a cache; prefixes are always cached here",
    "prompt_cache_retention": "the same",
    "prompt_cache_options": "the same",
    "cache_salt": "separates caches; owners never share one here",
    "prediction": "text that would only make the answer come sooner",
    "spaces_between_special_tokens": "the tokenizers library never adds any",
}

# The values that ask for what happens anyway. No values: the field is known, and never offered.
DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    # of OpenAI's, in both requests
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "stream_options.include_obfuscation": (False,),
    "stream_options.continuous_usage_stats": (False,),
    # of OpenAI's completions
    "suffix": ("",),
    "best_of": (1,),
    # of OpenAI's chats
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
    # of other servers of open models
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "return_tokens_as_token_ids": (False,),
    "detokenize": (True,),
    "priority": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
}
# Texts of prompts get the tokenizer's special tokens; a chat template writes its own.
SPECIAL_TOKENS = "add_special_tokens"

# What to do instead.
REMEDIES: Final = {
    "tools": "send them to chat/completions",
    "functions": "send them to chat/completions as tools",
    "response_format": "send it to chat/completions, or set regex or grammar",
    "guided_json": "send the schema to chat/completions as response_format",
    "guided_regex": "send it as regex",
    "guided_grammar": "send it as grammar",
    "structured_outputs": "set response_format, regex or grammar",
    "documents": "send them as chat_template_kwargs.documents, if the chat template has that variable",
    "max_completion_tokens": "use max_tokens",
    "top_logprobs": "set logprobs to the number",
    "best_of": "set n, and choose",
    "stop_token_ids": "send their texts as stop, or sample with the Tinker API",
    "ignore_eos": "sample with the Tinker API, whose stop may be empty",
    "skip_special_tokens": "set return_token_ids, and decode the tokens",
    "prompt_logprobs": "set echo and logprobs in completions, which also score the tokens of a prompt",
}


SERVED: Final = {
    CompletionRequest: HarmlessFields(frozenset(LABELS), DEFAULTS | {SPECIAL_TOKENS: (True,)}, REMEDIES),
    ChatRequest: HarmlessFields(
        frozenset(LABELS),
        DEFAULTS | {SPECIAL_TOKENS: (False,)},
        REMEDIES,
        hint="a variable of the chat template belongs in chat_template_kwargs",
    ),
}


def check(body: bytes, request: CompletionRequest | ChatRequest) -> None:
    """Refuse fields of a request's body that would be ignored otherwise. Raises WrongField."""
    harmless = SERVED[type(request)]
    harmless.check(body, type(request))
    if request.stream_options is not None:
        options = msgspec.json.decode(body, type=dict[str, Raw])["stream_options"]
        harmless.check(options, StreamOptions, within="stream_options.")
