"""Odd requests about trajectories, and turns below their base URLs. All stories meet in a few of them."""

from tests.fuzz import odd_chats
from tests.fuzz.calls import API, BASE_MODEL, Call, Names, pick
from tests.fuzz.odd_questions import asked, quoted
from tests.fuzz.odd_training import posted
from tests.fuzz.oddities import Oddities

SHARED = "run-1", "run-2", "run@3"
ROUTE = "trajectories"


def turn(odd: Oddities, names: Names) -> Call:
    name = quoted(_name(odd, names))
    dialects = (
        (odd_chats.chat, f"/oai/api/in/{name}/v1/"),
        (odd_chats.respond, f"/oai/api/in/{name}/v1/"),
        (odd_chats.message, f"/anthropic/api/in/{name}/v1/"),
    )
    say, where = odd.random.choice(dialects)
    return say(odd, names, where)


def create(odd: Oddities, names: Names) -> Call:
    body = {
        "name": f"own-{names.session[:8]}-{names.next_other()}",
        "model": odd.random.choice([BASE_MODEL, names.checkpoint("sampler_weights")]),
        "settings": {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 3, "seed": 1},
        "user_metadata": {"a": "b"},
    }
    return posted(odd, ROUTE, {key: value for key, value in body.items() if odd.chance(0.7)}, 0.3)


def look(odd: Oddities, names: Names) -> Call:
    if odd.chance(0.5):
        return asked(odd, f"{ROUTE}/{_id(odd, names)}", {"tokens": odd.random.choice(["true", "false"])})
    questions = {"name": odd.random.choice(SHARED)[:3], "state": odd.random.choice(["open", "finished"])}
    if odd.chance(0.4):
        questions["cursor"] = odd.random.choice(
            ["1.0:trj_0", "nan:trj_0", "-1e308:", "1e999:x", odd.text()[:500]]
        )
    return asked(odd, ROUTE, questions)


def train_on(odd: Oddities, names: Names) -> Call:
    body = {"leaves": odd.random.choice(["kept", "last", "all"])}
    if odd.chance(0.5):
        return posted(
            odd, f"{ROUTE}/sequences", {**body, "name": odd.random.choice([*SHARED, "own", ""])}, 0.3
        )
    ids = [pick(odd.random, names.trajectories, "trj_none") for _ in range(odd.random.choice([1, 2, 50]))]
    return posted(odd, f"{ROUTE}/sequences", {**body, "ids": ids}, 0.3)


def about(odd: Oddities, names: Names) -> Call:
    """Rewards, keys and ends."""
    where = f"{ROUTE}/{_id(odd, names)}"
    match odd.random.randrange(7):
        case 0 | 1 | 2:
            body = {"reward": odd.number(), "metrics": {"m": 1.0}, "turn": f"{names.latest_request}:0"}
            return posted(odd, f"{where}/rewards", {key: body[key] for key in body if odd.chance(0.8)}, 0.3)
        case 3 | 4:
            return posted(odd, f"{where}/keys", {"expires_seconds": 60.0})
        case 5:
            return Call("POST", f"{API}{where}/finish")
    return Call("DELETE", f"{API}{where}")


def _id(odd: Oddities, names: Names) -> str:
    return quoted(odd.text() if odd.chance(0.1) else pick(odd.random, names.trajectories, "trj_none"))


def _name(odd: Oddities, names: Names) -> str:
    if odd.chance(0.1):
        return odd.text()
    if odd.chance(0.4):
        return pick(odd.random, names.trajectories, SHARED[0])
    return odd.random.choice(SHARED)
