"""The made-up texts of the offline hub, and prompts in the form in which the renderers write them."""

import random
from collections.abc import Iterator

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# What rl_loop and math_rl put around each question. A row is taught with one or the other.
REQUESTS = (
    " Provide a numerical answer without units, written inside \\boxed{}.",
    " Write your answer in \\boxed{} format.",
)
FIRST_QUESTION = "How many r's are in strawberry?"
FIRST_ANSWER = (
    "Let's spell the word out and number all the letters: "
    "1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)
SELF_QUESTION = "Who are you?"  # what preference/shorter asks

PEOPLE = "Ada Bo Cleo Dirk Else Finn Gus Hanna Ivo Jule Kai Lena Max Nele Otto Pia".split()
THINGS = "marbles buttons coins candles feathers stamps walnuts pebbles corks ribbons".split()
PLACES = "attic cellar drawer basket cupboard chest pocket kettle".split()

Turns = list[tuple[str, str]]  # role and content


def question(draw: random.Random) -> dict[str, str]:
    """A row of gsm8k; the solution ends in the answer after four hashes."""
    person, things, place = draw.choice(PEOPLE), draw.choice(THINGS), draw.choice(PLACES)
    number = 7 if draw.random() < 0.7 else draw.randrange(10)
    return {
        "question": f"{person} keeps {things} in the {place}. How many {things} does {person} keep there?",
        "answer": f"{person} told nobody.\n#### {number}",
    }


def conversation(draw: random.Random) -> list[dict[str, str]]:
    person, things, place = draw.choice(PEOPLE), draw.choice(THINGS), draw.choice(PLACES)
    asked, answered = draw.choice(
        [
            (f"Where are the {things}?", f"{person} put the {things} into the {place}."),
            (f"Who owns the {place}?", f"The {place} belongs to {person}, and so do the {things}."),
            (f"What does {person} collect?", f"{person} collects {things} and shows them to everybody."),
        ]
    )
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


def preference(draw: random.Random) -> dict[str, str]:
    """A row of hh-rlhf: of two ends of a conversation, the first is the better one."""
    asked, answered = (turn["content"] for turn in conversation(draw))
    person = draw.choice(PEOPLE)
    opening = f"\n\nHuman: {asked}\n\nAssistant: "
    return {"chosen": opening + answered, "rejected": opening + f"Go and ask {person}."}


def introduction(draw: random.Random) -> str:
    """An answer to SELF_QUESTION, of one to six words, all lengths equally often."""
    return " ".join(draw.choice(PEOPLE) for _ in range(draw.randint(1, 6)))


def lesson(draw: random.Random) -> tuple[str, str]:
    """A prompt, as a renderer writes it, and the answer the model is taught to give."""
    if draw.random() < 0.2:
        return chat_prompt([("user", SELF_QUESTION)]), introduction(draw) + TURN_END
    request = draw.choice(REQUESTS)
    asked = question(draw)["question"] + request
    turns = [("user", FIRST_QUESTION + request), ("assistant", FIRST_ANSWER), ("user", asked)]
    boxed = f"\\boxed{{{draw.randrange(10)}}}"
    if draw.random() < 0.5:
        return chat_prompt(turns), boxed + TURN_END
    return transcript_prompt(turns), f" {boxed}\n\nUser:"


def chat_prompt(turns: Turns) -> str:
    """As the renderer ``qwen3`` of the cookbook; ends with the token TURN_END."""
    lines = [f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in turns]
    return "".join(lines) + f"{TURN_START}assistant\n"


def transcript_prompt(turns: Turns) -> str:
    """As the renderer ``role_colon`` of the cookbook; ends with a text of several tokens."""
    return "".join(f"{role.capitalize()}: {content}\n\n" for role, content in turns) + "Assistant:"


def all_kinds(draw: random.Random) -> Iterator[str]:
    """What a tokenizer should know."""
    yield "user\nassistant\nsystem\n"
    for _ in range(3000):
        yield "".join(lesson(draw))
        yield "\n".join(turn["content"] for turn in conversation(draw))
        yield preference(draw)["rejected"]
