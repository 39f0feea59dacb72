"""Samples to look at."""

import torch
from PIL import Image

from eval.gallery import write_samples


def test_texts_are_written_with_prompt_and_reward(tmp_path):
    path = write_samples(tmp_path / "s", ["how many ?"], ["answer 4"], [1.0])
    assert path.suffix == ".txt" and path.read_text() == "[1.00] how many ?\n       answer 4\n"


def test_pictures_are_a_grid_framed_by_their_reward(tmp_path):
    images = [torch.full((3, 96, 96), v, dtype=torch.uint8) for v in (0, 255)]
    path = write_samples(tmp_path / "s", ["a circle", "a very long caption " * 9], images, [1.0, 0.0])
    with Image.open(path) as picture:
        pixels = picture.convert("RGB")
    assert pixels.getpixel((20, 20)) == (0, 0, 0)  # the first picture
    good, bad = pixels.getpixel((10, 60)), pixels.getpixel((10 + 144 + 12, 60))
    assert good[1] > good[0] and bad[0] > bad[1]
