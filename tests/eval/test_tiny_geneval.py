"""The picture world: what is drawn is detected, what is asked for is judged exactly."""

from collections import Counter

import numpy as np
import pytest
import torch

from eval import tiny_geneval as world


def drawn(*objects: tuple[str, str, int], seed: int = 0) -> torch.Tensor:
    """Picture of (shape, colour, slot 0..3)."""
    grid = np.zeros((4, 4), dtype=np.int64)
    for shape, colour, slot in objects:
        y, x = divmod(slot, 2)
        grid[2 * y : 2 * y + 2, 2 * x : 2 * x + 2] = world.SLOTS[shape, colour].reshape(2, 2)
    return world.render(grid, np.random.default_rng(seed))


def test_train_and_test_prompts_are_disjoint_and_hold_all_six_tasks():
    train, test = ({r["prompt"] for r in world.rows(s)} for s in ("train", "test"))
    assert not train & test
    assert set(Counter(r["tag"] for r in world.rows("test"))) == set(world.TAGS)
    assert not {p["prompt"] for p in world.base_rows(3000, 0)} & test


def test_every_content_of_a_slot_is_detected_in_any_shade():
    for (shape, colour), slot in zip(list(world.SLOTS)[1:], [0, 1, 2, 3] * 3, strict=True):
        for seed in range(3):
            assert world.detect(drawn((shape, colour, slot), seed=seed)) == [(shape, colour, divmod(slot, 2))]
    assert world.detect(drawn()) == []


def test_a_slot_with_one_strange_patch_is_unknown():
    image = drawn(("circle", "red", 0))
    image[:, 16:32, 16:32] = drawn(("square", "red", 0))[:, 16:32, 16:32]
    assert world.detect(image) is None


def test_a_scene_shows_what_its_request_asks_for_and_a_distractor_spoils_it():
    rng = np.random.default_rng(0)
    for request in world.cores():
        assert world.correct(request["include"], world.render(world.scene(request["include"], rng), rng))
        spoilt = world.scene(request["include"], rng, distractor=True)
        full = sum(part["count"] for part in request["include"]) == 4
        assert world.correct(request["include"], world.render(spoilt, rng)) == full


def include(*parts: dict) -> list[dict]:
    return [{"count": 1, **part} for part in parts]


LEFT_OF = include({"class": "circle"}, {"class": "square", "position": ["left of", 0]})
TWO = include({"class": "circle", "color": "red"}, {"class": "square", "color": "blue"})


@pytest.mark.parametrize(
    ("asked", "shown", "right"),
    [
        (LEFT_OF, [("square", "red", 0), ("circle", "red", 1)], True),
        (LEFT_OF, [("square", "red", 2), ("circle", "red", 1)], True),  # also lower, but to the left
        (LEFT_OF, [("square", "red", 1), ("circle", "red", 0)], False),
        (LEFT_OF, [("square", "red", 0), ("circle", "red", 2)], False),  # above is not left
        (TWO, [("square", "blue", 0), ("circle", "red", 3)], True),
        (TWO, [("square", "red", 0), ("circle", "blue", 3)], False),  # colours changed over
        (TWO, [("square", "blue", 0), ("circle", "red", 3), ("circle", "red", 1)], False),  # one too many
        ([{"class": "circle", "count": 3}], [("circle", "red", i) for i in range(3)], True),
        ([{"class": "circle", "count": 3}], [("circle", "red", i) for i in range(4)], False),
        ([{"class": "circle", "count": 3}], [("circle", "red", i) for i in range(2)], False),
    ],
)
def test_the_verdict_is_exact(asked, shown, right):
    assert world.correct(asked, drawn(*shown)) is right
    assert world.reward([{"include": asked}], [drawn(*shown)])["correct"][0] == right


def test_flaws_of_the_base_data_come_as_often_as_they_say():
    """Standard error of a share over 1,500 pairs is at most 0.011; the bound is 4 of them."""
    pairs = world.base_rows(1500, 0)
    dropped = np.mean([p["prompt"] == "" for p in pairs])
    assert abs(dropped - world.FLAWS["prompt dropped"]) < 0.045
