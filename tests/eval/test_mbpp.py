"""The MBPP task: prompts, extraction, reward (K2, K9, K10 of the reports)."""

import json
import time

import numpy as np
import pytest
from conftest import ROOT, shared

from eval.mbpp import D1_FORMAT, extract, extract_code, fenced_blocks, reward, task
from eval.rewards import Rewards
from eval.sandbox import Limits, Program, isolation, judge

SLICE = str(ROOT / "tests/golden/mbpp_slice.jsonl")
CASES = json.loads((ROOT / "tests/golden/mbpp_programs.json").read_text())["cases"]
TESTS = ["assert add(2, 3) == 5", "assert add(0, 1) == 1"]
ROW = {"task_id": 601, "text": "Add.", "code": "", "test_list": TESTS}
GOOD = "```python\ndef add(a, b):\n    return a + b\n```"

pytestmark = pytest.mark.skipif(isolation()[0] is None, reason="no isolation on this machine")


def test_prompt_of_the_maskgrpo_protocol_is_the_public_one():
    case = next(case for case in CASES if case.get("mbpp_task_id") == 11)
    row = task("maskgrpo").rows("test", SLICE)[0]
    assert row["task_id"] == 11 and row["prompt"] == case["prompt"]


def test_prompt_of_the_d1_protocol_asks_for_reasoning_and_a_fence():
    plain, asked = (task(protocol).rows("test", SLICE)[0]["prompt"] for protocol in ("maskgrpo", "d1"))
    assert asked == plain + D1_FORMAT
    assert D1_FORMAT.endswith("<answer>\n```python\n# your code here\n```\n</answer>")


def test_prompt_of_the_llada_protocol_holds_three_examples():
    prompt = task("llada").rows("test", SLICE)[0]["prompt"]
    parts = prompt.split("You are an expert Python programmer, and here is your task: ")
    assert len(parts) == 5 and prompt.endswith('assert remove_Occ("PHP","P") == "H"\n\n[BEGIN]\n')
    assert parts[1].startswith(
        "Write a function to find the similar elements from the given two tuple lists."
    )
    code = "def similar_elements(test_tup1, test_tup2):\n  res = tuple(set(test_tup1) & set(test_tup2))"
    assert parts[1].endswith(f"\n\n[BEGIN]\n{code}\n  return (res)\n[DONE]\n\n")
    assert "\r" not in prompt


def test_an_answer_in_the_form_that_the_prompt_shows_earns_the_full_format_reward():
    """K2; the public prompt (maskgrpo) asks for code and for no fence, so bare code has the form too."""
    row = task("d1").rows("test", SLICE)[0]
    examples = [row["prompt"].split("format:\n")[1], row["code"], f"```python\n{row['code']}```"]
    shots = task("llada").rows("test", SLICE)[0]["prompt"].split("[BEGIN]\n")[1:4]
    names = "similar_elements", "is_not_prime", "heap_queue_largest"
    examples += [shot.replace(name, "remove_Occ") for shot, name in zip(shots, names, strict=True)]
    for example in examples:
        assert extract_code(example, row["test_list"])[1] == 0.5, example


def test_format_reward_is_the_public_one_but_for_its_faults():
    """0.5, 0.25, 0; s003 and s004 write ```py, s005 writes bare code, which the prompt does not forbid."""
    for case in CASES:
        official = case["official"]["maskgrpo_format_reward"]
        mended = case["id"][-4:] in ("s003", "s004", "s005")
        assert extract_code(case["completion"], case["tests"])[1] == (0.5 if mended else official), case["id"]


def test_extraction_is_linear_in_the_text():
    """K9: long blank tails, unclosed and countless fences."""
    for text in (
        "x" + " " * 4000,
        GOOD + " " * 100_000,
        "```python\n" + " " * 100_000,
        "```" * 30_000,
        "```x" + "`" * 100_000,
        "```\n" * 4000,
    ):
        start = time.perf_counter()
        fenced_blocks(text)
        assert time.perf_counter() - start < 0.01
    start = time.perf_counter()
    extract_code("x" + " " * 4000, TESTS)
    assert time.perf_counter() - start < 0.01


def test_the_block_that_defines_what_the_tests_call_is_taken():
    usage = "```python\nprint(add(1, 2))\n```"
    shell = "```bash\npip install add\n```"
    wrong = "```python\ndef add(a, b):\n    return a - b\n```"
    right = "def add(a, b):\n    return a + b\n"
    assert extract_code(f"{shell}\n{GOOD}\n{usage}", TESTS) == (right, 0.5)
    assert extract_code(f"{wrong}\nbetter:\n{GOOD}", TESTS) == (right, 0.5)
    assert extract_code(f"call `add` or ```add```:\n{GOOD}", TESTS) == (right, 0.5)
    assert extract_code(f"{right}[DONE]\nYou are", TESTS) == (right, 0.5)
    assert extract_code("```python\n" + right, TESTS) == ("", 0.0)  # cut
    assert extract_code("add", TESTS)[1] == 0.0  # one word is Python, but no answer


def test_reward_counts_tests_and_scores_only_when_all_pass():
    half = "```python\ndef add(a, b):\n    return 5\n```"
    found = reward([ROW] * 4, [GOOD, half, "```python\ndef add(:\n```", ""])
    np.testing.assert_array_equal(found["tests"], [1, 0.5, 0, 0])
    np.testing.assert_array_equal(found["correctness"], [1, 0, 0, 0])
    np.testing.assert_array_equal(found["format"], [0.5, 0.5, 0.25, 0])
    assert task().weights == {"tests": 1.0, "format": 1.0} and task().score == "correctness"
    assert all(values.shape == (0,) for values in reward([], []).values())


def test_what_is_extracted_is_the_program_that_is_run(monkeypatch):
    run = []
    monkeypatch.setattr("eval.mbpp.judge", lambda programs, **how: run.extend(programs) or judge([]))
    completions = [
        GOOD,
        f"Call it so:\n```\nadd(1, 2)\n```\n{GOOD}",
        "```python\ndef add(:\n```",
        "```cut",
        "",
    ]
    reward([ROW] * len(completions), completions)
    found = [extract(completion, ROW) for completion in completions]
    assert [program.code for program in run] == [code or "" for code in found]
    assert found[0] == found[1] == "def add(a, b):\n    return a + b\n" and found[-2:] == [None, None]


def test_an_error_in_the_reward_is_raised_when_strict_and_counted_otherwise():
    """K10: a wrong type, or a test that cannot be judged, is not a completion that failed."""
    mbpp = task()
    with pytest.raises(TypeError, match="is a string, got NoneType"):
        Rewards(mbpp, strict=True).components([ROW], [None])
    with pytest.raises(ValueError, match="cannot be judged"):
        Rewards(mbpp, strict=True).components([ROW | {"test_list": ["assert eval(add(1))"]}], [GOOD])
    rewards = Rewards(mbpp)
    with pytest.warns(UserWarning, match="scored 0"):
        assert rewards.components([ROW], [None])["correctness"].tolist() == [0]
    assert rewards.errors == 1


def test_reference_solutions_pass_their_tests():
    rows = [json.loads(line) for line in open(SLICE)]
    programs = [Program(r["code"], tuple(r["test_list"]), r["test_setup_code"]) for r in rows]
    for row, found in zip(rows, judge(programs, Limits(20, 40)), strict=True):
        assert all(found.passed), (row["task_id"], found.error)


def test_splits_follow_the_task_ids_and_all_tests_can_be_judged():
    path = str(shared("data/mbpp.jsonl"))
    assert [len(task().rows(split, path)) for split in ("train", "test")] == [374, 500]
    rows = [json.loads(line) for line in open(path)][::40]
    found = reward(rows, [f"```python\n{row['code']}\n```" for row in rows])
    assert found["correctness"].all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_id": "601"}, "row 1: task_id must be of type int, got str"),
        ({"test_list": []}, "row 1: test_list must hold assert statements"),
        ({"test_list": ["print(1)"]}, "row 1: test 'print\\(1\\)': one assert statement expected"),
        ({"test_list": ["assert all(f(x) for x in y)"]}, "row 1: .*cannot be judged"),
        ({"task_id": 5}, "holds no task of split train \\(task_id 601 to 974\\)"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, change, message):
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(ROW | change))
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        task().rows("train", str(path))


def test_a_missing_field_names_file_and_line(tmp_path):
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({"task_id": 602}))
    with pytest.raises(ValueError, match=f"{path}:2: lacks the field text"):
        task().rows("train", str(path))


def test_an_unknown_protocol_and_missing_examples_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--protocol gpt: .*accepted: maskgrpo, d1, llada"):
        task("gpt")
    path = tmp_path / "mbpp.jsonl"
    path.write_text(json.dumps(ROW))
    with pytest.raises(ValueError, match="tasks \\(2, 3, 4\\)"):
        task("llada").rows("train", str(path))
