"""Constrained answers of a real server, through OpenAI's client."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.sdk.examples import SECONDS, drawn, random_tokens, sample
from tests.sdk.server import BASE_MODEL

ASK = [{"role": "user", "content": "Who?"}]
PERSON = {
    "type": "object",
    "properties": {
        "n": {"type": "string", "maxLength": 2},
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["n", "a"],
    "additionalProperties": False,
}


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture
def client(live_server):
    url = f"{live_server.url}/oai/api/v1"
    with openai.OpenAI(base_url=url, api_key="tml-test", timeout=SECONDS, max_retries=0) as client:
        yield client


@pytest.fixture
def ask(client):
    def ask(**options):
        options = {"model": BASE_MODEL, "messages": ASK, "max_tokens": 60, "seed": 3} | options
        return client.chat.completions.create(**options)

    return ask


def test_an_answer_is_json_of_its_schema(ask):
    answers = ask(n=8, response_format=form(PERSON), temperature=0.7)
    # Reasoning is free, and this model seldom ends it.
    finished = [choice for choice in answers.choices if choice.finish_reason == "stop"]
    assert finished
    for choice in finished:
        person = json.loads(choice.message.content)
        assert set(person) == {"n", "a"}
        assert isinstance(person["a"], int)
        assert json.dumps(person, ensure_ascii=False) == choice.message.content


def test_the_same_seed_gives_the_same_answer_whole_or_in_a_stream(ask):
    first, again = (ask(response_format=form(PERSON)).choices[0].message.content for _ in range(2))
    events = ask(response_format=form(PERSON), stream=True)
    streamed = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert first == again == streamed


def test_a_text_matches_its_regular_expression_or_grammar(client, ask):
    answer = ask(extra_body={"regex": "(yes|no)/[0-9]{2}"}).choices[0].message.content
    assert re.fullmatch("(yes|no)/[0-9]{2}", answer)
    lark = 'start: A "-" A\nA: /[ab]{3}/'
    answer = ask(extra_body={"grammar": lark}, temperature=0.0).choices[0].message.content
    assert re.fullmatch("[ab]{3}-[ab]{3}", answer)
    completion = client.completions.create(
        model=BASE_MODEL, prompt="one", max_tokens=30, extra_body={"regex": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", completion.choices[0].text)


def test_logprobs_are_those_of_the_free_model(ask):
    """So the forced token may be very unlikely, and the likeliest ones need not be allowed."""
    choice = ask(response_format=form(PERSON), logprobs=True, top_logprobs=3).choices[0]
    assert min(each.logprob for each in choice.logprobs.content) < -3
    for each in choice.logprobs.content:
        assert each.logprob <= each.top_logprobs[0].logprob + 1e-5


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def test_tokens_of_which_a_grammar_left_no_choice_are_marked(ask):
    asked = {"extra_body": {"regex": "(yes|no)/hello[ab]", **NO_THINKING}, "logprobs": True, "seed": 5}
    whole = ask(**asked).choices[0].logprobs.content
    marked = [(each.token, getattr(each, "forced", False)) for each in whole]
    forced = "".join(token for token, is_forced in marked if is_forced)
    assert "/hello" in forced
    assert not any(is_forced for token, is_forced in marked if token in ("a", "b", "yes", "y", "no", "n"))
    events = [event.choices[0].logprobs for event in ask(**asked, stream=True) if event.choices]
    streamed = [each for logprobs in events if logprobs for each in logprobs.content]
    assert [getattr(each, "forced", False) for each in streamed] == [is_forced for _, is_forced in marked]


@pytest.mark.parametrize(
    "options, param, said",
    [
        (
            {"response_format": form({"type": "nonsense"})},
            None,
            "the type nonsense, which JSON does not have",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "has no schema"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"extra_body": {"regex": "a", "grammar": "start: A"}}, "regex", "regular expression, not both"),
        ({"extra_body": {"regex": "("}}, None, "cannot be read: unclosed group"),
        ({"extra_body": {"grammar": "start: nothing"}}, None, 'names "nothing", which has no rule'),
        ({"extra_body": {"regex": "a" * (300 << 10)}}, None, "the limit grammar_bytes"),
    ],
)
def test_what_cannot_be_followed_is_refused(ask, options, param, said):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(**options)
    assert said in refused.value.body["message"]
    assert refused.value.body["param"] == param


def test_a_request_without_a_grammar_draws_the_same_beside_those_with_one(ask, base_sampler):
    params = drawn(max_tokens=60, seed=5)
    alone = sample(base_sampler, random_tokens(9, seed=4), params).tokens
    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(ask, n=4, extra_body={"regex": "[a-z0-9]{50}"}) for _ in range(2)]
        assert sample(base_sampler, random_tokens(9, seed=4), params).tokens == alone
        assert all(other.result().choices for other in others)
