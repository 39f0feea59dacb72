"""GenEval's rule against the verdicts of its own code, recorded in tests/golden/geneval_scoring.json."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import shared

from eval import geneval_rule
from eval.geneval_rule import CLASSES, Detection, Rule, check_row, dense, judge, keep, relations

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/geneval_scoring.json").read_text())
CASES = {case["id"].removeprefix("geneval_scoring-"): case for case in GOLDEN["cases"]}


def objects_of(case):
    rule = Rule(**case["options"])
    found = [Detection(d["class"], d["score"], d["bbox"], color=d.get("color")) for d in case["detections"]]
    return keep(found, case["metadata"]["tag"], rule), rule


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_verdict_is_right_in_every_golden_case(case):
    objects, rule = objects_of(case)
    assert {name: len(found) for name, found in objects.items()} == case["official"]["kept_per_class"]
    correct, reason = judge(case["metadata"], objects, rule)
    assert correct == case["right"]["correct"]
    assert reason == case["official"]["reason"]


# Where geneval_dense is not the recorded soft score, and why.
DENSE_DIFFERS = {
    "s019": (0.0, "16 books for 3: the recorded part is 1 - 13/3, below 0; ours stops at 0"),
    "s031": (0.0, "three vases for one: the recorded part is -1; ours 0, as the colour part"),
    "s051": (0.5, "cup kept is 1, the excluded bowl is there and adds a 0 that the recorded form leaves out"),
    "s052": (1.0, "nothing asked for, the excluded bowl is absent: one part, 1; the recorded form has none"),
}


@pytest.mark.parametrize("name", CASES)
def test_dense_is_the_recorded_soft_score_clamped_with_excludes_counted(name):
    objects, rule = objects_of(CASES[name])
    recorded = CASES[name]["rl_reward_variant"]["soft_score"]
    expected, _why = DENSE_DIFFERS.get(name, (recorded, ""))
    assert dense(CASES[name]["metadata"], objects, rule) == pytest.approx(expected, abs=1e-6)
    assert (expected == recorded) == (name not in DENSE_DIFFERS)


def test_dense_clamps_each_part_by_itself():
    """Clamping the mean instead would give 0: parts 1 - 3/1 and 1."""
    row = {"include": [{"class": "cup", "count": 1}, {"class": "dog", "count": 1}]}
    box = (0, 0, 9, 9)
    objects = {"cup": [Detection("cup", 0.9, box)] * 4, "dog": [Detection("dog", 0.9, box)]}
    assert dense(row, objects) == 0.5


def test_dense_counts_an_excluded_class_once_for_each_clause_and_not_twice_for_included_ones():
    row = {
        "include": [{"class": "cup", "count": 1}],
        "exclude": [
            {"class": "cup", "count": 2},
            {"class": "bowl", "count": 1},
            {"class": "cat", "count": 1},
        ],
    }
    objects = {name: [Detection(name, 0.9, (0, 0, 9, 9))] for name in ("cup", "bowl")}
    assert dense(row, objects) == pytest.approx(2 / 3)
    assert dense({"include": []}, objects) == 0


def test_correct_pictures_with_exact_counts_have_full_dense_reward():
    for case in CASES.values():
        if case["right"]["correct"] and case["rl_reward_variant"]["strict_correct"]:
            assert dense(case["metadata"], *objects_of(case)) == 1


def test_relations_of_swapped_boxes_are_opposite():
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    corners = np.random.default_rng(0).uniform(0, 400, (50, 2, 2))
    sizes = np.random.default_rng(1).uniform(10, 90, (50, 2, 2))
    boxes = np.concatenate([corners, corners + sizes], axis=2)
    for a, b in boxes:
        assert [opposite[r] for r in relations(tuple(a), tuple(b))] == relations(tuple(b), tuple(a))


def test_classes_are_those_of_the_benchmark_in_its_order():
    assert CLASSES == tuple(shared("data/geneval_object_names.txt").read_text().split("\n")[:80])


def test_every_row_of_the_benchmark_passes_the_check():
    for name in ("evaluation_metadata", "evaluation_metadata_long", "flowgrpo_unseen_objects_metadata"):
        lines = shared(f"data/geneval_{name}.jsonl").read_text()
        for line in lines.splitlines():
            check_row(json.loads(line), name)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tag": "colour"}, "a tag out of single_object"),
        ({"prompt": None}, "needs a prompt"),
        ({"include": [{"class": "unicorn", "count": 1}]}, "'unicorn', which is none of the 80"),
        ({"include": ["cup"]}, "a list of objects"),
        ({"include": [{"class": "cup", "count": 0}]}, "the count must be 1 or more"),
        ({"include": [{"class": "cup", "count": 1, "color": "teal"}]}, "colour 'teal'"),
        ({"include": [{"class": "cup", "count": 1, "position": ["above", 0]}]}, "an earlier clause"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused(change, message):
    row = {"tag": "colors", "prompt": "p", "include": [{"class": "cup", "count": 1}]}
    check_row(row, "f:1")
    with pytest.raises(ValueError, match=message):
        check_row(row | change, "f:1")


def test_overlap_is_measured_with_the_last_pixel():
    assert geneval_rule.iou((0, 0, 99, 99), (50, 0, 149, 99)) == pytest.approx(1 / 3)
    assert geneval_rule.iou((0, 0, 9, 9), (20, 20, 29, 29)) == 0
