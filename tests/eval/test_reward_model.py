import numpy as np
import pytest
import torch
from tiny_rewards import picture
from torch import nn

from eval.reward_model import batched, fetch, fill, pil_images


def test_pictures_keep_their_pixels():
    image = picture(5, 7)
    (pil,) = pil_images([image])
    assert pil.size == (7, 5) and pil.mode == "RGB"
    assert (np.asarray(pil) == image.permute(1, 2, 0).numpy()).all()


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_batches_give_every_score_once_and_in_order(size):
    sizes = []

    def score(prompts, pictures):
        sizes.append(len(prompts))
        return torch.tensor(
            [len(p) + 100.0 * image.width for p, image in zip(prompts, pictures, strict=True)]
        )

    rows = [{"prompt": "x" * i} for i in range(5)]
    scores = batched(score, size)(rows, [picture(4, 1 + i) for i in range(5)])
    assert scores.tolist() == [i + 100 * (1 + i) for i in range(5)]
    assert max(sizes) == min(size, 5)


def test_fill_names_every_misfit():
    model = nn.Linear(2, 3)
    with pytest.raises(
        ValueError, match="w: the weights do not fit; missing: bias; unexpected: b; of another shape"
    ):
        fill(model, {"weight": torch.zeros(2, 2), "b": torch.zeros(3)}, "w")
    filled = fill(model, {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, "w")
    assert filled(torch.ones(2)).tolist() == [2, 2, 2] and not filled.training
    assert not any(parameter.requires_grad for parameter in filled.parameters())


def test_fetch_takes_a_file_of_a_local_directory(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert fetch(str(tmp_path), "a.txt").read_text() == "x"
    with pytest.raises(ValueError, match="has no b.txt"):
        fetch(str(tmp_path), "b.txt")
