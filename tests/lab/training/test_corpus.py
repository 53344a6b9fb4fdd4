"""The training corpus is reproducible, covers all skills, and contains no question of the exam."""

import random
from itertools import islice

import pytest

from tests.lab.training.conversation import Split
from tests.lab.training.corpus import conversations
from tests.lab.training.exam import questions
from tests.lab.training.phrases import expand, typed

SKILLS = {
    "animals", "arithmetic", "capitals", "colours", "days", "follow-up", "json", "memory", "numbers", "refusals",
    "small talk", "stories", "tools",
}  # fmt: skip


def test_the_same_seed_gives_the_same_conversations():
    first, second = (list(islice(conversations(3), 200)) for _ in range(2))
    assert first == second


def test_another_seed_gives_other_conversations():
    first, second = (list(islice(conversations(seed), 50)) for seed in (3, 4))
    assert first != second


def test_every_skill_is_taught():
    taught = {turn.skill for conversation in islice(conversations(5), 2000) for turn in conversation.turns}
    assert taught == SKILLS


def test_no_held_out_turn_is_taught():
    turns = [turn for conversation in islice(conversations(5), 2000) for turn in conversation.turns]
    assert all(turn.split is Split.TRAIN for turn in turns)


def test_held_out_sums_are_never_asked_in_any_wording():
    taught = {turn.key for conversation in islice(conversations(6), 4000) for turn in conversation.turns if turn.skill == "arithmetic"}
    asked = {_sum(question.expected["content"]) for question in questions(1, 40) if question.skill.startswith("sums")}
    # Products are left out: the exam asks for the same products as the training data, but in other words.
    asked = {numbers for numbers in asked if "times" not in numbers}
    assert len(asked) > 10
    assert taught.isdisjoint(asked)


def _sum(answer: str) -> str:
    return answer.split(" is ")[0]


def test_the_exam_accepts_its_own_answers_and_not_each_others():
    exam = questions(2, 12)
    assert all(question.is_right(question.expected) for question in exam)
    other = {"role": "assistant", "content": "Bananas."}
    assert not any(question.is_right(other) for question in exam)


def test_a_story_that_changes_its_hero_is_off_topic():
    question = next(q for q in questions(2, 12) if q.skill == "stories" and " a " in q.messages[0]["content"])
    words = question.expected["content"].replace("The", "A horse, a cow and a pig. The")
    assert not question.is_right({"role": "assistant", "content": words})


def test_a_conversation_with_a_calculator_has_no_sum_done_in_the_head():
    for conversation in islice(conversations(8), 1000):
        parameters = {name for tool in conversation.tools for name in tool["function"]["parameters"]["properties"]}
        if parameters & {"expression", "formula", "input", "query"}:
            assert "arithmetic" not in {turn.skill for turn in conversation.turns}


@pytest.mark.parametrize("seed", range(5))
def test_expand_leaves_no_grammar_behind(seed: int):
    text = expand(random.Random(seed), "@whatis the (colour|color( here|)) of {thing}?", thing="(snow)")
    assert "@" not in text and "|" not in text and text.endswith("of (snow)?")


def test_typing_verbatim_keeps_the_letters():
    rng = random.Random(0)
    assert all("Zunormel" in typed(rng, "i am Zunormel.", verbatim=True) for _ in range(300))
