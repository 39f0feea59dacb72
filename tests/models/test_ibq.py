"""IBQ against the public AutoencoderVQ."""

import json
from pathlib import Path

import pytest
import torch
from conftest import shared
from safetensors.torch import load_file

from models.ibq import IBQ


@pytest.fixture(scope="module")
def golden():
    return load_file(Path(__file__).parent.parent / "golden/ibq_tiny.safetensors")


@pytest.fixture(scope="module")
def vq():
    return IBQ.load(shared("golden/ibq_tiny"))


def test_encoder_equals_the_public_one(vq, golden):
    z = vq.latent(golden["image"])
    torch.testing.assert_close(z, golden["pre_quant"], atol=2e-5, rtol=0)
    assert torch.equal(vq.quantize(z), golden["codes"].long())
    assert torch.equal(vq.codebook[golden["ids_random"]].permute(0, 3, 1, 2), golden["dequantized"])


def test_decoder_equals_the_public_one(vq, golden):
    for codes, expected in (("codes", "decoded_from_codes"), ("ids_random", "decoded_random")):
        torch.testing.assert_close(vq.pixels(golden[codes].long()), golden[expected], atol=2e-5, rtol=0)
    frames = vq.pixels(golden["ids_two_frames"][0]).transpose(0, 1)
    torch.testing.assert_close(frames, golden["decoded_two_frames"][0], atol=2e-5, rtol=0)


def test_images_are_truncated_to_bytes(vq, golden):
    images = vq.decode(golden["ids_random"])
    assert images.dtype == torch.uint8
    difference = images.permute(0, 2, 3, 1).int() - golden["decoded_random_uint8_nhwc"].int()
    assert difference.abs().max() <= 1 and (difference != 0).float().mean() < 0.01


def test_encode_takes_bytes_and_batches_do_not_matter(vq, golden, monkeypatch):
    images = ((golden["image"] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    codes = vq.encode(images)
    assert codes.shape == (2, 4, 6)
    assert (codes == golden["codes"]).float().mean() > 0.9  # bytes are coarser than the recorded floats
    monkeypatch.setattr("models.ibq.AT_ONCE", 1)
    assert torch.equal(vq.encode(images), codes)


def test_saved_tokenizer_loads_again(vq, golden, tmp_path):
    vq.save(tmp_path)
    again = IBQ.load(tmp_path)
    assert torch.equal(again.decode(golden["ids_random"]), vq.decode(golden["ids_random"]))
    assert json.loads((tmp_path / "config.json").read_text())["class_name"] == "AutoencoderVQ"


def test_another_quantizer_is_refused():
    """The video checkpoint has another class of the same name."""
    with pytest.raises(ValueError, match="FSQuantizer"):
        IBQ({"_quantizer_name": "FSQuantizer"})
