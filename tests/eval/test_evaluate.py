"""eval/evaluate.py: scores that depend on the items alone, and are not lost or doubled by a resume."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import Pairwise

from common import World
from eval.evaluate import evaluate, evaluate_run, mean_and_error
from eval.task import Task

ALONE = World(0, 1, torch.device("cpu"))
SETTINGS = dict(sampler="emerge", steps=4, temperature=1.0, cfg=0.0, cfg_until=1.0, schedule_name="cosine")
ROWS = [{"prompt": prompt, "kind": len(prompt)} for prompt in ("1 2 3", "4", "2 2", "3 1", "1")]


def share_of_ones(rows, completions):
    return {"ones": np.array([c.split().count("1") / 6 for c in completions])}


TASK = Task("toy", "text", None, share_of_ones, {"ones": 1.0}, "ones")


@pytest.fixture
def policy():
    return Pairwise(K=4, L=6, scale=0.3, end_ids=(0,))


def test_every_item_is_scored_once_whatever_the_micro_batch(policy):
    """L11: the sampler and the noise of an item are the same in any batch."""
    together, apart = (
        evaluate(policy, TASK, ROWS, SETTINGS, seed=1, world=ALONE, micro_batch=n) for n in (5, 2)
    )
    assert together.completions == apart.completions and len(apart.completions) == 5
    assert together.summary == apart.summary and together.summary["n"] == 5
    other = evaluate(policy, TASK, ROWS, SETTINGS, seed=2, world=ALONE, micro_batch=5)
    assert other.completions != together.completions


def test_a_score_over_categories_is_the_mean_of_their_means_with_its_error():
    values = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    score, se = mean_and_error(values, ["a", "a", "b", "b", "b", "b"])
    assert score == pytest.approx((0.5 + 0.75) / 2)
    assert se == pytest.approx(np.sqrt(0.5 / 2 + 0.25 / 4) / 2)
    score, se = mean_and_error(np.array([1.0] * 75 + [0.0] * 25), [None] * 100)
    assert (score, se) == (0.75, pytest.approx(0.0435, abs=1e-4))


class Log:
    """What ``evaluate_run`` asks of a run."""

    def __init__(self, path):
        self.world, self.dir, self.lines = ALONE, path, []
        (path / "samples").mkdir()

    def score(self, step, task, mode, result):
        self.lines.append({"step": step, "mode": mode, **result})

    def scores(self):
        return self.lines


def test_a_run_killed_between_two_scores_of_a_step_makes_the_other_on_resume(tmp_path, policy):
    """And makes none twice: the table at the end needs both modes of the first and of the last step."""
    args = dict(iterations=4, eval_every=2, eval_prompts=3, eval_steps=None, temperature=1.0)
    args = SimpleNamespace(**args, seed=0, micro_batch=8)
    whole = Log(tmp_path)
    for step in range(5):
        evaluate_run(whole, step, policy, TASK, ROWS, SETTINGS, args)
    expected = [(step, mode) for step in (0, 2, 4) for mode in ("greedy", "sampled")]
    assert [(line["step"], line["mode"]) for line in whole.lines] == expected
    before = list(whole.lines)
    del whole.lines[1:]
    for step in (0, 0, 2, 4):
        evaluate_run(whole, step, policy, TASK, ROWS, SETTINGS, args)
    assert whole.lines == before
    assert (tmp_path / "samples/step_000004.txt").read_text().count("[") == 3
