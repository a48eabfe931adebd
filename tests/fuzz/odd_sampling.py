"""Odd requests that sample by the routes of the SDK, and that ask for results."""

from typing import Any

from tests.fuzz.calls import BASE_MODEL, Call, Names, pick
from tests.fuzz.odd_training import posted
from tests.fuzz.oddities import Oddities


def create_sampler(odd: Oddities, names: Names) -> Call:
    body: dict[str, Any] = {"session_id": names.session, "sampling_session_seq_id": names.next_other()}
    body["base_model" if odd.chance(0.5) else "model_path"] = BASE_MODEL
    if "model_path" in body:
        body["model_path"] = names.checkpoint("sampler_weights")
    return posted(odd, "create_sampling_session", body)


def sample(odd: Oddities, names: Names) -> Call:
    tokens = odd.tokens()
    params: dict[str, Any] = {
        "max_tokens": odd.random.randint(1, 6),
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }
    if odd.chance(0.5):
        params |= {"seed": 5, "stop": odd.random.choice([["a"], [3, 4], "b", ["\n", "x"]])}
    body = {
        "sampling_session_id": names.sampler,
        "seq_id": names.next_sample(),
        "num_samples": odd.random.choice([1, 3, 40]),
        "prompt": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
        "sampling_params": params,
    }
    for key, value in _wishes(odd, tokens).items():
        if odd.chance(0.3):
            body[key] = odd.spoilt({"one": value})["one"] if odd.chance(0.3) else value
    if "prompt_logprobs_last_n" in body and odd.chance(0.9):
        body["prompt_logprobs"] = True
    if odd.chance(0.3):
        body["sampling_params"] = odd.spoilt(params)
    return posted(odd, "asample", body, 0.25)


def _wishes(odd: Oddities, tokens: list[int]) -> dict[str, Any]:
    rows = len(tokens) - 1
    targets = {"data": tokens[1:], "dtype": "int64", "shape": [rows, 1]}
    if odd.chance(0.5):
        targets |= {"sparse_crow_indices": list(range(rows + 1)), "sparse_col_indices": [0] * rows}
    return {
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 2,
        "topk_prompt_logprobs": 3,
        "topk_sample_logprobs": 2,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": targets,
        "record_stability_info": True,
    }


def ask_for_result(odd: Oddities, names: Names) -> Call:
    """Retrieve, cancel, and let go."""
    request_id = pick(odd.random, names.requests, "none")
    match odd.random.randrange(4):
        case 0:
            call = posted(
                odd, "retrieve_future", {"request_id": request_id, "allow_metadata_only": True}, 0.4
            )
        case 1:
            call = posted(odd, "cancel_future", {"request_id": request_id}, 0.3)
        case 2:
            call = posted(odd, "join_sampling_session", {"sampling_session_id": names.sampler}, 0.3)
        case _:
            target = {
                "type": "sampling_session",
                "sampling_session_id": names.sampler,
                "cloned_sampler_id": 0,
            }
            body = {
                "target": target,
                "prev_cursor": 0,
                "timeout": 0.01,
                "retrieved_request_ids": [request_id],
            }
            call = posted(odd, "retrieve_futures", body)
    return Call(call.method, call.path, call.body, call.content_type, is_poll=True)
