"""Images in conversations of all dialects become images of the prompt."""

import base64
import functools

import pytest

from spmd_tx.coordinator.requests.logged_images import LoggedImages
from spmd_tx.demo import tiny_model
from tests.coordinator.conftest import TINY_MODEL
from tests.coordinator.http.real_server import sqlite_only
from tests.coordinator.http.text_generation.drawing import Drawing
from tests.support.pictures import jpeg, let_see, png

pytestmark = sqlite_only  # nothing depends on the database

BASE_MODEL = "Qwen/Qwen3-0.6B"
PAD = "<|image_pad|>"
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{% if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PNG, JPEG = png(64, 96), jpeg(32, 64)  # 6 and 2 tokens


@functools.cache
def seeing_tokenizer():
    return tiny_model.train_tokenizer(
        TINY_MODEL.vocab_size, 0, (*tiny_model.OF_IMAGES, *tiny_model.SPECIAL_TOKENS)
    )


@pytest.fixture
def blind(api, services):
    directory = services.bases.default.model.directory
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    seeing_tokenizer().save(str(directory / "tokenizer.json"))
    return Client(api, services)


@pytest.fixture
def client(blind, services):
    let_see(services.bases.default)
    return blind


class Client:
    def __init__(self, api, services):
        self._api, self._services = api, services
        self._drawing = Drawing(services, seeing_tokenizer())

    async def ask(self, path, body):
        return await self._api.post(f"http://server{path}", json={"model": BASE_MODEL, **body})

    async def draw(self, path, body, text="yes<|im_end|>"):
        answer = await self._drawing.answer(self.ask(path, body), text)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def chunks(self):
        """The prompt of the latest request: texts, and numbers of tokens of images."""
        chunks = (await self._drawing.request())["prompt"]["chunks"]
        decode = functools.partial(seeing_tokenizer().decode, skip_special_tokens=False)
        return [
            chunk["stored"]["tokens"] if "stored" in chunk else decode(chunk["tokens"]) for chunk in chunks
        ]

    async def files(self, tmp_path):
        request = self._services.scheduler.arrived[-1]
        images = LoggedImages(self._services.database, tmp_path / "payloads")
        stored = [
            each["stored"] for each in (await self._drawing.request())["prompt"]["chunks"] if "stored" in each
        ]
        keys = [await images.key(request.session_id, each["digest"]) for each in stored]
        return [(await images.read(key)).content for key in keys]


def encoded(content):
    return base64.b64encode(content).decode()


def openai_image(content):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(content)}"}}


def said(*parts):
    return {
        "role": "user",
        "content": [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts],
    }


CHAT, MESSAGES, RESPONSES = (
    "/oai/api/v1/chat/completions",
    "/anthropic/api/v1/messages",
    "/oai/api/v1/responses",
)
BODIES = {
    CHAT: lambda content: {"messages": [said("a", openai_image(content), "b")]},
    MESSAGES: lambda content: {
        "max_tokens": 9,
        "messages": [
            said("a", {"type": "image", "source": {"type": "base64", "data": encoded(content)}}, "b")
        ],
    },
    RESPONSES: lambda content: {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(content)}"},
                    {"type": "input_text", "text": "b"},
                ],
            }
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
async def test_an_image_of_any_dialect_stands_in_the_prompt_and_counts(client, path, tmp_path):
    usage = (await client.draw(path, BODIES[path](PNG)))["usage"]
    before, image, behind = await client.chunks()
    assert before.endswith("a<|vision_start|>")
    assert image == 6
    assert behind.startswith("<|vision_end|>b<|im_end|>")
    texts = sum(len(seeing_tokenizer().encode(each).ids) for each in (before, behind))
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == texts + 6
    assert await client.files(tmp_path) == [PNG]


@pytest.mark.parametrize("path", BODIES)
async def test_a_model_of_text_refuses_images_of_any_dialect(blind, path):
    answer = await blind.ask(path, BODIES[path](PNG))
    assert answer.status_code == 400
    assert "this model takes text alone" in answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_no_image_is_refused_in_any_dialect(client, path):
    answer = await client.ask(path, BODIES[path](b"hello"))
    assert answer.status_code == 400
    assert "image 0 of the conversation: neither PNG nor JPEG" in answer.text


async def test_tokens_of_anthropics_count_include_images(client):
    counted = [
        (
            await client.ask(f"{MESSAGES}/count_tokens", {"messages": BODIES[MESSAGES](each)["messages"]})
        ).json()
        for each in (PNG, JPEG)
    ]
    assert counted[0]["input_tokens"] - counted[1]["input_tokens"] == 6 - 2


async def test_a_conversation_goes_on_behind_a_turn_with_an_image(client, tmp_path):
    first = said("a", openai_image(PNG))
    answer = await client.draw(CHAT, {"messages": [first]})
    later = said(openai_image(JPEG), "c", openai_image(PNG))
    turn = answer["choices"][0]["message"]
    messages = [first, {"role": "assistant", "content": turn["content"]}, later]
    whole = await client.draw(CHAT, {"messages": messages, "return_token_ids": True})
    chunks = await client.chunks()
    assert [each for each in chunks if isinstance(each, int)] == [6, 2, 6]
    assert chunks[2].startswith("<|vision_end|><|im_end|>\n<|im_start|>assistant\nyes<|im_end|>")
    assert chunks[4] == "<|vision_end|>c<|vision_start|>"
    assert await client.files(tmp_path) == [PNG, JPEG, PNG]
    pad = seeing_tokenizer().token_to_id(PAD)
    assert whole["prompt_token_ids"].count(pad) == 14


async def test_another_image_is_another_conversation(client):
    answer = await client.draw(CHAT, {"messages": [said("a", openai_image(PNG))]})
    said_before = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    await client.draw(CHAT, {"messages": [said("a", openai_image(JPEG)), said_before, said("c")]})
    assert [each for each in await client.chunks() if isinstance(each, int)] == [2]


async def test_a_pad_in_a_text_beside_an_image_is_refused_and_alone_is_text(client):
    answer = await client.ask(CHAT, {"messages": [said(f"a{PAD}", openai_image(PNG))]})
    assert answer.status_code == 400
    assert f"the prompt has 1 images and {PAD} 2 times; leave {PAD} out" in answer.json()["error"]["message"]
    await client.draw(CHAT, {"messages": [said(f"a{PAD}")]})
    assert PAD in (await client.chunks())[0]


@pytest.mark.parametrize(
    "role, problem",
    [
        ("system", "a message of the role 'system' has an image"),
        ("assistant", "of the role 'assistant' has an image"),
    ],
)
async def test_images_are_of_the_user_and_of_tools(client, role, problem):
    message = said(openai_image(PNG)) | {"role": role}
    answer = await client.ask(CHAT, {"messages": [message, said("a")]})
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


@pytest.mark.parametrize("trajectory", ["", "/in/run"])
async def test_an_earlier_answer_goes_on_with_its_image(client, services, tmp_path, trajectory):
    path = f"/oai/api{trajectory}/v1/responses"
    first = await client.draw(path, BODIES[RESPONSES](PNG))
    services.trajectories.trees._entries.clear()  # as after a restart
    await client.draw(path, {"previous_response_id": first["id"], "input": "c"})
    chunks = await client.chunks()
    assert chunks[1] == 6
    assert "b<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>" in chunks[2]
    assert await client.files(tmp_path) == [PNG]


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_trajectory_has_the_images_of_its_sequences(client, services, is_kept):
    path = "/oai/api/in/run/v1/chat/completions"
    first = said("a", openai_image(PNG))
    answer = await client.draw(path, {"messages": [first]})
    # A reply that the client has changed begins another branch, whose prompt has all images again.
    reply = answer["choices"][0]["message"]["content"] if is_kept else "no"
    later = said(openai_image(JPEG), "c", openai_image(PNG))
    messages = [first, {"role": "assistant", "content": reply}, later]
    await client.draw(path, {"messages": messages})
    sent = (await client._drawing.request())["prompt"]["chunks"]

    post = functools.partial(client._api.post, "http://server/api/v1/trajectories/sequences")
    segments = (await post(json={"name": "run", "leaves": "all"})).json()["segments"]
    assert len(segments) == (1 if is_kept else 2)
    segment, pad = segments[-1], seeing_tokenizer().token_to_id(PAD)
    files = [base64.b64decode(each["data"]) for each in segment["images"]]
    assert files == [PNG, JPEG, PNG]
    chunks, at = [], 0
    for each in segment["images"]:
        end = each["start"] + each["length"]
        assert segment["tokens"][each["start"] : end] == [pad] * each["length"]
        chunks += [segment["tokens"][at : each["start"]], each["length"]]
        at = end
    prompt = [each["stored"]["tokens"] if "stored" in each else each["tokens"] for each in sent]
    assert chunks == prompt[:-1]
    assert segment["tokens"][at:][: len(prompt[-1])] == prompt[-1]
    assert not any(segment["sampled"][: segment["images"][0]["start"]])


async def test_messages_in_a_trajectory_have_their_images(client):
    await client.draw(
        f"/anthropic/api/in/run{MESSAGES.removeprefix('/anthropic/api')}", BODIES[MESSAGES](PNG)
    )
    answer = await client._api.post("http://server/api/v1/trajectories/sequences", json={"name": "run"})
    (segment,) = answer.json()["segments"]
    assert [base64.b64decode(each["data"]) for each in segment["images"]] == [PNG]
