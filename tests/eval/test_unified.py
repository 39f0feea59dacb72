import base64
import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_rewards import picture, redraw, save_tokenizer, stand_in

from eval import vlm
from eval.reward_client import RewardServersDown
from eval.reward_model import pil_images
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


TEXT = dict(
    vocab_size=263,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    pad_token_id=256,
    bos_token_id=None,
    eos_token_id=258,
)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
IDS = dict(image_token_id=261, video_token_id=262, vision_start_token_id=259, vision_end_token_id=260)


def tiny_vlm(kind: str):
    """A tiny model of a kind and its image processor."""
    import transformers as t

    small = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    if kind == "qwen2_vl":
        vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)
        config = t.Qwen2VLConfig(text_config=dict(TEXT, rope_parameters=MROPE), vision_config=vision, **IDS)
        return t.Qwen2VLForConditionalGeneration(config), t.Qwen2VLImageProcessorPil(size=small)
    if kind == "qwen2_5_vl":
        vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32)
        config = t.Qwen2_5_VLConfig(
            text_config=dict(TEXT, rope_parameters=MROPE), vision_config=vision, **IDS
        )
        return t.Qwen2_5_VLForConditionalGeneration(config), t.Qwen2VLImageProcessorPil(size=small)
    vision = dict(model_type="siglip_vision_model", hidden_size=32, intermediate_size=64, image_size=28)
    vision |= dict(num_hidden_layers=2, num_attention_heads=2, patch_size=14, vision_use_head=False)
    grid = [[28, 28], [28, 56], [56, 28]]
    config = t.LlavaOnevisionConfig(
        text_config=dict(TEXT, model_type="qwen2"),
        vision_config=vision,
        image_token_index=261,
        video_token_index=262,
        image_grid_pinpoints=grid,
    )
    processor = t.LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=grid)
    return t.LlavaOnevisionForConditionalGeneration(config), processor


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "llava_onevision"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    save_tokenizer(directory)
    model, processor = tiny_vlm(request.param)
    redraw(model).save_pretrained(directory)
    processor.save_pretrained(directory)
    return str(directory)


def test_local_judge_answers_a_list_as_one_by_one_and_sees_the_picture(checkpoint):
    judge = vlm.local_judge(checkpoint, max_tokens=8, batch=3)
    questions = ["what?", "how many dogs are there?", "a", "b <|image_pad|>", "is it red"]
    pictures = pil_images(IMAGES)
    together = judge(questions, pictures)
    assert len(together) == 5
    assert together == [judge([q], [p])[0] for q, p in zip(questions, pictures, strict=True)]
    assert len(set(judge(["what?"] * 5, pictures))) > 1


def test_unified_runs_on_a_local_model(checkpoint, monkeypatch):
    monkeypatch.delenv("UNIFIED_URL", raising=False)
    scores = reward(model=checkpoint, max_tokens=4, question="Of {prompt}:")(ROWS[:2], IMAGES[:2])
    assert scores["unified"].tolist() == [0, 0] and scores["unified_unread"].tolist() == [
        1,
        1,
    ]  # random words


def test_local_judge_refuses_another_model_type(tmp_path):
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'bert' is not supported locally; accepted: qwen2_vl"):
        vlm.local_judge(str(tmp_path))


def test_local_judge_names_weights_that_do_not_fit(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tokenizer(tmp_path)
    model, processor = tiny_vlm("qwen2_vl")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if name.endswith("layers.0.mlp.up_proj.weight"))
    del weights[lost]
    save_file(weights | {"stray": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing: .*layers.0.mlp.up_proj.weight; unexpected: .*stray"):
        vlm.local_judge(str(tmp_path))
