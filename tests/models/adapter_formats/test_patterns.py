"""Patterns match as Python's own do, and none takes long."""

import re

import pytest

from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_formats.patterns import Pattern

NAMES = [
    f"model.layers.{at}.{part}_proj" for at in (0, 3, 12) for part in ("self_attn.q", "self_attn.k", "mlp.up")
]
NAMES += ["model.language_model.layers.1.self_attn.q_proj", "lm_head", "", "a-b_c"]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp|ffn).*?(?:q_proj|k_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))"
)


@pytest.mark.parametrize(
    "expression",
    [
        UNSLOTH,
        "q_proj",
        r"^model\.layers\.3\.self_attn\.q_proj$",
        r"layers\.[0-3]\..*(q|k)_proj",
        r".*\.layers\.(?:1|2[0-9])\.[a-z_]+\.[^.]+",
        r"layers\.\d{1,2}\..*?q_proj",
        r"(x?)*",
        r"[^\d]+\d.*",
        r"\w+",
        r"a\Bb|a\b-b_c|[\w-]+",
        "",
        r"m{0,3}.+d{2,}",
        r"(?P<part>q|k)_proj",
        "((((((((((lm_head))))))))))",
    ],
)
def test_a_pattern_matches_what_pythons_does(expression):
    pattern = Pattern(expression)
    for name in NAMES:
        assert pattern.matches(name) == bool(re.fullmatch(expression, name)), name
        assert pattern.matches_end(name) == bool(re.match(rf"(.*\.)?({expression})$", name)), name


@pytest.mark.parametrize(
    "expression",
    ["(a+)+$", "(a|a)*$", "((((((a?)*)*)*)*)*)*b", "(((a?){10}){10}){10}b", "(a*)*b"],
)
def test_a_pattern_that_would_take_python_for_ever_is_matched(expression):
    assert not Pattern(expression).matches("a" * 200 + "c")


@pytest.mark.parametrize(
    "expression",
    [
        "(?=a)",
        "(a",
        "a)",
        "a**",
        r"(a)\1",
        "[a",
        "a++",
        "*",
        "(?<=a)b",
        "((((((a?){50}){50}){50}){50}){50}){50}",
        "a{1001}",
        r"(?:[\w\W]{900}|x){2}",
        "a" * 2001,
        "\\",
    ],
)
def test_what_is_not_read_is_refused_by_its_name(expression):
    with pytest.raises(InvalidRequest, match=re.escape(repr(expression[:150])[:-1])):
        Pattern(expression)
