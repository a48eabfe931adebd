import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.text import prompt_texts, token_texts
from spmd_tx.coordinator.text.model_text import LazyModelText, ModelText
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.demo import tiny_model

TEXTS = [
    "hello world",
    "Grüße, 你好 😀😀!",
    " leading and  double spaces\n",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_make_up_the_text(tokenizer, text):
    tokens = tokenizer.encode(text).ids
    pieces = token_texts.pieces(tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text
    assert token_texts.texts(tokenizer, [tokens, tokens]) == [text, text]


def test_tokens_of_images_are_one_word(tokenizer):
    before, behind = tokenizer.encode("hello").ids, tokenizer.encode(" world").ids
    tokens = [*before, -7, -8, -9, *behind]
    assert token_texts.texts(tokenizer, [tokens, before]) == ["hello[image] world", "hello"]
    pieces = token_texts.pieces(tokenizer, tokens)
    assert len(pieces) == len(tokens)
    assert pieces[len(before) :][:3] == ["[image]", "", ""]
    assert "".join(pieces) == "hello[image] world"


def test_a_character_of_several_tokens_is_the_last_ones(tokenizer):
    tokens = tokenizer.encode("x😀y").ids
    pieces = token_texts.pieces(tokenizer, tokens)
    assert len(tokens) > 3
    assert pieces == ["x", *[""] * (len(tokens) - 3), "😀", "y"]


def test_bytes_of_no_character_are_shown_as_such(tokenizer):
    half = tokenizer.encode("😀").ids[:-1]
    assert token_texts.pieces(tokenizer, half)[-1].startswith(token_texts.HALF_CHARACTER)
    assert "".join(token_texts.pieces(tokenizer, [*half, *tokenizer.encode("end").ids])).endswith("end")


def test_the_space_of_a_first_token_is_kept():
    tokenizer = Tokenizer(WordLevel({"a": 0, "▁a": 1, "▁b": 2, "?": 3}, unk_token="?"))
    tokenizer.decoder = decoders.Metaspace()
    assert token_texts.texts(tokenizer, [[2, 1]]) == ["b a"]
    assert token_texts.pieces(tokenizer, [2, 1]) == [" b", " a"]


@pytest.fixture
async def of_model(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(tiny_model.CHAT_TEMPLATE)
    text = ModelText(tokenizer, None)
    texts = PromptTexts(tmp_path, LazyModelText(lambda: text), 1 << 20, Bounds())
    yield texts
    await texts.close()


@pytest.mark.parametrize("short", [prompt_texts.SHORT_TOKENS, 0], ids=["in a thread", "in a child"])
async def test_tokens_become_the_same_text_wherever_it_is_made(of_model, tokenizer, short, monkeypatch):
    monkeypatch.setattr(prompt_texts, "SHORT_TOKENS", short)
    sequences = [tokenizer.encode(text).ids for text in TEXTS]
    assert await of_model.decode(sequences) == TEXTS
    assert await of_model.pieces(sequences) == [token_texts.pieces(tokenizer, each) for each in sequences]
