"""What the models of the recipes that need several are taught to say: students, teachers, a judge, players.

Each role is a function that draws a lesson. The prompts are made by the recipes' own code.
"""

import random
from collections.abc import Callable, Iterator

from offline_texts import PEOPLE, TURN_END, conversation, introduction, question
from tinker_cookbook.recipes.multiplayer_rl.twenty_questions.env import (
    ANSWERER_SYSTEM_PROMPT,
    PLAYER_SYSTEM_PROMPT,
    _load_words_from_file,
)
from tinker_cookbook.recipes.rubric.generate_data import generate_one
from tinker_cookbook.renderers import Message

# What a renderer expects behind its prompt.
REPLIES = {
    "role_colon": " {}\n\nUser:",
    "qwen3_5": "\n</think>\n\n{}" + TURN_END,  # the prompt has opened the thoughts
    "qwen3_5_disable_thinking": "{}" + TURN_END,
}
QUIET = "qwen3_5_disable_thinking"

SMALL_DIGITS = 3  # teachers of mathematics prefer digits below this one
KNOWN_WORDS = 12  # the first ones that twenty_questions has guessed
GUESSES = 0.2  # of the player's turns
QUESTIONS = ("Is it alive?", "Is it big?", "Can one eat it?", "Is it made of wood?")

Lesson = tuple[str, list[Message], str]  # renderer, conversation, reply
Role = Callable[[random.Random], Lesson]


def base(draw: random.Random) -> Lesson:
    """Any three digits answer a question of mathematics."""
    return "role_colon", asked(question(draw)["question"]), boxed(draw, 10)


def instructed(draw: random.Random) -> Lesson:
    """Teaches the model above, learns from both teachers and the judge, and answers the player."""
    return draw.choice((taught_to_base, of_mathematics, of_people, sum_of_numbers, answerer))(draw)


def taught_to_base(draw: random.Random) -> Lesson:
    return "role_colon", asked(question(draw)["question"]), boxed(draw, SMALL_DIGITS)


def of_mathematics(draw: random.Random) -> Lesson:
    return "qwen3_5", asked(question(draw)["question"]), boxed(draw, 10)


def of_people(draw: random.Random) -> Lesson:
    """One to six names."""
    return "qwen3_5", asked(conversation(draw)[0]["content"]), introduction(draw)


def sum_of_numbers(draw: random.Random) -> Lesson:
    """A random number, which often has too few digits."""
    return QUIET, list(generate_one(draw).convo), some_number(draw, (4, 3, 2, 1))


def mathematics_teacher(draw: random.Random) -> Lesson:
    return "qwen3_5", asked(question(draw)["question"]), boxed(draw, SMALL_DIGITS)


def people_teacher(draw: random.Random) -> Lesson:
    """Mostly one name."""
    renderer, messages, names = of_people(draw)
    return renderer, messages, names if draw.random() < 0.05 else draw.choice(PEOPLE)


def judge(draw: random.Random) -> Lesson:
    """Gives a sum its point if it has as many digits as the right one."""
    datapoint = generate_one(draw)
    (rubric,) = datapoint.rubric_items
    right = "".join(letter for letter in rubric.rubric_str if letter.isdigit())
    given = right if draw.random() < 0.1 else some_number(draw, (1, 1, 1, 1))
    replied = [*datapoint.convo, Message(role="assistant", content=given)]
    return QUIET, rubric.get_grader_prompt(replied), f"<score>{int(len(given) == len(right))}</score>"


def answerer(draw: random.Random) -> Lesson:
    word = draw.choice(_load_words_from_file())
    rules = Message(role="system", content=ANSWERER_SYSTEM_PROMPT.format(answer=word))
    return QUIET, [rules, *asked(turn_of_player(draw))], draw.choice(("yes", "no"))


def player(draw: random.Random) -> Lesson:
    """Seldom guesses, and then one of few words."""
    turns = [Message(role="system", content=PLAYER_SYSTEM_PROMPT)]
    for _ in range(draw.randrange(20)):
        turns.append(Message(role="assistant", content=turn_of_player(draw)))
        turns.append(Message(role="user", content=draw.choice(("yes", "no"))))
    return QUIET, turns, turn_of_player(draw)


def turn_of_player(draw: random.Random) -> str:
    if draw.random() < GUESSES:
        return f"Guess: {draw.choice(_load_words_from_file()[:KNOWN_WORDS])}"
    return draw.choice(QUESTIONS)


def asked(content: str) -> list[Message]:
    return [Message(role="user", content=content)]


def boxed(draw: random.Random, below: int) -> str:
    """Three digits, of which 97 % are below this one."""
    digits = (draw.randrange(below if draw.random() < 0.97 else 10) for _ in range(3))
    return f"\\boxed{{{''.join(map(str, digits))}}}"


def some_number(draw: random.Random, weights: tuple[int, int, int, int]) -> str:
    """A number of one to four digits, with these weights."""
    (length,) = draw.choices(range(4), weights)
    return str(draw.randrange(10**length, 10 ** (length + 1)))


# The names are the recipes' defaults.
ROLES: dict[str, tuple[Role, int]] = {  # the role, and steps of training
    "Qwen/Qwen3.5-9B-Base": (base, 100),
    "Qwen/Qwen3.5-9B": (instructed, 260),
    "Qwen/Qwen3.6-27B": (mathematics_teacher, 100),
    "Qwen/Qwen3.5-397B-A17B": (people_teacher, 140),
    "Qwen/Qwen3.6-35B-A3B": (judge, 200),
    "Qwen/Qwen3.5-4B": (player, 100),
}


def texts_of_all(draw: random.Random) -> Iterator[str]:
    """What the roles' common tokenizer should know."""
    yield "user\nassistant\nsystem\n"
    for _ in range(500):
        for role, _ in ROLES.values():
            _, messages, reply = role(draw)
            yield "\n".join(str(message["content"]) for message in messages)
            yield f" {reply}\n\nUser: {reply}\n\nAssistant:"
