import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from spmd_tx.demo import run
from spmd_tx.demo.display import Display, Told, draw_curve, save_plot
from spmd_tx.errors import StartError

example = run.load_example()


def step(number=0, reward=None, phase="reinforce"):
    return example.Step(phase, number, loss=0.5, reward=reward, mismatch=None, tokens=100, seconds=0.5)


@pytest.mark.parametrize(
    "first, last, learning_rate, complaint",
    [
        (0.1, 0.9, 0.006, None),
        (0.1, 0.1, 0.0, None),
        (0.1, 0.5, 0.006, "the last five steps is 0.50; it should have reached 0.6"),
        (0.4, 0.9, 0.006, "the first five steps is 0.40; it should be at most 0.2"),
        (0.1, 0.9, 0.0, "went from 0.10 to 0.90 although the learning rate is 0"),
    ],
)
def test_the_demo_fails_when_the_reward_does_not_go_as_it_should(first, last, learning_rate, complaint):
    verdict = run.judge([first] * 15 + [last] * 15, learning_rate)
    assert (verdict is None) == (complaint is None)
    assert complaint is None or complaint in verdict


def test_a_short_demo_need_not_reach_what_a_long_one_does():
    assert run.judge([0.1] * 10, 0.006) is None


def test_the_curve_has_a_bar_per_step():
    lines = draw_curve([0.0, 0.5, 1.0], height=2).plain.splitlines()
    assert lines[1:3] == ["       1 │  █", "     0.5 │ ██"]


def test_a_curve_of_many_steps_has_a_bar_for_several_and_its_own_axis():
    lines = draw_curve([10.0] * 150 + [-10.0] * 50, height=2, name="loss", width=4).plain.splitlines()
    assert lines[:3] == ["loss", "      10 │███ ", "       0 │███ "]
    assert lines[-1].split() == ["1", "200", "step"]


def test_the_plot_is_a_png(tmp_path):
    save_plot([step(phase="imitate"), step(reward=0.1), step(number=1, reward=0.2)], tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_terminal_each_step_is_a_line(capsys):
    with Display(Console(), lambda: "") as display:
        display.add(step(number=3, reward=0.25))
    headings, line = capsys.readouterr().out.splitlines()
    assert headings == "step  loss  reward  |Δ logprob|  tokens/s"
    assert line.split() == ["reinforce", "3", "0.5000", "0.250", "-", "200"]
    assert display.rewards == [0.25]


def test_without_a_terminal_each_state_of_the_server_is_a_line(capsys):
    told = Told(Console())
    for state in (
        "starting",
        "loading weights 0 %",
        "loading weights 50 %",
        "",
        "compiling decode 4x16",
        "compiling decode 4x16",
    ):
        told.news(state)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["server: starting", "server: loading weights 0 %", "server: compiling decode 4x16"]


def test_on_a_terminal_the_table_shows_what_the_server_is_busy_with():
    console = Console(force_terminal=True, record=True, width=100)
    reads = threading.Semaphore(0)

    def status() -> str:
        reads.release()
        return "compiling decode 4x16"

    with Display(console, status) as display:
        display.add(step(number=7, reward=0.5))
        for _ in range(2):  # at the second reading the first one's answer is in the table
            assert reads.acquire(timeout=10)
        display._live.refresh()
    shown = console.export_text()
    assert "reinforce 7" in shown
    assert "compiling decode 4x16" in shown


@pytest.mark.parametrize(
    "lines, status, url",
    [
        ("", "", None),
        ("03:03:23 INFO workers: loading weights 22 %\n", "loading weights 22 %", None),
        (
            "03:03:31 INFO workers: compiling prefill 1x64\nready: http://127.0.0.1:1\n",
            "compiling prefill 1x64",
            "http://127.0.0.1:1",
        ),
        ("03:03:31 INFO workers: compiling prefill 1x64\n03:03:32 INFO workers: running\n", "", None),
    ],
)
def test_the_log_tells_what_the_server_is_doing(tmp_path, lines, status, url):
    log = run.ServerLog(tmp_path / "server.log")
    log.path.write_text(lines)
    assert (log.status(), log.url()) == (status, url)


def test_a_server_that_ends_before_it_is_ready_is_quoted(tmp_path):
    log = run.ServerLog(tmp_path / "server.log")
    log.path.write_text("spmd-tx: port 8000 is in use\n")
    server = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    server.wait()
    with pytest.raises(
        StartError, match=r"ended with code 2; .*server.log ends with:\nspmd-tx: port 8000 is in use"
    ):
        run.wait_until_ready(server, log, Console())


def test_advantages_and_logprobs_stand_at_the_positions_that_predict_the_answer():
    answer = SimpleNamespace(tokens=[7, 8], logprobs=[-1.0, -2.0], sequence_id="request:0")
    datum = example.policy_datum([4, 5, 6], answer, advantage=0.5)
    assert datum.model_input.to_ints() == [4, 5, 6, 7]
    inputs = {name: tensor.to_numpy().tolist() for name, tensor in datum.loss_fn_inputs.items()}
    assert inputs == {
        "target_tokens": [5, 6, 7, 8],
        "logprobs": [0.0, 0.0, -1.0, -2.0],
        "advantages": [0.0, 0.0, 0.5, 0.5],
    }
    assert [(span.length, span.offset) for span in datum.model_input_spans] == [(3, 0), (1, 0)]
    assert [(span.length, span.offset) for span in datum.loss_fn_input_spans] == [(2, 1), (2, 0)]


def test_imitation_predicts_every_token_from_those_before_it():
    datum = example.imitation_datum([1, 2, 3])
    assert datum.model_input.to_ints() == [1, 2]
    assert datum.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [2, 3]
    assert datum.loss_fn_inputs["weights"].to_numpy().tolist() == [1.0, 1.0]


def test_an_answer_is_shown_without_broken_bytes_and_control_characters():
    broken = b"go\xe6\x9d to\x1b[31m\n".decode(errors="replace")
    assert example.readable("東京 " + broken) == "東京 go· to·[31m·"


def test_the_end_of_a_server_that_is_needed_is_noticed():
    server = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(run.ServerEnded, match="ended with code 3"), run.needing(server):
        threading.Event().wait(60)
