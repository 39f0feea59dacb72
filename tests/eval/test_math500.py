import json
from pathlib import Path

import numpy as np
import pytest
from conftest import shared

from eval import math500
from eval.task import load_task

GOLDEN = Path(__file__).parents[1] / "golden"
SLICE = str(GOLDEN / "math500_slice.jsonl")
FORMATS = json.loads((GOLDEN / "format_rewards.json").read_text())
CLEAR = [case for case in FORMATS["cases"] if not case["ambiguous"]]

PROBLEM = (
    "Convert the point $(0,3)$ in rectangular coordinates to polar coordinates.  Enter your answer in the "
    r"form $(r,\theta),$ where $r > 0$ and $0 \le \theta < 2 \pi.$"
)
EXPERT = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{}."
)
TAGS = "\nRespond in the following format:\n<reasoning>\nYour reasoning here\n</reasoning>\n"
PROMPTS = {
    ("d1", "train"): "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n"
    + "<answer>\n...\n</answer>\n\n\n"
    + EXPERT
    + " \n\n"
    + PROBLEM,
    ("d1", "test"): EXPERT + TAGS + '<answer>\n\\boxed{...}\n</answer>" \n\n\n' + PROBLEM,
    ("maskgrpo", "train"): EXPERT + TAGS + "\\boxed{...}\n\nQuestion:" + PROBLEM + "\n",
    ("maskgrpo", "test"): EXPERT + TAGS + "\\boxed{...}\n\n" + PROBLEM,
    ("llada", "train"): PROBLEM + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ("llada", "test"): PROBLEM + "\nPlease reason step by step, and put your final answer within \\boxed{}.",
}


def reward(text: str, answer: str, protocol: str | None = None) -> dict[str, float]:
    row = {"answer": answer, "solution": rf"$\boxed{{{answer}}}$"}
    scores = load_task("math500", protocol).reward([row], [text])
    return {name: float(value[0]) for name, value in scores.items()}


@pytest.mark.parametrize(("protocol", "split"), PROMPTS)
def test_the_first_prompt_of_a_protocol_is_pinned(protocol, split):
    """L5, L7."""
    row = load_task("math500", protocol).rows(split, SLICE)[0]
    assert row["prompt"] == PROMPTS[protocol, split]
    assert row["answer"] == r"\left( 3, \frac{\pi}{2} \right)"


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_default_prompts_are_those_of_d1(split):
    assert load_task("math500").rows(split, SLICE) == load_task("math500", "d1").rows(split, SLICE)


@pytest.mark.parametrize(("protocol", "recipe"), [("d1", "d1 math"), ("maskgrpo", "maskgrpo math500")])
def test_terms_of_a_recipe_are_the_right_ones(protocol, recipe):
    used, task = FORMATS["used_in_training"][recipe], load_task("math500", protocol)
    assert task.weights == dict.fromkeys(used, 1.0)
    rows = [{"answer": case["gold"], "solution": case["gold_solution"]} for case in CLEAR]
    scores = task.reward(rows, [case["completion"] for case in CLEAR])
    for name in used:
        expected = np.array([case["right"][protocol][name] for case in CLEAR])
        np.testing.assert_allclose(scores[name], expected, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("protocol", [None, "d1", "maskgrpo", "llada"])
def test_the_example_answer_of_the_prompt_earns_the_full_format_reward(protocol):
    """K2."""
    prompt = load_task("math500", protocol).rows("test", SLICE)[0]["prompt"]
    start = prompt.index(r"\boxed{}" if protocol == "llada" else "<reasoning>")
    scores = reward(prompt[start:].split("\n\n")[0], "1", protocol)
    name = "format" if protocol in (None, "llada") else "boxed_and_answer_tags"
    assert scores[name] == (0.5 if protocol == "maskgrpo" else 1.0)


def test_the_example_of_d1s_training_prompt_with_the_box_it_asks_for_earns_the_full_format_reward():
    """K2: the example shows dots, and the sentence after it asks for a box."""
    prompt = load_task("math500", "d1").rows("train", SLICE)[0]["prompt"]
    example = prompt[prompt.index("<reasoning>") : prompt.index("</answer>")]
    assert "Wrap the final answer in a \\boxed{}" in prompt
    head, _, dots = example.rpartition("...")
    assert reward(head + r"\boxed{...}" + dots + "</answer>", "1", "d1")["boxed_and_answer_tags"] == 1.0


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"Use \boxed please. \[\boxed{\frac{1}{2}}\]", r"\dfrac12", 1),
        (r"\boxed{4210_{5}}", "4210_{5}", 1),
        (r"\[ \boxed{42} \]", "42", 1),
        ("the answer is 42", "42", 0),
        ("<answer>\n42\n</answer>", "42", 1),
        (r"<answer>\boxed{42}</answer><|eot_id|>", "42", 1),
        (r"\boxed{\frac{9}{5}}", r"1\frac{4}{5}", 1),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 0),
        (r"\boxed{42", "42", 0),
        ("", "42", 0),
    ],
)
def test_the_last_box_is_judged_as_mathematics(completion, answer, right):
    """K3."""
    assert reward(completion, answer)["correctness"] == right
    for protocol in ("d1", "maskgrpo"):
        assert reward(completion, answer, protocol)["verdict"] == right


def test_no_box_and_no_tag_is_no_answer():
    """K3."""
    assert math500.extract("I do not know", {}) is None
    assert math500.extract("<answer> 42 </answer><answer></answer>", {}) == "42"


def test_a_row_without_answer_takes_the_last_box_of_its_solution(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"problem": "p", "solution": r"so \boxed{1} or $\boxed{\frac12}$"}))
    assert load_task("math500").rows("train", str(path))[0]["answer"] == r"\frac12"


def test_training_problems_that_are_in_the_test_set_are_left_out(monkeypatch, tmp_path):
    import datasets

    def row(problem):
        return {"problem": problem, "solution": r"\boxed{1}"}

    def load_dataset(repo, config, split):
        if split == "test":
            assert repo == "HuggingFaceH4/MATH-500" and config is None
            return [row("a  b"), row("c")]
        assert repo == "EleutherAI/hendrycks_math"
        return [row(f"{config}"), row("a b")]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load_task("math500").rows("train", None)
    assert [row["problem"] for row in rows] == list(math500.SUBJECTS)
    assert len(load_task("math500").rows("test", None)) == 2

    for split, problems in {"train": "abc", "test": "b"}.items():
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(row(x)) for x in problems))
    rows = load_task("math500").rows("train", str(tmp_path / "{split}.jsonl"))
    assert [row["problem"] for row in rows] == ["a", "c"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "p"}, "lacks the field solution"),
        ({"problem": "", "solution": r"\boxed{1}"}, "problem is not a text"),
        ({"problem": "p", "solution": "one"}, "no answer"),
        ({"problem": "p", "solution": r"\boxed{1}", "answer": 1}, "no answer"),
    ],
)
def test_a_malformed_row_names_file_and_line(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message) as error:
        load_task("math500").rows("test", str(path))
    assert str(error.value).startswith(f"{path}:2: ")


def test_an_unknown_protocol_is_refused_with_what_is_accepted():
    with pytest.raises(ValueError, match="--protocol d2: math500 accepts d1, maskgrpo, llada"):
        load_task("math500", "d2")


def test_an_empty_batch_has_every_component():
    for protocol in (None, *math500.PROTOCOLS):
        task = load_task("math500", protocol)
        assert set(task.reward([], [])) >= {*task.weights, task.score}


def test_every_solution_of_math500_is_right_for_its_problem_and_wrong_for_the_next():
    rows = load_task("math500").rows("test", str(shared("data/math500_test.jsonl")))
    assert len(rows) == 500
    assert all(math500.verdict(row["solution"], row["answer"]) for row in rows)
    for row, other in zip(rows, rows[1:], strict=False):
        same = row["answer"].removeprefix("x=") == other["answer"].removeprefix("x=")
        assert math500.verdict(row["solution"], other["answer"]) == same
