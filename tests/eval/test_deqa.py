import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_rewards import picture, stand_in

from eval import deqa
from eval.reward_client import RewardServersDown
from eval.rewards import Rewards
from eval.task import Task

ROWS = [{"prompt": f"caption {i}"} for i in range(20)]
IMAGES = [picture(8, 8 + i) for i in range(20)]
TASK = Task(
    "t", "image", lambda *_: [], lambda rows, images: {"own": np.ones(len(rows))}, {"own": 1.0}, "own"
)

# In place of transformers 4.36 and the released code: a "model" whose score is the width of the picture.
OLD_TRANSFORMERS = """
import torch
__version__ = "4.36.1"

class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, name, trust_remote_code, attn_implementation, torch_dtype):
        assert (name, trust_remote_code, attn_implementation) == ("zhiyuanyou/DeQA-Score-Mix3", True, "eager")
        return cls()

    def to(self, device):
        return self

    def eval(self):
        return self

    def score(self, images):
        return torch.tensor([1 + image.width / 8 for image in images])
"""


def test_deqa_raw_is_reported_and_a_fifth_trains():
    scores = deqa.components([1.0, 3.5, 5.0])
    assert list(scores) == ["deqa", "deqa_raw"]
    np.testing.assert_allclose(scores["deqa"], [0.2, 0.7, 1.0])
    assert scores["deqa_raw"].tolist() == [1.0, 3.5, 5.0]


@pytest.mark.parametrize("raw", [float("nan"), 0.4, 80.0])
def test_deqa_score_outside_of_1_to_5_is_an_error(raw):
    with pytest.raises(ValueError, match="scores within 1..5 expected"):
        deqa.components([3.0, raw])


def test_deqa_in_this_environment_says_where_it_runs():
    with pytest.raises(ValueError, match="reward_server --reward deqa.*transformers 4.36.1") as error:
        deqa.reward()
    assert "\n" not in str(error.value)


def test_deqa_runs_in_an_interpreter_with_its_own_transformers(tmp_path):
    """M7: the reward lives in another process with other pins; the trainer reads it by URL."""
    (tmp_path / "transformers.py").write_text(OLD_TRANSFORMERS)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    server = subprocess.Popen(
        [sys.executable, "-m", "eval.reward_server", "--reward", "deqa", "--port", "0", "--device", "cpu"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = server.stdout.readline().split()[2].rstrip(",")
        rewards = Rewards(TASK, f"own=1,{address}/deqa=0.5", strict=True)
        found = rewards.components(ROWS, IMAGES)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    raw = [1 + (8 + i) / 8 for i in range(20)]  # in order, though sent in several requests
    np.testing.assert_allclose(found["deqa_raw"], raw)
    np.testing.assert_allclose(found["deqa"], np.array(raw) / 5)
    np.testing.assert_allclose(rewards.total(found), 1 + 0.1 * np.array(raw))


def serving(scores):
    def answer(path, body, headers):
        if path == "/health":
            return 200, {"status": "ok", "rewards": ["deqa"]}
        return 200, {"id": body["id"], "scores": {"deqa": scores[: len(body["rows"])]}}

    return answer


def test_deqa_answer_without_a_number_is_an_error():
    """M7: None or NaN from a server never becomes a silent reward."""
    with stand_in(serving([0.5, None])) as address:
        with pytest.raises(ValueError, match="1 of 2 scores of deqa are None"):
            Rewards(TASK, f"{address}/deqa=1", strict=True).components(ROWS[:2], IMAGES[:2])
        lenient = Rewards(TASK, f"{address}/deqa=1")
        with pytest.warns(UserWarning, match="scored 0"):
            assert lenient.components(ROWS[:2], IMAGES[:2])["deqa"].tolist() == [0.5, 0.0]
        assert lenient.errors == 1


def test_deqa_server_that_is_gone_stops_the_run():
    with stand_in(serving([0.5])) as address:
        pass
    with pytest.raises(RewardServersDown, match="deqa"):
        Rewards(TASK, f"{address}/deqa=1")
