import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_rewards import picture, random_weights, save_tokenizer

from eval.imagereward import load, reward

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "imagereward_tiny.json").read_text())


def save_checkpoint(directory, change=lambda weights: None, vocab_size=60) -> str:
    """The golden's weights under the released names, in the released files."""
    shapes = dict(GOLDEN["shapes"])
    shapes["blip.text_encoder.embeddings.word_embeddings.weight"] = [vocab_size, 32]
    weights = random_weights(shapes, GOLDEN["weights_seed"])
    weights["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]  # a buffer, as released
    change(weights)
    torch.save(weights, directory / "ImageReward.pt")
    (directory / "med_config.json").write_text(json.dumps({**GOLDEN["med_config"], "vocab_size": vocab_size}))
    return str(directory)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """One whose vocabulary is that of the tiny tokenizer, which lies beside it."""
    directory = tmp_path_factory.mktemp("imagereward")
    save_tokenizer(directory)
    return save_checkpoint(directory, vocab_size=263)


ROWS = [{"prompt": text} for text in ("a red cat", "two dogs on a table", "x")]
IMAGES = [picture(32, 32), picture(48, 64, 5), picture(70, 33, 7)]


def test_imagereward_equals_the_released_code(tmp_path):
    model = load(save_checkpoint(tmp_path))
    generator = torch.Generator().manual_seed(GOLDEN["pixels_seed"])
    ids = torch.tensor(GOLDEN["input_ids"])
    with torch.no_grad():
        scores = model(ids, (ids != 0).long(), torch.randn(3, 3, 32, 32, generator=generator))
    assert scores.tolist() == pytest.approx(GOLDEN["scores"], abs=2e-5)


def test_imagereward_of_a_list_equals_one_by_one_and_keeps_the_order(checkpoint):
    score = reward(model=checkpoint, tokenizer=checkpoint, batch=2)
    together = score(ROWS, IMAGES)["imagereward"]
    apart = [score([row], [image])["imagereward"][0] for row, image in zip(ROWS, IMAGES, strict=True)]
    assert together.shape == (3,) and np.ptp(together) > 0.01
    np.testing.assert_allclose(together, apart, atol=1e-5)
    np.testing.assert_allclose(score(ROWS[::-1], IMAGES[::-1])["imagereward"], together[::-1], atol=1e-5)


def test_imagereward_reads_caption_and_picture(checkpoint):
    score = reward(model=checkpoint, tokenizer=checkpoint)
    same_picture = score(ROWS[:2], IMAGES[:1] * 2)["imagereward"]
    same_caption = score(ROWS[:1] * 2, IMAGES[:2])["imagereward"]
    assert abs(np.subtract(*same_picture)) > 1e-3 and abs(np.subtract(*same_caption)) > 1e-3


def test_imagereward_cuts_the_caption_at_35_tokens(checkpoint):
    score = reward(model=checkpoint, tokenizer=checkpoint)
    captions = ["a" * 34 + "b", "a" * 34 + "b and more", "a" * 34 + "c"]  # a token is a byte
    first, longer, other = score([{"prompt": text} for text in captions], IMAGES[:1] * 3)["imagereward"]
    assert first == pytest.approx(longer, abs=1e-5) and abs(first - other) > 1e-4


@pytest.mark.parametrize(("raw", "expected"), [(1.2005, 1.000), (0.16717, 0.0), (-2.0, -2.097)])
def test_imagereward_is_standardised_and_may_be_negative(tmp_path, raw, expected):
    """K14: raw 1.2005 -> 1.000; below 0 is a score, not an error."""

    def constant(weights):
        weights["mlp.layers.7.weight"].zero_()
        weights["mlp.layers.7.bias"].fill_(raw)

    save_tokenizer(tmp_path)
    checkpoint = save_checkpoint(tmp_path, constant, vocab_size=263)
    scores = reward(model=checkpoint, tokenizer=checkpoint)(ROWS[:1], IMAGES[:1])
    assert scores["imagereward"] == pytest.approx([expected], abs=1e-3)


def test_imagereward_weights_that_do_not_fit_are_named(tmp_path):
    def spoil(weights):
        del weights["blip.visual_encoder.blocks.1.norm1.weight"]
        weights["blip.stray"] = torch.zeros(1)
        weights["mlp.layers.0.weight"] = torch.zeros(1024, 7)

    with pytest.raises(ValueError) as error:
        load(save_checkpoint(tmp_path, spoil))
    assert "missing: vision.encoder.layers.1.layer_norm1.weight" in str(error.value)
    assert "unexpected: blip.stray" in str(error.value)
    assert "mlp.0.weight (1024, 7) for (1024, 32)" in str(error.value)


def test_imagereward_without_its_files_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="has no ImageReward.pt"):
        load(str(tmp_path))
    torch.save({"a": torch.zeros(1)}, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(json.dumps(GOLDEN["med_config"]))
    with pytest.raises(ValueError, match="not an ImageReward checkpoint"):
        load(str(tmp_path))
