import pytest

from spmd_tx.errors import StartError
from spmd_tx.train.environment import load, messages

ASKED = [{"role": "user", "content": "a"}]
REWARD = "def reward(prompt, answer): return 1\n"


@pytest.mark.parametrize("prompt", ["a", ASKED, {"prompt": "a", "x": 1}, {"prompt": ASKED}])
def test_a_prompt_is_a_text_or_a_conversation_with_or_without_more(prompt):
    assert messages(prompt) == ASKED


def test_an_environment_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("PROMPTS = ['a']")
    file = tmp_path / "environment.py"
    file.write_text(f"from beside_it import PROMPTS\nEVAL_PROMPTS = ('b',)\n{REWARD}")
    loaded = load(file)
    assert (loaded.prompts, loaded.held_out, loaded.reward("a", "b")) == (["a"], ["b"], 1)


@pytest.mark.parametrize(
    "source, message",
    [
        (None, "is no Python file; write one such as: PROMPTS"),
        ("1/0", "cannot be imported: ZeroDivisionError"),
        ("raise SystemExit('no')", "cannot be imported: SystemExit: no"),
        ("PROMPTS = ['a']", r"has no function reward\(prompt, answer\)"),
        (REWARD, "has no PROMPTS"),
        (f"PROMPTS = ['a', 1]\n{REWARD}", r"prompt 1 of .* is '1'; it must be a string, a list of messages"),
        (f"PROMPTS = [{{'question': 'a'}}]\n{REWARD}", "prompt 0 of .* is 'None'"),
    ],
)
def test_what_is_missing_is_named(tmp_path, source, message):
    file = tmp_path / "environment.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(StartError, match=message):
        load(file)
