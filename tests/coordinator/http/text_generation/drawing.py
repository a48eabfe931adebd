"""Lets the fake model draw a text: what a test asks is answered with it."""

import asyncio
import json

import pytest

from spmd_tx.coordinator.requests.records import Finished
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence, encode_sample_response
from spmd_tx.coordinator.wire.training_protobuf import PROTOBUF

# The context of the fake model is short.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }} {% endfor -%}
{%- for message in messages %}{{ message.role[0] }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}
{%- endfor %}"""


def answer_with_calls(second):
    """A text with reasoning and calls of two tools, the second of which has this name."""
    return f"""\
<think>
I look.
</think>

Wait.
<tool_call>
{{"name": "look", "arguments": {{"a": 1}}}}
</tool_call>
<tool_call>
{{"name": "{second}"}}
</tool_call><|im_end|>"""


@pytest.fixture
def drawing(services, tokenizer):
    return Drawing(services, tokenizer)


class Drawing:
    """Draws what a test says, for one request at a time."""

    def __init__(self, services, tokenizer):
        self._services, self._tokenizer = services, tokenizer

    async def answer(self, asking, text, stop_reason="stop", cached=0, samples=1):
        """Return what ``asking`` gets if the model draws this text, in each of so many samples."""
        self._services.scheduler.is_paused = True
        first = len(self._services.scheduler.arrived)
        answering = asyncio.ensure_future(asking)
        while len(self._services.scheduler.arrived) == first:
            assert not answering.done(), answering.result().text
            await asyncio.sleep(0.01)
        tokens = self._tokenizer.encode(text).ids
        sample = SampledSequence(tokens, [-0.5] * len(tokens), stop_reason)
        outcome = Finished(PROTOBUF, encode_sample_response([sample] * samples, cache_hits=cached))
        self._services.queue.resolve(self._services.scheduler.arrived[first].id, outcome)
        return await answering

    async def request(self):
        """Return the latest sample request."""
        return json.loads(await self._services.queue.payload(self._services.scheduler.arrived[-1]))

    async def prompt(self):
        """Return the text of the latest prompt."""
        tokens = (await self.request())["prompt"]["chunks"][0]["tokens"]
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
