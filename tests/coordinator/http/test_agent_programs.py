"""Agents as their makers ship them call a tool, read its result and answer. The test writes what is drawn.

Programs: ``AGENT_PROGRAMS=FOLDER pytest tests/coordinator/http/test_agent_programs.py``, where each was
installed with npm: ``npm install --prefix FOLDER/claude @anthropic-ai/claude-code``, ``FOLDER/codex
@openai/codex`` and ``FOLDER/opencode opencode-ai``.

Libraries: ``AGENT_LIBRARIES=PYTHON pytest tests/coordinator/http/test_agent_programs.py``, with the
interpreter of an environment that has litellm, openai-agents, pydantic-ai-slim[openai,anthropic], langchain,
langchain-openai and langchain-anthropic.
"""

import asyncio
import json
import os

import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.served_base import open_base
from spmd_tx.coordinator.requests.records import Finished
from spmd_tx.coordinator.text.served_model import ServedModel
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence, encode_sample_response
from spmd_tx.coordinator.wire.training_protobuf import PROTOBUF
from tests.coordinator.conftest import run_services, tiny_served_model
from tests.coordinator.http import agent_libraries
from tests.coordinator.http.agent_libraries import NAMES
from tests.coordinator.http.real_server import connections as connections  # a fixture
from tests.coordinator.http.real_server import port as port  # a fixture
from tests.coordinator.http.real_server import sqlite_only
from tests.support.model_shapes import TINY
from tests.support.reply_templates import FAMILIES

MODEL, CONTEXT = "agent-model", 1 << 20
FOLDER, LIBRARIES = (os.environ.get(name, "") for name in ("AGENT_PROGRAMS", "AGENT_LIBRARIES"))
SCRIPT = agent_libraries.__file__
SEEN = "seen-by-the-tool"
ANSWERED = "It says that it was seen."

pytestmark = [sqlite_only, pytest.mark.timeout(280)]


def agents_base(data_dir, stack):
    """A model with room for what agents send."""
    of_first = tiny_served_model(data_dir / "model")
    (of_first.directory / "chat_template.jinja").write_text(FAMILIES["qwen3"])
    config = ServerConfig(base_model="/models/x", served_model_name=MODEL, data_dir=data_dir, host="server")
    model = ServedModel(of_first.directory, TINY, CONTEXT, of_first.text)
    return [open_base(config, model, stack)]


@pytest.fixture
async def services(database_url, tmp_path, tokenizer):
    async with run_services(tmp_path / "data", database_url, agents_base) as services:
        services.scheduler.is_paused = True
        drawing = asyncio.create_task(draw(services, tokenizer))
        yield services
        drawing.cancel()


async def draw(services, tokenizer):
    """Call the program's shell until its output is in the prompt, then answer."""
    answered = 0
    while True:
        await asyncio.sleep(0.02)
        for request in services.scheduler.arrived[answered:]:
            sample = json.loads(await services.queue.payload(request))
            prompt = tokenizer.decode(sample["prompt"]["chunks"][0]["tokens"], skip_special_tokens=False)
            tokens = tokenizer.encode(next_turn(prompt)).ids
            sequence = SampledSequence(tokens, [-0.5] * len(tokens), "stop")
            services.queue.resolve(request.id, Finished(PROTOBUF, encode_sample_response([sequence])))
            answered += 1


def next_turn(prompt):
    if '"name": "look"' in prompt and SEEN not in prompt:
        call = {"name": "look", "arguments": {"path": "a"}}
        return f"<think>\nI look.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
    command = f"printf %s-%s {SEEN.removesuffix('-tool')} tool"
    for name, argument in (("Bash", "command"), ("exec_command", "cmd"), ("bash", "command")):
        if f'"name": "{name}"' in prompt and SEEN not in prompt:
            call = {"name": name, "arguments": {argument: command, "description": "Looks."}}
            if argument == "cmd":
                del call["arguments"]["description"]
            return f"<think>\nI look.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
    return f"<think>\nI see.\n</think>\n\n{ANSWERED}<|im_end|>"


def claude(home, url):
    program = f"{FOLDER}/claude/node_modules/@anthropic-ai/claude-code-linux-x64/claude"
    settings = {"ANTHROPIC_BASE_URL": f"{url}/anthropic/api", "ANTHROPIC_API_KEY": "tml-local"}
    quiet = ("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER")
    options = ["--model", MODEL, "--allowedTools", "Bash", "--output-format", "stream-json", "--verbose"]
    return [program, "-p", "look", *options], settings | dict.fromkeys(quiet, "1")


def codex(home, url):
    config = f"""\
model = "{MODEL}"
model_provider = "tinker"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.tinker]
name = "tinker"
base_url = "{url}/oai/api/v1"
env_key = "KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(config)
    return [f"{FOLDER}/codex/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--json", "look"], {}


def opencode(home, url, package="@ai-sdk/openai-compatible", path="oai"):
    provider = {
        "npm": package,
        "name": "tinker",
        "options": {"baseURL": f"{url}/{path}/api/v1", "apiKey": "tml-local"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": CONTEXT, "output": 8192}}},
    }
    config = {"autoupdate": False, "share": "disabled", "provider": {"tinker": provider}}
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps(config | {"permission": {"bash": "allow"}}))
    quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return [f"{FOLDER}/opencode/node_modules/.bin/opencode", "run", "-m", f"tinker/{MODEL}", "look"], quiet


def opencode_messages(home, url):
    return opencode(home, url, "@ai-sdk/anthropic", "anthropic")


@pytest.mark.skipif(not FOLDER, reason="AGENT_PROGRAMS names no folder with the programs")
@pytest.mark.parametrize("program", [claude, codex, opencode, opencode_messages])
async def test_it_calls_a_tool_reads_its_result_and_answers(services, port, tmp_path, program):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    command, settings = program(home, f"http://127.0.0.1:{port}")
    code, said = await finished(command, home, work, settings)
    assert (code, ANSWERED in said) == (0, True), said[-4000:]


@pytest.mark.skipif(not LIBRARIES, reason="AGENT_LIBRARIES names no interpreter that has the libraries")
@pytest.mark.parametrize("name", NAMES)
async def test_an_agent_of_a_library_does_so_too(services, port, tmp_path, name):
    command = [LIBRARIES, SCRIPT, name, f"http://127.0.0.1:{port}", MODEL]
    code, said = await finished(command, tmp_path, tmp_path, {})
    assert (code, ANSWERED in said) == (0, True), said[-4000:]


async def finished(command, home, work, settings):
    """Run a program without other networks; return its exit code and what it has printed."""
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1", "KEY": "tml-local"}
    running = await asyncio.create_subprocess_exec(
        *command,
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **nowhere, **settings},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(240):
            said = (await running.communicate())[0].decode()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    return running.returncode, said
    prompts = [json.loads(await services.queue.payload(each)) for each in services.scheduler.arrived]
    assert len(prompts) >= 2
