import pytest

from tests.prose.source import Hit, hits

DOCSTRING = '''"""Reads pages.

They are opened in order to be read.
"""
'''


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (DOCSTRING, [Hit(3, "in order to", "to")]),
        ("def f():\n    '''Tells how far it is.'''\n", [Hit(2, "Tells how", "says how")]),
        ("count = 1  # pages, e.g. of prompts\n", [Hit(1, "e.g.", "for example")]),
        ("# a microbatch\n# has has rows\n", [Hit(1, "microbatch", "micro-batch"), Hit(2, "has has", "has")]),
        ("# weights are initialised here\n", [Hit(1, "initialised", "initialized")]),
        ("# rows of a `Lora`, and ``utilise`` of ours\n", []),  # code has names, not prose
        ("text = 'in order to'\n", []),  # `make prose` reads what is said to users
        ("# Each row has its own pages.\n", []),
    ],
)
def test_words_of_the_list_are_found_in_docstrings_and_comments(source, expected):
    assert hits(source) == expected
