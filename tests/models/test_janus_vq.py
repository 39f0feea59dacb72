"""Janus's image tokenizer against the public VQ."""

from pathlib import Path

import pytest
import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file, save_file

from models.janus_vq import PREFIX, JanusVQ


@pytest.fixture(scope="module")
def golden():
    return load_file(Path(__file__).parent.parent / "golden/fudoki_tiny.safetensors")


def of(state: dict[str, torch.Tensor]) -> JanusVQ:
    return JanusVQ({name.removeprefix(PREFIX): value for name, value in state.items()})


@pytest.fixture(scope="module")
def vq():
    return of(load_file(shared("golden/fudoki_tiny/gen_vision_model.safetensors")))


@pytest.fixture
def small():
    """Weights from a seed."""
    return of(released_standins.janus_vq())


def test_pixels_and_codes_equal_the_public_ones(vq, golden):
    torch.testing.assert_close(vq.pixels(golden["vq.codes"]), golden["vq.decoded"], atol=2e-5, rtol=0)
    codes = vq.quantize(golden["vq.image"])
    assert torch.equal(codes, golden["vq.encoded_indices"].flatten(1))


def as_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """[-1, 1] -> 0..255, not yet cut to whole numbers."""
    return pixels.add(1).mul(127.5).clamp(0, 255)


def test_images_are_the_public_pixels_truncated_to_bytes(vq, golden):
    images = vq.decode(golden["vq.codes"])
    assert images.dtype == torch.uint8 and images.shape == (2, 3, 8, 8)
    difference = images.int() - as_bytes(golden["vq.decoded"]).int()
    assert difference.abs().max() <= 1 and (difference != 0).float().mean() < 0.01


def test_codes_of_bytes_are_the_public_ones(vq, golden):
    images = as_bytes(golden["vq.image"]).round().to(torch.uint8)
    codes = vq.encode(images)
    assert codes.shape == (2, 16)
    agree = (codes == golden["vq.encoded_indices"].flatten(1)).float().mean()
    assert agree > 0.9  # bytes are coarser than the recorded floats


def test_bytes_stand_for_minus_one_to_one(small, monkeypatch):
    monkeypatch.setattr(small, "pixels", lambda codes: torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0]))
    assert small.decode(torch.zeros(1, 4, dtype=torch.int64)).tolist() == [0, 0, 127, 191, 255, 255]
    monkeypatch.setattr(small, "quantize", lambda x: x)
    images = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(small.encode(images), torch.tensor([-1.0, -0.6, 1.0]))


def test_batches_do_not_matter(small, monkeypatch):
    codes = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(0))
    images = small.decode(codes)
    again = small.encode(images)
    monkeypatch.setattr("models.janus_vq.AT_ONCE", 2)
    assert torch.equal(small.decode(codes), images) and torch.equal(small.encode(images), again)


def test_stored_tensors_load_again_under_the_released_names(small, tmp_path):
    """Beside a model's other tensors, which are passed over."""
    state = small.state()
    assert state.keys() == released_standins.janus_vq().keys()
    save_file(state | {"gen_embed.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    again = JanusVQ.load(tmp_path)
    codes = torch.arange(16)[None]
    assert torch.equal(again.decode(codes), small.decode(codes))
    save_file({"gen_embed.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"--vq {tmp_path}: none of its tensors begins with {PREFIX}"):
        JanusVQ.load(tmp_path)
