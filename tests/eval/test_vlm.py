import pytest
import torch
from tiny_rewards import picture, save_tokenizer, save_vlm

from eval.reward_model import pil_images
from eval.vlm import chat, encode, local_judge, plain

PICTURES = pil_images(
    [picture(32, 32), picture(48, 64, 5), picture(40, 33, 7), picture(32, 32, 11), picture(20, 60)]
)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision"])
def checkpoint(request, tmp_path_factory):
    return save_vlm(tmp_path_factory.mktemp(request.param), request.param)


def test_local_judge_answers_a_list_as_one_by_one_and_sees_the_picture(checkpoint):
    judge = local_judge(checkpoint, max_tokens=8, batch=3)
    questions = ["what?", "how many dogs are there?", "a", "b <|image_pad|>", "is it red"]
    together = judge(questions, PICTURES)
    assert len(together) == 5
    assert together == [judge([q], [p])[0] for q, p in zip(questions, PICTURES, strict=True)]
    assert len(set(judge(["what?"] * 5, PICTURES))) > 1


def test_prompt_needs_exactly_one_placeholder(tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    directory = save_vlm(tmp_path, "qwen2_vl")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    images = AutoImageProcessor.from_pretrained(directory, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(directory)
    inputs = encode([chat("what?", tokenizer)], PICTURES[:1], tokenizer, images, model, "left")
    grid = inputs["image_grid_thw"][0]
    assert (inputs["input_ids"] == 261).sum() == grid.prod() // 4 == inputs["mm_token_type_ids"].sum()
    for prompt in ("no placeholder", "<|image_pad|><|image_pad|>"):
        with pytest.raises(ValueError, match="expected 1"):
            encode([prompt], PICTURES[:1], tokenizer, images, model, "left")


def test_plain_text_has_no_special_tokens(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    assert plain("a <|image_pad|>red<|im_end|> cat", tokenizer) == "a red cat"


def test_tokenizer_without_a_chat_template_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        chat("what?", save_tokenizer(tmp_path, chat_template=None))


def test_local_judge_refuses_another_model_type(tmp_path):
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'bert' is not supported locally; accepted: qwen2_vl"):
        local_judge(str(tmp_path))


def test_local_judge_names_weights_that_do_not_fit(tmp_path):
    from safetensors.torch import load_file, save_file

    save_vlm(tmp_path, "qwen2_vl")
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if name.endswith("layers.0.mlp.up_proj.weight"))
    del weights[lost]
    save_file(weights | {"stray": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="missing: .*layers.0.mlp.up_proj.weight; unexpected: .*stray"):
        local_judge(str(tmp_path))
