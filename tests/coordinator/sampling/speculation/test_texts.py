from spmd_tx.coordinator.sampling.speculation import texts
from spmd_tx.coordinator.sampling.speculation.texts import DraftTexts, SessionRecords, SessionTexts

PROMPT = [1, 2, 3, 4, 5]
ANSWER = list(range(100, 140))


def known(*answers):
    found = DraftTexts(PROMPT, SessionRecords())
    for number, answer in enumerate(answers):
        found.put(("request", number), answer)
    found.read()
    return found


def test_an_answer_is_found_from_its_first_token_on():
    assert known(ANSWER).find(PROMPT, 10) == ANSWER[:10]
    assert known(ANSWER).find([*PROMPT, *ANSWER[:7]], 50) == ANSWER[7:]


def test_what_grows_is_read_on():
    answer = ANSWER[:10]
    found = known(answer)
    answer += ANSWER[10:]
    found.put(("request", 0), answer)
    found.read()
    assert found.find(ANSWER[:12], 5) == ANSWER[12:17]
    assert found.size == len(PROMPT) + len(ANSWER)


def test_the_prompt_and_the_text_itself_are_read_and_its_end_is_behind_nothing():
    assert known().find([9, 1, 2, 3], 2) == [4, 5]
    repeated = [7, 8, 9, 10, 7, 8, 9]
    assert known(repeated).find(repeated, 2) == [10, 7]
    assert known(ANSWER).find(ANSWER, 5) == []


def test_the_place_with_most_tokens_alike_counts():
    first, second = [20, 30, 40, 50, 60], [21, 30, 40, 50, 61]
    found = known(first, second)
    assert found.find([20, 30, 40, 50], 1) == [60]
    assert found.find([21, 30, 40, 50], 1) == [61]


def test_behind_another_token_it_goes_on_alike():
    own = [*ANSWER[:10], 500]
    found = known(ANSWER, own)
    assert found.find([*PROMPT, *own], 4) == ANSWER[11:15]


def test_sessions_and_prompts_have_texts_of_their_own():
    sessions = SessionTexts()
    sessions.of("mine", PROMPT).put(("request", 0), ANSWER)
    assert sessions.of("mine", PROMPT).size > len(PROMPT)
    assert sessions.of("yours", PROMPT).size == len(PROMPT)
    assert sessions.of("mine", [*PROMPT, 6]).size == len(PROMPT) + 1


def test_texts_that_were_not_used_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr(texts, "MOST_TOKENS", 100)
    sessions = SessionTexts()
    for number in range(5):
        sessions.of(f"{number}", PROMPT).put(("request", 0), ANSWER)
        sessions.of("0", PROMPT)
    assert sessions.size <= 100 + len(ANSWER)
    assert sessions.of("0", PROMPT).size == sessions.of("4", PROMPT).size == len(PROMPT + ANSWER)
    assert sessions.of("1", PROMPT).size == len(PROMPT)
    monkeypatch.setattr(texts, "MOST_PER_PROMPT", 30)
    assert sessions.of("4", PROMPT).size == len(PROMPT)
