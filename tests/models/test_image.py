"""models/image.py on a stand-in backbone: the image tokenizer's place, padded text, what ``load`` is told."""

import json

import pytest
import torch
from torch import nn

from models import tiny
from models.image import ImagePolicy


class Greys(nn.Module):
    """An image tokenizer: code k is a pixel of that grey value, four make a picture."""

    def __init__(self, source):
        super().__init__()
        self.source, self.layer = source, nn.Linear(2, 2)

    def decode(self, codes):
        return codes.view(-1, 1, 2, 2).expand(-1, 3, -1, -1).to(torch.uint8)

    def encode(self, images):
        return images[:, 0].long()  # [B, 2, 2]

    @classmethod
    def load(cls, source, device):
        return cls(source)


class Toy(ImagePolicy):
    """A word is its number of letters."""

    VQ = Greys

    def __init__(self, backbone, tokenizer, vq, *, pad_id, length, width):
        super().__init__(backbone, tokenizer, vq)
        self.pad_id, self.length, self.width = pad_id, length, width

    def encode(self, texts):
        return self.left_padded([[len(word) for word in text.split()] for text in texts], self.width)

    @staticmethod
    def read(directory, dtype, device):
        return {"backbone": tiny.llama(8, seed=0), "tokenizer": None}

    @staticmethod
    def released_settings(directory, parts):
        return {"vq": "vae", "pad_id": 7, "length": 4, "width": 3}

    @staticmethod
    def sizes(length, max_prompt):
        return {"length": length, "width": max_prompt}


def load(directory, **given) -> Toy:
    return Toy.load(directory, dtype=torch.float32, device="cpu", **given)


@pytest.fixture
def policy(tmp_path):
    return load(tmp_path)


def test_images_become_codes_and_come_back(policy):
    codes = torch.randint(8, (3, 4), generator=torch.Generator().manual_seed(0))
    images = policy.decode(codes)
    assert images.dtype == torch.uint8 and images.shape == (3, 3, 2, 2)
    assert torch.equal(policy.respond(list(images)), codes)


def test_the_image_tokenizer_is_not_among_the_weights(policy):
    names = [*policy.state_dict(), *(name for name, _ in policy.named_parameters())]
    assert names and all(name.startswith("backbone.") for name in names)


def test_text_is_padded_on_the_left_and_the_unconditional_row_is_the_empty_text(policy):
    prompt = policy.encode(["a red ox", "cube"])
    assert prompt.ids.tolist() == [[1, 3, 2], [7, 7, 4]]
    assert prompt.mask.tolist() == [[True] * 3, [False, False, True]]
    null = policy.unconditional(prompt)
    assert null.ids.tolist() == [[7, 7, 7]] * 2 and not null.mask.any()


def test_a_saved_policy_says_its_settings_and_a_released_one_gives_them(tmp_path):
    def of(policy):
        return policy.pad_id, policy.length, policy.width

    assert of(load(tmp_path)) == (7, 4, 3)
    assert of(load(tmp_path, length=9, max_prompt=5)) == (7, 9, 5)
    saved = {"kind": "toy", "vq": "", "pad_id": 6, "length": 16, "width": 2}
    (tmp_path / "policy.json").write_text(json.dumps(saved))
    assert of(load(tmp_path)) == (6, 16, 2)
    assert of(load(tmp_path, max_prompt=5)) == (6, 16, 5)


@pytest.mark.parametrize(
    "stored, given, found",
    [
        ("vae", None, "{checkpoint}/vae"),
        ("", None, "{checkpoint}"),
        ("owner/name", None, "owner/name"),
        ("/elsewhere/vq", None, "/elsewhere/vq"),
        ("tiny:2", None, "tiny:2"),
        ("vae", "mine", "mine"),
        ("owner/name", "tiny:2", "tiny:2"),
    ],
)
def test_the_image_tokenizer_is_the_given_one_or_the_checkpoints(tmp_path, stored, given, found):
    """A name without a slash is a folder of the checkpoint, the empty one the checkpoint itself."""
    settings = {"vq": stored, "pad_id": 7, "length": 4, "width": 3}
    (tmp_path / "policy.json").write_text(json.dumps(settings))
    vq = load(tmp_path, vq=given).vq
    assert str(vq.source) == found.format(checkpoint=tmp_path)
    assert type(vq) is (tiny.Patches if found.startswith("tiny") else Greys)
