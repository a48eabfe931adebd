import pytest
from transformers import PreTrainedTokenizerFast

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.text.chat_template import ChatTemplate
from spmd_tx.coordinator.text.model_text import LazyModelText, ModelText, load_model_text
from spmd_tx.coordinator.text.prompt_texts import SHORT_BYTES, PromptTexts
from spmd_tx.demo import tiny_model
from spmd_tx.errors import InvalidRequest

CONTEXT = 1 << 20
LONG = "hello world, " * 8000  # beyond SHORT_BYTES


class Untouched:
    """A tokenizer whose longest token has 8 bytes; it must not see any text."""

    normalizer = None

    def get_vocab(self, with_added_tokens):
        return {"a": 0, "12345678": 1, "\xf6": 2}


@pytest.fixture
def model_files(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(tiny_model.CHAT_TEMPLATE)
    return tmp_path


@pytest.fixture
def template(tokenizer):
    """A template with this source."""

    def template(source):
        return ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=source))

    return template


@pytest.fixture
async def make(model_files, tokenizer, template):
    made = []

    def make(tokenizer=tokenizer, context=CONTEXT, source=tiny_model.CHAT_TEMPLATE, **bounds):
        text = ModelText(tokenizer, template(source))
        made.append(PromptTexts(model_files, LazyModelText(lambda: text), context, Bounds(**bounds)))
        return made[-1]

    yield make
    for texts in made:
        await texts.close()


@pytest.mark.parametrize("text", ["x" * 81, "\xf6" * 41, "x" * (1 << 20)], ids=len)
async def test_a_text_that_no_tokens_of_the_context_can_be_is_refused_untouched(make, text):
    with pytest.raises(
        InvalidRequest,
        match=r"prompt is too long: \d+ tokens > 9 maximum .* bytes, which are \d+ tokens at least",
    ):
        await make(Untouched(), context=10).tokens([text])


async def test_a_conversation_is_measured_as_the_template_writes_it(make):
    template = "{% for _ in range(9) %}{{ messages[0].content }}{% endfor %}"
    texts = make(Untouched(), context=10, source=template)
    with pytest.raises(InvalidRequest, match="it has 90 bytes"):
        await texts.of_conversation([{"role": "user", "content": "x" * 10}], {})


async def test_all_texts_of_a_call_are_bounded_together(make):
    texts = make(Untouched(), prompt_text_bytes=2048)
    with pytest.raises(InvalidRequest, match="limit prompt_text_bytes"):
        await texts.tokens(["x" * 1024] * 3)
    with pytest.raises(InvalidRequest, match="limit prompt_text_bytes"):
        await texts.of_conversation([{"role": "user", "content": "x"}], {"more": "x" * 2048})


async def test_the_tokens_are_those_of_the_tokenizer_wherever_they_are_made(make, model_files, tokenizer):
    made, theirs = make(), PreTrainedTokenizerFast.from_pretrained(model_files, local_files_only=True)
    for texts in (["hello"], ["a", LONG], [LONG, "\xf6\ufffd\0"], []):
        tokens = await made.tokens(texts)
        assert tokens == [tokenizer.encode(text).ids for text in texts]
        assert tokens == [theirs(text).input_ids for text in texts]


async def test_a_conversation_is_the_same_wherever_it_is_rendered(make, model_files, tokenizer, template):
    """The last one becomes long by what the template adds."""
    source, options = "{{ number }}" + tiny_model.CHAT_TEMPLATE, {"number": 10**30}
    (model_files / "chat_template.jinja").write_text(source)
    texts, renderer = make(source=source), template(source)
    for content in ("hello", LONG, "x" * (SHORT_BYTES - 90)):
        messages = [{"role": "user", "content": content}]
        text = renderer.render(messages, options, 1 << 20, 10.0)
        wanted = tokenizer.encode(text, add_special_tokens=False).ids
        assert await texts.of_conversation(messages, options) == wanted


async def test_a_long_text_beyond_the_context_is_refused_by_its_tokens(make):
    with pytest.raises(InvalidRequest, match="tokens and the context holds 30000"):
        await make(context=30_000).tokens([LONG])


@pytest.mark.parametrize("bounds", [{"text_seconds": 0.01}, {"text_memory_bytes": 1 << 20}], ids=str)
async def test_a_text_that_takes_too_much_fails_its_own_call(make, bounds):
    with pytest.raises(InvalidRequest, match=r"could not be tokenized within .*; shorten it"):
        await make(**bounds).tokens([LONG])


async def test_tokens_are_those_of_transformers(make, model_files):
    theirs = PreTrainedTokenizerFast.from_pretrained(model_files, local_files_only=True)
    text = "hello <|im_end|> w\xf6rld\n\n 12345 \U0001f600"
    messages = [{"role": "user", "content": text}]
    assert await make().tokens([text]) == [theirs(text).input_ids]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True).input_ids
    assert await make().of_conversation(messages, {}) == wanted


async def test_a_long_conversation_has_the_limits_of_a_short_one(make, model_files):
    (model_files / "chat_template.jinja").write_text("{% for _ in range(99999) %}{{ messages }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="makes this conversation too long: more than 4194304 char"):
        await make().of_conversation([{"role": "user", "content": LONG}], {})
    with pytest.raises(InvalidRequest, match="chat_template_kwargs cannot set chat_template"):
        await make().of_conversation([{"role": "user", "content": LONG}], {"chat_template": "x"})


async def test_a_text_that_takes_too_much_leaves_the_next_alone(make, model_files, tokenizer):
    (model_files / "chat_template.jinja").write_text("{{ 'x' * 10**11 }}")
    texts = make()
    with pytest.raises(InvalidRequest, match=r"could not be tokenized within 30 s and 3.0 GiB"):
        await texts.of_conversation([{"role": "user", "content": LONG}], {})
    assert await texts.tokens([LONG]) == [tokenizer.encode(LONG).ids]


def test_the_longest_token_is_measured_in_bytes(tokenizer, model_files):
    assert ModelText(Untouched(), None).longest_token == 8
    assert load_model_text(model_files).longest_token >= max(len(text) for text in tokenizer.get_vocab())
