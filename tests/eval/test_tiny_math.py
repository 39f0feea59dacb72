"""The text world: honest problems, exact reward, and a base whose slips are systematic."""

import numpy as np
import pytest

from eval import tiny_math
from eval.task import load_task


def numbers(prompt: str) -> tuple:
    """The problem without names and things, which do not make it another."""
    return tuple(w for w in prompt.split() if w not in tiny_math.NAMES + tiny_math.THINGS)


def test_train_and_test_problems_are_disjoint_and_the_same_each_time():
    train, test = tiny_math.rows("train"), tiny_math.rows("test")
    assert not {numbers(r["prompt"]) for r in train} & {numbers(r["prompt"]) for r in test}
    assert train == tiny_math.rows("train") and (len(train), len(test)) == (2000, 500)


def test_the_base_learns_from_train_problems_only():
    test = {numbers(r["prompt"]) for r in tiny_math.rows("test")}
    assert not {numbers(r["prompt"]) for r in tiny_math.base_rows(3000, 0)} & test


def test_worked_solution_earns_the_full_reward_and_its_arithmetic_is_right():
    rows = tiny_math.rows("test")
    for row in rows:
        value, *steps = row["solution"].split(" answer")[0].split()
        for operator, operand, equals, result in zip(*[iter(steps)] * 4, strict=True):
            assert equals == "=" and eval(f"{value} {operator} {operand}") == int(result)
            value = result
    scores = tiny_math.reward(rows, [r["solution"] for r in rows])
    assert all((v == 1).all() for v in scores.values())


@pytest.mark.parametrize(
    ("completion", "correct", "layout"),
    [
        ("3 + 4 = 7 - 2 = 5 answer 5", 1, 1),
        ("answer 5", 1, 0),
        ("3 + 4 = 7 answer 7", 0, 1),
        ("3 + 4 = 7 - 2 = 5 answer 5 5", 0, 0),
        ("3 + 4 = 7 - 2 = 5", 0, 0),
        ("", 0, 0),
    ],
)
def test_reward_wants_the_right_answer_at_the_end(completion, correct, layout):
    scores = tiny_math.reward([{"answer": "5"}], [completion])
    assert (scores["correct"][0], scores["format"][0]) == (correct, layout)


def test_slips_of_the_base_data_come_as_often_as_they_say():
    """Standard error of a share over 4,000 pairs is 0.008; the bound is 4 of them."""
    pairs = tiny_math.base_rows(4000, 0)
    short = np.mean([p["completion"].count("=") < (len(p["prompt"].split()) - 5) / 2 for p in pairs])
    assert (
        abs(short - tiny_math.SLIPS["skip the last step"]) < 0.04
    )  # a story that leaves 0..9 stops short too
    assert max(len(p["completion"].split()) for p in pairs) < tiny_math.LENGTH


def test_a_row_of_a_file_that_lacks_a_field_names_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "ann has 3 pears gets 1 ?", "answer": "4"}\n{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl.*2.*answer"):
        load_task("tiny-math").rows("train", str(path))


def test_an_answer_that_is_a_number_names_file_and_line(tmp_path):
    """It would equal no word of a completion, and every reward be 0."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "ann has 3 pears gets 1 ?", "answer": 4}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl:1: answer is not a text$"):
        load_task("tiny-math").rows("train", str(path))
