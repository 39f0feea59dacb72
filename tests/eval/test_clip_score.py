import numpy as np
import pytest
import torch
from tiny_rewards import picture, save_clip

from eval.clip_score import reward


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("clip"))


ROWS = [
    {"prompt": text}
    for text in ("a red cat", "two dogs", "x", "a cup left of a " + "very " * 20 + "big bowl")
]
IMAGES = [picture(32, 32), picture(48, 64, 5), picture(40, 33, 7), picture(32, 32, 11)]


def test_clip_is_the_cosine_of_the_two_embeddings(checkpoint):
    from transformers import AutoTokenizer, CLIPModel
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    model = CLIPModel.from_pretrained(checkpoint).eval()
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    pixels = ((IMAGES[0] / 255 - mean) / std)[None]  # 32 x 32 already: no resizing
    with torch.no_grad():
        text = model.get_text_features(
            **AutoTokenizer.from_pretrained(checkpoint)("a red cat", return_tensors="pt")
        )
        image = model.get_image_features(pixels)
    expected = torch.cosine_similarity(text.pooler_output, image.pooler_output).item()
    assert reward(model=checkpoint)(ROWS[:1], IMAGES[:1])["clip"] == pytest.approx([expected], abs=1e-5)


def test_clip_of_a_list_equals_one_by_one_and_keeps_the_order(checkpoint):
    score = reward(model=checkpoint, batch=3)
    together = score(ROWS, IMAGES)["clip"]
    apart = [score([row], [image])["clip"][0] for row, image in zip(ROWS, IMAGES, strict=True)]
    assert together.shape == (4,) and together.dtype == np.float64
    np.testing.assert_allclose(together, apart, atol=1e-6)
    np.testing.assert_allclose(score(ROWS[::-1], IMAGES[::-1])["clip"], together[::-1], atol=1e-6)
    assert np.ptp(together) > 0.01 and (np.abs(together) <= 1).all()


def test_clip_reads_the_caption(checkpoint):
    score = reward(model=checkpoint)
    assert abs(np.subtract(*score(ROWS[:2], [IMAGES[0]] * 2)["clip"])) > 1e-3


def test_clip_of_nothing_is_empty_and_unequal_lists_are_refused(checkpoint):
    score = reward(model=checkpoint)
    assert score([], [])["clip"].shape == (0,)
    with pytest.raises(ValueError, match="1 prompts for 2 images"):
        score(ROWS[:1], IMAGES[:2])


def test_clip_weights_that_do_not_fit_are_named(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((open(f"{checkpoint}/{file}", "rb")).read())
    weights = load_file(f"{checkpoint}/model.safetensors")
    del weights["visual_projection.weight"]
    weights["stray"] = torch.zeros(1)
    weights["text_projection.weight"] = torch.zeros(12, 5)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError) as error:
        reward(model=str(tmp_path))
    assert "missing: visual_projection.weight" in str(error.value)
    assert "unexpected: stray" in str(error.value)
    assert "text_projection.weight (12, 5) for (12, 16)" in str(error.value)


def test_clip_that_is_nowhere_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: no CLIPModel can be loaded") as error:
        reward(model=str(tmp_path))
    assert "\n" not in str(error.value)
