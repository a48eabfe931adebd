import asyncio
import contextlib
import http.client
import json
import sqlite3
import time
from pathlib import Path

import httpx
import openai
import pytest
from tinker import types
from tokenizers import Tokenizer

from spmd_tx.coordinator.agent.layout import TOKENIZER
from tests.sdk.examples import CONTEXT, SECONDS, prompt, random_tokens, train
from tests.sdk.examples import batch as examples
from tests.sdk.server import BASE_MODEL
from tests.support.sdk_process import run_python

PROMPT = random_tokens(10, seed=0)
TOKENS = {"return_token_ids": True}  # besides text
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, 世界!"}]


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    return Tokenizer.from_file(str(model_dir / TOKENIZER))


@pytest.fixture
def url(live_server):
    return f"{live_server.url}/oai/api/v1"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="tml-test", timeout=SECONDS, max_retries=0) as client:
        yield client


@pytest.fixture
def complete(client):
    def complete(text=None, **options):
        options = {"model": BASE_MODEL, "max_tokens": 12, "seed": 7, "extra_body": TOKENS} | options
        return client.completions.create(prompt=PROMPT if text is None else text, **options)

    return complete


@pytest.fixture
def chat(client):
    def chat(**options):
        options = {"model": BASE_MODEL, "max_tokens": 12, "seed": 7, "messages": HELLO} | options
        return client.chat.completions.create(**options)

    return chat


def drawn(sampler, tokens, num_samples=1, **options):
    """What the Tinker SDK gets."""
    params = types.SamplingParams(**{"max_tokens": 12, "seed": 7} | options)
    return sampler.sample(prompt(tokens), num_samples, params).result(SECONDS).sequences


def counts(usage):
    """Without the tokens that were cached: a second prompt has more of them."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.8, "seed": -3}]
)
def test_a_completion_is_the_sample_that_the_sdk_gets(complete, base_sampler, tokenizer, options):
    completion = complete(n=3, logprobs=0, **options)
    samples = drawn(base_sampler, PROMPT, 3, **options)
    for choice, sample in zip(completion.choices, samples, strict=True):
        assert choice.token_ids == sample.tokens
        assert choice.text == tokenizer.decode(sample.tokens)
        assert choice.logprobs.token_logprobs == pytest.approx(sample.logprobs, abs=1e-5)
        assert choice.finish_reason == sample.stop_reason
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert completion.usage.prompt_tokens == len(PROMPT)
    assert completion.usage.completion_tokens == sum(len(sample.tokens) for sample in samples)


def test_a_text_is_the_same_prompt_as_its_tokens(complete, tokenizer):
    text = "Some text, 42 <|im_start|>"
    by_text, by_tokens = complete(text), complete(tokenizer.encode(text).ids)
    assert by_text.choices[0].token_ids == by_tokens.choices[0].token_ids


@pytest.mark.parametrize(
    "prompts",
    [["One", "Two", "Three"], [[1, 2, 3], [4]], ["One", [1, 2, 3]]],
    ids=["texts", "tokens", "both"],
)
def test_each_prompt_of_a_list_gets_its_choices(complete, prompts):
    together = complete(prompts, n=2)
    alone = [choice for each in prompts for choice in complete(each, n=2).choices]
    assert [choice.token_ids for choice in together.choices] == [choice.token_ids for choice in alone]
    assert [choice.index for choice in together.choices] == list(range(2 * len(prompts)))


def test_a_streamed_completion_is_the_same(complete):
    options = {"n": 2, "max_tokens": 60, "logprobs": 0}
    whole = complete(["One", "Two"], **options)
    events = list(complete(["One", "Two"], stream=True, stream_options={"include_usage": True}, **options))
    assert counts(events[-1].usage) == counts(whole.usage)
    pieces = [event.choices[0] for event in events[:-1]]
    assert len(pieces) > 4, "nothing came before the end"
    for choice in whole.choices:
        mine = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in mine) == choice.text
        assert [token for piece in mine for token in piece.token_ids] == choice.token_ids
        offsets = [offset for piece in mine for offset in piece.logprobs.text_offset]
        assert offsets == choice.logprobs.text_offset
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_a_chat_goes_through_the_chat_template(chat, complete):
    text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in HELLO)
    completion = complete(text + "<|im_start|>assistant\n")
    answer = chat(extra_body=TOKENS)
    assert answer.choices[0].token_ids == completion.choices[0].token_ids
    assert answer.choices[0].message.content == completion.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert counts(answer.usage) == counts(completion.usage)
    in_parts = [HELLO[0], {"role": "user", "content": [{"type": "text", "text": "Hello, 世界!"}]}]
    assert chat(messages=in_parts).choices[0].message.content == answer.choices[0].message.content


def test_a_streamed_chat_is_the_same(chat):
    options = {"n": 2, "max_completion_tokens": 60, "logprobs": True}
    whole = chat(**options)
    events = list(chat(stream=True, stream_options={"include_usage": True}, **options))
    assert counts(events[-1].usage) == counts(whole.usage)
    for choice in whole.choices:
        mine = [e.choices[0] for e in events[:-1] if e.choices[0].index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in mine) == choice.message.content
        logprobs = [each for piece in mine if piece.logprobs for each in piece.logprobs.content]
        assert logprobs == choice.logprobs.content
        assert mine[-1].finish_reason == choice.finish_reason


def test_logprobs_name_the_tokens_that_were_drawn(chat, complete, tokenizer):
    completion = complete(logprobs=0).choices[0]
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in completion.token_ids]
    assert completion.logprobs.tokens == texts
    answer = chat(logprobs=True, extra_body=TOKENS).choices[0]
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in answer.token_ids]
    assert [each.token for each in answer.logprobs.content] == texts
    for each in answer.logprobs.content:
        assert each.logprob <= 0
        assert each.bytes is None or bytes(each.bytes).decode() == each.token
    assert chat().choices[0].logprobs is None


def test_the_likeliest_tokens_are_those_that_the_sdk_gets(complete, chat, base_sampler, tokenizer):
    def named(row):
        return [(tokenizer.decode([token], skip_special_tokens=False), logprob) for token, logprob in row]

    params = types.SamplingParams(max_tokens=12, seed=7)
    future = base_sampler.sample(prompt(PROMPT), 1, params, topk_sample_logprobs=3)
    expected = future.result(SECONDS).sequences[0].topk_logprobs
    completion = complete(logprobs=3).choices[0]
    for row, others, drawn_token in zip(
        expected, completion.logprobs.top_logprobs, completion.logprobs.tokens, strict=True
    ):
        assert {text for text, _ in named(row)} | {drawn_token} == set(others)
        assert max(others.values()) == pytest.approx(row[0][1], abs=1e-5)
    answer = chat(logprobs=True, top_logprobs=3, extra_body=TOKENS).choices[0]
    for place in answer.logprobs.content:
        assert [each.logprob for each in place.top_logprobs] == sorted(
            (each.logprob for each in place.top_logprobs), reverse=True
        )
        assert len(place.top_logprobs) == 3
        assert place.logprob <= place.top_logprobs[0].logprob
    events = [event.choices[0] for event in chat(logprobs=True, top_logprobs=3, stream=True) if event.choices]
    streamed = [each for event in events if event.logprobs for each in event.logprobs.content]
    for place, other in zip(streamed, answer.logprobs.content, strict=True):  # the prompt is cached by now
        assert place.token == other.token
        assert place.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert {each.token: each.logprob for each in place.top_logprobs} == pytest.approx(
            {each.token: each.logprob for each in other.top_logprobs}, abs=1e-5
        )


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("as_list", [False, True], ids=["string", "list"])
def test_text_ends_before_a_stop_string(complete, as_list, streamed):
    text = complete(max_tokens=40, seed=3).choices[0].text
    place = next(n for n in range(5, len(text) - 4) if text[n : n + 4].isascii())
    stop = text[place : place + 4]
    answer = complete(max_tokens=40, seed=3, stop=[stop, "never"] if as_list else stop, stream=streamed)
    choices = [event.choices[0] for event in answer] if streamed else answer.choices
    assert "".join(choice.text for choice in choices) == text[: text.find(stop)]
    assert choices[-1].finish_reason == "stop"


def test_a_checkpoint_is_a_model(complete, client, trainer, service):
    train(trainer, examples(seed=1))
    path = trainer.save_weights_for_sampler("for-openai").result(SECONDS).path
    sampler = service.create_sampling_client(model_path=path).result(SECONDS)
    completion = complete(model=path)
    assert completion.choices[0].token_ids == drawn(sampler, PROMPT)[0].tokens
    assert completion.model == path
    assert {BASE_MODEL, path} <= {model.id for model in client.models.list()}
    assert [client.models.retrieve(name).id for name in (BASE_MODEL, path)] == [BASE_MODEL, path]


def test_a_sampling_session_is_a_model(complete, trainer):
    """Without a checkpoint; its own client and others draw beside each other."""
    train(trainer, examples(seed=1))
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    for _ in range(2):
        answer = complete(model=sampler._sampling_session_id).choices[0]
        assert answer.token_ids == drawn(sampler, PROMPT)[0].tokens
    assert complete().choices[0].token_ids != answer.token_ids


def test_a_checkpoint_that_is_overwritten_is_sampled_as_it_is_now(complete, api):
    model_id, answers = api.create_model(0), []
    for seq_id in (1, 4):
        gradient = api.forward_backward(model_id, seq_id, examples(seq_id))
        step = api.optim_step(model_id, seq_id + 1, learning_rate=0.1)
        name = {"path": "again", "overwrite": True}
        save = api.post("save_weights_for_sampler", model_id=model_id, seq_id=seq_id + 2, **name)
        *_, saved = [api.retrieve(each).json() for each in (step, save["request_id"])]
        assert api.retrieve(gradient).is_success
        answers.append(complete(model=saved["path"], logprobs=0).choices[0].logprobs.token_logprobs)
    assert answers[0] != answers[1]


@pytest.mark.parametrize("length", [10, CONTEXT])
def test_an_echoed_prompt_is_scored_as_the_sdk_scores_it(complete, base_sampler, tokenizer, length):
    tokens = random_tokens(length, seed=3)
    params = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    scored = base_sampler.sample(prompt(tokens), 1, types.SamplingParams(max_tokens=1), **params)
    wanted = scored.result(SECONDS)
    (choice,) = complete([tokens], echo=True, max_tokens=0, logprobs=2).choices
    assert (choice.token_ids, choice.finish_reason) == (tokens, "length")
    assert choice.text == tokenizer.decode(tokens)
    assert choice.logprobs.token_logprobs == wanted.prompt_logprobs
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    for place, top in enumerate(wanted.topk_prompt_logprobs[1:], start=1):
        texts = {
            tokenizer.decode([token], skip_special_tokens=False): score for token, score in reversed(top)
        }
        assert texts.items() <= choice.logprobs.top_logprobs[place].items()
    offsets = choice.logprobs.text_offset
    assert (offsets[0], offsets) == (0, sorted(offsets))


def test_an_echoed_prompt_stands_before_each_of_its_answers(complete):
    two = [PROMPT, random_tokens(6, seed=1)]
    echoed = complete(two, n=2, echo=True, logprobs=0)
    plain = complete(two, n=2, logprobs=0)
    for number, (whole, answer) in enumerate(zip(echoed.choices, plain.choices, strict=True)):
        given = two[number // 2]
        assert whole.token_ids == [*given, *answer.token_ids]
        scores = whole.logprobs.token_logprobs[len(given) :]
        assert scores == pytest.approx(answer.logprobs.token_logprobs, abs=1e-5)
        assert whole.text.endswith(answer.text)
    assert counts(echoed.usage) == counts(plain.usage)


@pytest.mark.parametrize(
    "options, error, complaint",
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "gpt-5"),
        ({"model": "tinker://nobody/sampler_weights/x"}, openai.NotFoundError, "does not exist"),
        ({"model": "tinker://nobody/weights/x"}, openai.BadRequestError, "save_weights_for_sampler"),
        ({"logprobs": 257}, openai.BadRequestError, "logprobs is 257; it must be between 0 and 256"),
        ({"echo": True, "stream": True}, openai.BadRequestError, "echo is not offered for streams"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens is 0"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "presence_penalty"),
        ({"n": 0}, openai.BadRequestError, "n: "),
        ({"temperature": -1}, openai.BadRequestError, "temperature: "),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "too long"),
        ({"prompt": []}, openai.BadRequestError, "at least one prompt"),
        ({"prompt": [1, "two"]}, openai.BadRequestError, "mixes"),
        ({"prompt": [10**6]}, openai.BadRequestError, "1000000"),
        ({"stream": True, "prompt": ""}, openai.BadRequestError, "the prompt is empty"),
    ],
)
def test_what_cannot_be_completed_is_refused_in_openais_shape(complete, options, error, complaint):
    text = options.pop("prompt", None)
    with pytest.raises(error, match=complaint) as caught:
        complete(text, **options)
    assert caught.value.type in ("invalid_request_error", "not_found_error")
    assert complaint in caught.value.body["message"]


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"messages": []}, "messages: "),
        ({"messages": [{"content": "hello"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"tools": [{"type": "function"}]}, "has no function; send functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format has no schema"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs is -1"),
        ({"top_logprobs": 2}, "only for logprobs"),
    ],
)
def test_what_cannot_be_said_is_refused(chat, options, complaint):
    with pytest.raises(openai.BadRequestError, match=complaint):
        chat(**options)


async def test_many_clients_at_once_get_what_each_gets_alone(url, complete):
    alone = [complete(text, seed=n).choices[0].text for n, text in enumerate("abcdefgh")]
    async with openai.AsyncOpenAI(base_url=url, api_key="tml-test", timeout=SECONDS) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=BASE_MODEL, prompt=text, max_tokens=12, seed=n)
                for n, text in enumerate("abcdefgh")
            )
        )
    assert [answer.choices[0].text for answer in answers] == alone


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_who_hangs_up_cancels_what_was_asked_for(live_server, streamed):
    """It would take long."""
    body = {"model": BASE_MODEL, "prompt": ["a", "b"], "n": 128, "max_tokens": 400, "stream": streamed}
    connection = http.client.HTTPConnection(live_server.url.removeprefix("http://"))
    try:
        headers = {"content-type": "application/json"}
        before = errors(live_server)
        connection.request("POST", "/oai/api/v1/completions", json.dumps(body), headers)
        wait_for(lambda: errors(live_server) == [*before, None, None])
    finally:
        connection.close()
    wait_for(lambda: errors(live_server) == [*before, *["the sample was cancelled by its client"] * 2])
    assert "never retrieved" not in live_server.log


def errors(server):
    """Of all requests, from the first to the last."""
    with contextlib.closing(sqlite3.connect(server.data_dir / "spmd_tx.db")) as database:
        return [error for (error,) in database.execute("SELECT error FROM requests ORDER BY number")]


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_events_end_with_done(url):
    body = {"model": BASE_MODEL, "prompt": "x", "max_tokens": 2, "stream": True}
    response = httpx.post(f"{url}/completions", json=body, timeout=SECONDS)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


def test_the_script_of_the_documentation_runs(live_server):
    script = Path(__file__).parents[2] / "docs" / "examples" / "openai_client.py"
    output = run_python(script, live_server.url, BASE_MODEL)
    assert f"models: {BASE_MODEL}" in output
    for said in ("completion 0 (", "completion 1 (", "chat: ", "tokens were drawn"):
        assert said in output
