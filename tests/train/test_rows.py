import json

import pytest

from spmd_tx.errors import StartError
from spmd_tx.train.rows import ChatRow, CompletionRow, PreferenceRow, TextRow, read_row, read_rows

ASKED, SAID, OTHER = (
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "assistant", "content": "No."},
)


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"messages": [ASKED, SAID]}, ChatRow([ASKED, SAID])),
        ({"messages": [ASKED, SAID], "tools": [{"name": "f"}]}, ChatRow([ASKED, SAID], [{"name": "f"}])),
        ({"prompt": "a", "completion": "b"}, CompletionRow("a", "b")),
        ({"text": "a"}, TextRow("a")),
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, PreferenceRow([ASKED], [SAID], [OTHER])),
        ({"chosen": [ASKED, SAID], "rejected": [ASKED, OTHER]}, PreferenceRow([ASKED], [SAID], [OTHER])),
    ],
)
def test_a_row_has_one_of_four_shapes(row, expected):
    assert read_row(json.dumps(row).encode(), "data:1") == expected


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "data:3 is not JSON"),
        ("\xff", "data:3 is not JSON"),
        ("[1]", r"data:3 is \[1\]; a row is a JSON object"),
        ('{"question": 1}', "data:3 has the keys question; a row is one of"),
        ('{"text": 1}', "text of data:3 is 1; it must be a string"),
        ('{"completion": "a"}', "prompt of data:3 is null; it must be a string"),
        ('{"messages": []}', r"messages of data:3 is \[\]; it must be a list of messages"),
        ('{"messages": ["a"]}', 'messages of data:3 has "a"; a message has a role and a content'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message of the role assistant"),
        ('{"messages": [{"role": "assistant"}], "tools": 1}', "tools of data:3 is 1; it must be a list"),
        ('{"chosen": "a", "rejected": "b"}', "no prompt, and chosen and rejected share no first message"),
        ('{"chosen": "a", "prompt": "b"}', "rejected of data:3 is null; it must be a list of messages"),
    ],
)
def test_a_line_that_is_no_row_is_named_with_the_remedy(line, message):
    with pytest.raises(StartError, match=message):
        read_row(line.encode("latin-1"), "data:3")


def test_a_file_has_rows_of_one_kind_and_at_least_one(tmp_path):
    data = tmp_path / "data.jsonl"
    with pytest.raises(StartError, match=r"cannot read .*data\.jsonl: No such file"):
        read_rows(data)
    data.write_text("\n \n")
    with pytest.raises(StartError, match=r"has no rows; write one JSON object per line"):
        read_rows(data)
    data.write_text('{"text": "a"}\n\n{"chosen": "a", "rejected": "b", "prompt": "c"}\n')
    with pytest.raises(StartError, match="preferences and other rows"):
        read_rows(data)
    data.write_text('{"text": "a"}\r\n\n{"prompt": "c", "completion": "b"}')
    assert read_rows(data) == [TextRow("a"), CompletionRow("c", "b")]
