import numpy as np
import pytest
import torch
from tiny_rewards import picture

from eval.image_statistics import reward, statistics
from eval.rewards import Rewards
from eval.task import Task


def image_task(component: str) -> Task:
    """A task whose own reward is always 1."""
    ones = lambda rows, images: {component: np.ones(len(rows))}  # noqa: E731
    return Task("t", "image", lambda *_: [], ones, {component: 1.0}, component)


def test_statistics_of_a_checkerboard_are_known():
    board = torch.zeros(3, 4, 4, dtype=torch.uint8)
    board[:, 0::2, 0::2] = board[:, 1::2, 1::2] = 255
    found = statistics(board)
    assert found["edges"] == 15 / 16  # every pixel but the last has a neighbour of the other colour
    assert found["luminance"] == pytest.approx(0.5) and found["contrast"] == pytest.approx(1.0)
    assert found["saturation"] == 0


def test_luminance_and_saturation_tell_the_channels_apart():
    red, blue = (torch.zeros(3, 4, 4, dtype=torch.uint8) for _ in range(2))
    red[0], blue[2] = 255, 255
    assert statistics(red)["luminance"] == pytest.approx(0.299)
    assert statistics(blue)["luminance"] == pytest.approx(0.114)
    assert statistics(red)["saturation"] == pytest.approx(1.0) and statistics(red)["edges"] == 0


def test_a_picture_gone_black_lowers_the_panel_though_its_trained_reward_is_perfect():
    """K11: text score up, picture black, edge density -60 %: the panel has statistics that show it."""
    rewards = Rewards(image_task("text"), "text=1,edges=0", strict=True)
    rows = [{"prompt": 'a sign that says "OPEN"'}] * 2
    honest = rewards.components(rows, [picture(32, 32, 90), picture(32, 48, 70)])
    cheated = rewards.components(rows, [torch.zeros(3, 32, 32, dtype=torch.uint8)] * 2)
    assert cheated["text"].tolist() == honest["text"].tolist() == [1, 1]
    for name in ("edges", "luminance", "contrast", "saturation"):
        assert cheated[name].mean() < 0.4 * honest[name].mean()


def test_the_components_hold_the_trained_reward_and_at_least_two_held_out_metrics():
    """K16: held-out metrics stand beside the trained reward, and weigh nothing in it."""
    rewards = Rewards(image_task("red"), "red=1,edges=0", strict=True)
    found = rewards.components([{"prompt": "x"}], [picture(16, 16)])
    assert len(found.keys() - {"red"}) >= 2
    assert rewards.total(found).tolist() == [1.0]


def test_statistics_of_a_list_equal_one_by_one():
    images = [picture(8, 8), picture(9, 5, 40), picture(30, 20, 100)]
    score = reward()
    together = score([{"prompt": ""}] * 3, images)
    assert list(together)[0] == "edges"
    for name, values in together.items():
        assert values.tolist() == [score([{"prompt": ""}], [image])[name][0] for image in images]
        assert ((values >= 0) & (values <= 1)).all()
    assert score([], [])["edges"].shape == (0,)
