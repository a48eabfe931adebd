"""Ask a model, through OpenAI's client, to go on with texts and to chat: openai_client.py URL MODEL."""

import sys

import openai


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key="tml-local")
    print("models:", ", ".join(each.id for each in client.models.list()))

    completion = client.completions.create(
        model=model, prompt=["Once upon a time", "In the beginning"], max_tokens=16, seed=1, stop=["\n"]
    )
    for choice in completion.choices:
        print(f"completion {choice.index} ({choice.finish_reason}):", choice.text)

    print("chat: ", end="")
    events = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story."}],
        max_completion_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in events:
        for choice in event.choices:
            print(choice.delta.content or "", end="", flush=True)
        if event.usage is not None:
            print(f"\n{event.usage.completion_tokens} tokens were drawn")


if __name__ == "__main__":
    main(*sys.argv[1:])
