"""Runs a small agent of one library against a server: python agent_libraries.py NAME URL MODEL

The agent has one tool, and prints its last answer. Only the library and what it needs is imported.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable

QUESTION, INSTRUCTIONS = "look at a", "Be brief."


def look(path: str) -> str:
    """Look at a path."""
    return f"seen-by-the-tool {path}"


def litellm(model: str, base: str) -> str:
    import litellm

    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    function = {"name": "look", "description": "Look at a path.", "parameters": schema}
    messages: list[object] = [{"role": "user", "content": QUESTION}]
    while True:
        answer = litellm.completion(
            model=model,
            messages=messages,
            tools=[{"type": "function", "function": function}],
            max_tokens=200,
            api_base=base,
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            seen = look(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": seen})


def openai_agents(model: str, *, by_chat: bool) -> str:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI()
    agents.set_default_openai_client(client)
    chosen = agents.OpenAIChatCompletionsModel(model=model, openai_client=client) if by_chat else model
    agent = agents.Agent(
        name="a", instructions=INSTRUCTIONS, model=chosen, tools=[agents.function_tool(look)]
    )
    return agents.Runner.run_sync(agent, QUESTION).final_output


def pydantic_ai(model: str) -> str:
    from pydantic_ai import Agent

    agent = Agent(model, instructions=INSTRUCTIONS)
    agent.tool_plain(look)
    whole = agent.run_sync(QUESTION).output

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as stream:
            return "".join([piece async for piece in stream.stream_text(delta=True)])

    assert asyncio.run(streamed()) == whole
    return whole


def langchain(model: object) -> str:
    from langchain.agents import create_agent

    agent = create_agent(model, tools=[look], system_prompt=INSTRUCTIONS)
    content = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"][-1].content
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def langchain_openai(model: str) -> str:
    from langchain_openai import ChatOpenAI

    return langchain(ChatOpenAI(model=model))


def langchain_anthropic(model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    return langchain(ChatAnthropic(model=model, max_tokens=200))


def runs(url: str, model: str) -> dict[str, Callable[[], str]]:
    return {
        "litellm, chat": lambda: litellm(f"openai/{model}", f"{url}/oai/api/v1"),
        "litellm, messages": lambda: litellm(f"anthropic/{model}", f"{url}/anthropic/api"),
        "openai-agents, responses": lambda: openai_agents(model, by_chat=False),
        "openai-agents, chat": lambda: openai_agents(model, by_chat=True),
        "pydantic-ai, chat": lambda: pydantic_ai(f"openai-chat:{model}"),
        "pydantic-ai, messages": lambda: pydantic_ai(f"anthropic:{model}"),
        "langchain, chat": lambda: langchain_openai(model),
        "langchain, messages": lambda: langchain_anthropic(model),
    }


NAMES = tuple(runs("", ""))

if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    os.environ |= {
        "OPENAI_API_KEY": "tml-local",
        "ANTHROPIC_API_KEY": "tml-local",
        "OPENAI_BASE_URL": f"{url}/oai/api/v1",
        "ANTHROPIC_BASE_URL": f"{url}/anthropic/api",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    print(runs(url, model)[name]())
