"""Vocabularies of Mistral and Moonshot give the tokens that their makers' own libraries give."""

import base64
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_tx.coordinator.text.model_text import load_model_text
from spmd_tx.coordinator.text.rank_vocabularies import read_tekken, read_tiktoken
from spmd_tx.errors import StartError
from tests.support.rank_files import KIMI_TOKENS, TEKKEN_SPECIALS, write_tekken, write_tiktoken

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rank_vocabularies.json").read_bytes())
TOKENS = [base64.b64decode(token) for token in GOLDEN["tokens"]]
PLAIN = 480  # tokens
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    write_tiktoken(path := tmp_path_factory.mktemp("kimi"), TOKENS[:PLAIN])
    return path


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    write_tekken(path := tmp_path_factory.mktemp("mistral"), TOKENS, 512)
    return path


@pytest.fixture(params=["kimi", "mistral"])
def directory(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizers(kimi, mistral):
    return [read_tiktoken(kimi / "tiktoken.model").tokenizer, read_tekken(mistral / "tekken.json").tokenizer]


@pytest.mark.parametrize("maker", [0, 1], ids=["tiktoken", "tekken"])
def test_texts_have_the_tokens_of_the_makers_library(tokenizers, maker):
    tokenizer, expected = tokenizers[maker], GOLDEN[("tiktoken", "tekken")[maker]]
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in GOLDEN["texts"]]
    assert found == expected
    assert len({number for ids in found for number in ids}) > 300


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_tokens_lead_back_to_any_text(tokenizers, text):
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def merged(piece, tokens):
    """What ranks mean: of all neighbours whose texts make a token, the first with the lowest rank merge."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks.get(parts[at] + parts[at + 1], len(ranks)), at) for at in range(len(parts) - 1)]
        rank, at = min(pairs, default=(len(ranks), 0))
        if rank == len(ranks):
            return [ranks[part] for part in parts]
        parts[at : at + 2] = [tokens[rank]]


@pytest.mark.parametrize("seed", range(10))
def test_tokens_of_any_ranks_are_merged_by_them_however_a_token_can_be_cut_in_two(tmp_path, seed):
    draw = random.Random(seed)
    longer = [b"a", b"b"]
    while len(longer) < 30:
        if (token := draw.choice(longer) + draw.choice(longer)) not in longer and len(token) < 10:
            longer.append(token)
    draw.shuffle(longer)
    tokens = [bytes([byte]) for byte in range(256)] + [token for token in longer if len(token) > 1]
    write_tiktoken(tmp_path, tokens)
    tokenizer = read_tiktoken(tmp_path / "tiktoken.model").tokenizer
    for _ in range(50):
        text = "".join(draw.choices("ab", k=draw.randint(1, 25)))
        assert tokenizer.encode(text).ids == merged(text.encode(), tokens), text


@pytest.mark.parametrize(
    "text, words",
    [
        ("世界Hello世界", ["世界", "Hello", "世界"]),
        ("I'LL don't", ["I'LL", " don't"]),
        ("1234567", ["123", "456", "7"]),
        ("a\n\n  b", ["a", "\n\n", " ", " b"]),
    ],
)
def test_kimi_cuts_words_as_its_own_code_does(tokenizers, text, words):
    split = tokenizers[0].pre_tokenizer[0].pre_tokenize_str(text)
    assert [word for word, _ in split] == words


def test_every_number_of_the_vocabulary_has_a_text_and_roles_add_none(tokenizers, kimi, mistral):
    for tokenizer in (*tokenizers, load_model_text(kimi).tokenizer, load_model_text(mistral).tokenizer):
        assert tokenizer.get_vocab_size() == 512
        assert {*tokenizer.get_vocab().values()} == set(range(512))


def test_special_tokens_are_what_the_config_says(kimi):
    text = load_model_text(kimi)
    marked = "<|im_user|>hi<|tool_call_begin|>x<|reserved_token_485|>"
    ids = text.tokenizer.encode(marked).ids
    assert ids[0] == PLAIN + 3
    assert text.tokenizer.decode(ids, skip_special_tokens=False) == marked
    assert text.tokenizer.decode(ids) == "hi<|tool_call_begin|>x"
    assert text.eos_token_ids == (PLAIN + 1,)
    assert [text.tokenizer.id_to_token(PLAIN + place) for place in KIMI_TOKENS] == [*KIMI_TOKENS.values()]


def test_a_prompt_of_mistral_begins_with_its_first_token(mistral, kimi):
    assert load_model_text(mistral).tokenizer.encode("a").ids == [1, TEKKEN_SPECIALS + ord("a")]
    assert len(load_model_text(kimi).tokenizer.encode("a").ids) == 1


@pytest.mark.parametrize("named", [True, False])
def test_mistrals_own_tokens_are_known_also_where_the_file_does_not_name_them(tmp_path, named):
    write_tekken(tmp_path, TOKENS, 512, named=named)
    text = load_model_text(tmp_path)
    assert text.eos_token_ids == (2,)
    expected = [1, 3, 4] if named else [1, 3, 4, 17]
    written = "<s>[INST][/INST]" + ("" if named else "[SYSTEM_PROMPT]")
    assert text.tokenizer.encode(written, add_special_tokens=False).ids == expected
    assert text.tokenizer.decode(expected) == ""
    assert text.tokenizer.id_to_token(31) == "<SPECIAL_31>"


def test_a_template_beside_the_vocabulary_is_used(directory, tmp_path):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    rendered = load_model_text(tmp_path).template.render(HELLO, {}, 1000, 10.0)
    assert rendered in ("[BOS]Hello[EOS]", "<s>Hello</s>")


def test_code_for_a_tokenizer_is_not_run(kimi, tmp_path):
    for file in kimi.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenization_kimi.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')")
    load_model_text(tmp_path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "content, told",
    [
        (b"IQ== 0\n", "there is no token for the byte 0x00, and texts may have any"),
        (b"IQ== 0\nIg== 2\n", "the ranks of 2 tokens are not 0 to 1, each once"),
        (b"IQ==\n", "not enough values to unpack"),
        (b"!!!! x\n", "invalid literal for int"),
    ],
)
def test_a_damaged_tiktoken_file_is_refused(kimi, tmp_path, content, told):
    (tmp_path / "tokenizer_config.json").write_bytes((kimi / "tokenizer_config.json").read_bytes())
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(StartError, match=rf"cannot read {tmp_path}/\S+: .*{told}.*restore"):
        load_model_text(tmp_path)


def test_a_tokenizer_whose_rules_are_not_known_is_named(kimi, tmp_path):
    (tmp_path / "tiktoken.model").write_bytes((kimi / "tiktoken.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "OtherTokenizer"}')
    with pytest.raises(
        StartError, match=r"of the tokenizer 'OtherTokenizer' .*known are TikTokenT.*Add a tokenizer.json"
    ):
        load_model_text(tmp_path)


@pytest.mark.parametrize(
    "content, told",
    [
        ('{"config": {}, "vocab": []}', "pattern"),
        ("[]", "list indices"),
        ("{", "Expecting property name"),
        ('{"config": {"pattern": "x"}, "vocab": [{"token_bytes": "IQ=="}]}', "no token for the byte 0x00"),
        (
            '{"config": {"pattern": "x"}, "vocab": [], "special_tokens": [{"rank": 7, "token_str": "a"}]}',
            r"the ranks of special_tokens are \[7\]",
        ),
        (
            '{"config": {"pattern": "x", "default_num_special_tokens": 3}, "vocab": []}',
            "default_num_special_tokens is 3, but there are 20 special tokens",
        ),
    ],
)
def test_a_damaged_tekken_file_is_refused(tmp_path, content, told):
    (tmp_path / "tekken.json").write_text(content)
    with pytest.raises(StartError, match=rf"cannot read {tmp_path}/\S+: .*{told}.*restore"):
        load_model_text(tmp_path)
