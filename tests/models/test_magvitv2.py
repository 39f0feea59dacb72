"""MAGVITv2: codes and pixels against the recorded ones, and the released sizes."""

import json

import pytest
import torch
from conftest import shared
from safetensors.torch import load_file, save_file

from models.magvitv2 import RELEASED, MAGVITv2

TINY = {
    "encoder": {"ch": 32, "ch_mult": (1, 1), "num_res_blocks": (1, 1), "z_channels": 4},
    "decoder": {"ch": 32, "ch_mult": (1, 1), "num_res_blocks": (1, 1), "z_channels": 4},
}


@pytest.fixture(scope="module")
def golden():
    path = shared("golden/magvitv2_tiny/config.json").parent
    return MAGVITv2.load(str(path)), load_file(path / "reference.safetensors")


@pytest.fixture
def tiny():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MAGVITv2(**TINY)


def test_codes_equal_the_recorded_ones(golden):
    model, ref = golden
    latents = model.encoder(ref["images"])
    torch.testing.assert_close(latents, ref["encoder_out"], rtol=0, atol=1e-4)
    codes = model.code(latents.flatten(2).transpose(1, 2))
    assert torch.equal(codes, ref["codes"])
    z_q = model.latent(codes).transpose(1, 2).unflatten(2, (4, 4))
    assert torch.equal(z_q, ref["z_q"])


def test_pixels_equal_the_recorded_ones(golden):
    model, ref = golden
    for codes, pixels, shape in (
        ("codes", "decoded_from_codes", None),
        ("codes_random", "decoded_random", None),
        ("codes_nonsquare", "decoded_nonsquare", (2, 4)),
    ):
        torch.testing.assert_close(model.pixels(ref[codes], shape), ref[pixels], rtol=0, atol=1e-4)


def test_pictures_equal_the_recorded_ones_up_to_one_rounding(golden):
    model, ref = golden
    off = model.decode(ref["codes_random"]).permute(0, 2, 3, 1).int() - ref["decoded_random_uint8"].int()
    assert off.abs().max() <= 1 and (off != 0).float().mean() < 1e-3


def test_the_thirteen_bit_map_equals_the_recorded_one(tiny):
    ref = load_file(shared("golden/magvitv2_tiny/reference.safetensors"))
    tiny.bits = 13
    assert torch.equal(tiny.latent(ref["lfq13_index"]), ref["lfq13_signs"].float())
    assert torch.equal(tiny.code(ref["lfq13_signs"].float()), ref["lfq13_index"])


def test_code_and_latent_are_inverse_and_zero_is_minus(tiny):
    assert torch.equal(tiny.code(tiny.codebook), torch.arange(16))
    assert tiny.code(torch.tensor([[0.0, 1.0, -1.0, 0.5]])).tolist() == [0b0101]


def test_the_released_sizes_give_the_released_tensors():
    with torch.device("meta"):
        model = MAGVITv2(**RELEASED)
    assert len(model.state_dict()) + 2 == 382  # two are derived: quantize.embedding, quantize.power_vals
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(95.4e6, rel=1e-3)


def test_uint8_pictures_are_encoded_as_scaled_floats(tiny):
    images = torch.randint(256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    latents = tiny.encoder(images / 127.5 - 1).flatten(2).transpose(1, 2)
    assert torch.equal(tiny.encode(images), tiny.code(latents))


def test_a_batch_is_worked_off_in_parts_alike(tiny, monkeypatch):
    codes = torch.randint(16, (3, 16), generator=torch.Generator().manual_seed(0))
    whole = tiny.decode(codes)
    monkeypatch.setattr("models.magvitv2.BATCH", 2)
    assert (tiny.decode(codes).int() - whole.int()).abs().max() <= 1
    assert torch.equal(tiny.encode(whole), torch.cat([tiny.encode(x[None]) for x in whole]))


def test_codes_of_no_picture_are_an_error(tiny):
    with pytest.raises(ValueError, match="15 codes do not make a picture of 3 x 3"):
        tiny.decode(torch.zeros(1, 15, dtype=torch.long))


def test_loading_is_strict_and_remembers_where_from(tiny, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    tensors = tiny.state_dict() | {"quantize.embedding": tiny.codebook}
    save_file(tensors, tmp_path / "pytorch_model.safetensors")
    again = MAGVITv2.load(str(tmp_path))
    assert again.source == str(tmp_path) and not any(p.requires_grad for p in again.parameters())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), tiny.parameters(), strict=True))
    save_file(tensors | {"decoder.more": torch.ones(1)}, tmp_path / "pytorch_model.safetensors")
    with pytest.raises(ValueError, match="unexpected tensors.*decoder.more"):
        MAGVITv2.load(str(tmp_path))
    with pytest.raises(ValueError, match="--vq nowhere"):
        MAGVITv2.load("nowhere")
