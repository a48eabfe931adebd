"""Sample from a model, and score texts: every output that sampling has, one by one."""

import argparse
from typing import Any

import tinker
from tinker import types
from transformers import AutoTokenizer

SECONDS = 600  # until an answer is given up


def main() -> None:
    """Print one line for each output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="the model that the server serves")
    parser.add_argument("--tokenizer", help="its folder, if the model is not served under its own name")
    parser.add_argument("--api-key", default="tml-local")
    options = parser.parse_args()
    service = tinker.ServiceClient(base_url=options.base_url, api_key=options.api_key)
    sampler = service.create_sampling_client(base_model=options.base_model).result(SECONDS)
    folder = options.tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder) if folder else sampler.get_tokenizer()
    question = tokenizer.encode("The capital of France is Paris. The capital of Italy is")

    def ask(
        tokens: list[int], num_samples: int = 1, **more: Any
    ) -> Any:  # what is there depends on what was asked
        params = types.SamplingParams(max_tokens=12, temperature=0.7, seed=1, stop=["."])
        prompt = types.ModelInput.from_ints(tokens)
        return sampler.sample(prompt, num_samples, params, **more).result(SECONDS)

    answers = ask(question, num_samples=2, topk_sample_logprobs=3).sequences
    for answer in answers:
        print(f"answer ({answer.stop_reason}): {tokenizer.decode(answer.tokens)!r}")
    (token, logprob), *_ = answers[0].topk_logprobs[0]
    print(f"likeliest first token: {tokenizer.decode([token])!r} with {logprob:.2f} nats")
    again = ask(question, num_samples=2).sequences
    print(f"the same seed gives the same tokens: {again[0].tokens == answers[0].tokens}")

    scored = ask(question, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=4)
    print(f"the prompt has {sum(scored.prompt_logprobs[1:]):.2f} nats")
    drawn = scored.prompt_alt_tokens.tokens.tolist()[-1]
    print(f"in place of its last token: {tokenizer.decode(scored.topk_prompt_logprobs[-1][0][0])!r}, {drawn}")

    # What is each of these worth as the next token? One row per token of the prompt but the first.
    candidates = [tokenizer.encode(text)[0] for text in (" Rome", " Oslo")]
    unfinished = [*question, candidates[0]]
    rows = [[-1, -1]] * (len(unfinished) - 2) + [candidates]
    named = types.TensorData(
        data=[each for row in rows for each in row], dtype="int64", shape=[len(rows), len(candidates)]
    )
    logprobs = ask(unfinished, target_prompt_logprobs=named).target_prompt_logprobs.tolist()[-1]
    print("Rome {:.2f}, Oslo {:.2f} nats".format(*logprobs))

    conversation = [*question, *answers[0].tokens, *tokenizer.encode(" And that of Spain?")]
    ask(conversation)
    found = ask([*conversation, *tokenizer.encode(" It is")]).prompt_cache_hit_tokens
    print(f"of a conversation of {len(conversation)} tokens {found} did not have to be read again")
    service.close("success").result(SECONDS)


if __name__ == "__main__":
    main()
