import base64
import io
import threading

import numpy as np
import pytest
from PIL import Image
from tiny_rewards import picture, save_vlm, stand_in

from eval.reward_client import RewardServersDown
from eval.unified import QUESTION, mark, reward

ROWS = [{"prompt": f"caption {i}"} for i in range(5)]
IMAGES = [picture(32, 32), picture(48, 64, 5), picture(40, 33, 7), picture(32, 32, 11), picture(20, 60)]
FAST = {"backoff": 0.001}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Final Score: 4", 4.0),
        ("cat (object): 1\nFinal Score:3.5", 3.5),
        ("Final Score:\n 2 and then Final Score: 5", 2.0),
        ("Final Score: 5.9", 5.0),  # nothing is above 5
        ("Final Score: 10", 0.0),  # not a 1
        ("Final Score: 0", 0.0),
        ("Score: 4", 0.0),
        ("", 0.0),
    ],
)
def test_mark_follows_final_score_and_is_0_without_one(answer, expected):
    assert mark(answer) == expected


def completion(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_unified_asks_the_endpoint_as_flow_grpo_does():
    seen = []

    def answer(path, body, headers):
        seen.append((path, body, headers["Authorization"]))
        return completion("Final Score: 4")

    with stand_in(answer) as address:
        scores = reward(url=address + "/v1", key="secret")(ROWS[:1], [picture(64, 32)])
    assert scores["unified"].tolist() == [0.8] and scores["unified_unread"].tolist() == [0]
    ((path, body, authorization),) = seen
    assert path == "/v1/chat/completions" and authorization == "Bearer secret"
    assert body["model"] == "UnifiedReward-7b-v1.5" and body["temperature"] == 0
    image, text = body["messages"][0]["content"]
    assert text["text"] == "<image>\n" + QUESTION.replace("{prompt}", "caption 0")
    kind, _, data = image["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (512, 512)


def test_unified_keeps_the_order_under_concurrent_answers():
    late = threading.Event()

    def answer(path, body, headers):
        number = int(body["messages"][0]["content"][1]["text"].partition("[caption ")[2].rstrip("]"))
        if number == 0:
            late.wait(10)  # the first question is answered last
        if number == 4:
            late.set()
        return completion(f"Final Score: {number + 1}" if number < 4 else "no idea")

    with stand_in(answer) as address:
        scores = reward(url=address)(ROWS, IMAGES)
    np.testing.assert_allclose(scores["unified"], [0.2, 0.4, 0.6, 0.8, 0.0])
    assert scores["unified_unread"].tolist() == [0, 0, 0, 0, 1]


def test_unified_tries_again_and_stops_when_the_endpoint_is_down():
    calls = []

    def answer(path, body, headers):
        calls.append(path)
        return completion("Final Score: 3") if len(calls) == 3 else (503, {"error": "busy"})

    with stand_in(answer) as address:
        assert reward(url=address, **FAST)(ROWS[:1], IMAGES[:1])["unified"].tolist() == [0.6]
        with pytest.raises(RewardServersDown, match="no answer after 2 attempts .HTTP 503"):
            reward(url=address, retries=1, **FAST)(ROWS[:1], IMAGES[:1])
    with pytest.raises(RewardServersDown, match="ConnectError"):
        reward(url=address, retries=1, **FAST)(ROWS[:1], IMAGES[:1])


@pytest.mark.parametrize(
    "reply",
    [(401, {"error": "wrong key"}), (200, "<html>"), (200, {"choices": []}), completion(None)],
)
def test_unified_answer_that_is_none_is_an_error_not_a_score(reply):
    """M7: a judge that silently answers None must not become a reward."""
    with stand_in(lambda *_: reply) as address:
        with pytest.raises(ValueError, match=f"HTTP {reply[0]}, not a chat completion"):
            reward(url=address, **FAST)(ROWS[:1], IMAGES[:1])


def test_unified_runs_on_a_local_model(tmp_path, monkeypatch):
    checkpoint = save_vlm(tmp_path, "qwen2_5_vl")
    monkeypatch.delenv("UNIFIED_URL", raising=False)
    scores = reward(model=checkpoint, max_tokens=4, question="Of {prompt}:")(ROWS[:2], IMAGES[:2])
    assert scores["unified"].tolist() == [0, 0] and scores["unified_unread"].tolist() == [
        1,
        1,
    ]  # random words
