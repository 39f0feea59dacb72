"""The OCR rule against recorded rewards (tests/golden/ocr_reward.json), the real recogniser on drawn text."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import shared

from eval import ocr
from eval.image_statistics import statistics
from eval.ocr import closeness, rows, scores, target, task
from eval.rewards import Rewards

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/ocr_reward.json").read_text())
CASES = {case["id"].removeprefix("ocr_reward-"): case for case in GOLDEN["cases"]}


def reader_of(case):
    """A stand-in that reads what the case says, or raises."""

    def read(picture):
        if case["recognised"] == "ocr_error":
            raise RuntimeError("engine failed")
        return [(line["text"], line["score"]) for line in case["recognised"] or []]

    return read


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore:ocr. a picture could not be read")
def test_reward_is_right_in_every_golden_case(case):
    """The ambiguous ones too: without quotes or target 0, typographic quotes are quotes, a tab is an edit."""
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    answer = scores([{"prompt": case["prompt"]}], [image], reader_of(case))
    assert answer["ocr"][0] == pytest.approx(case["right"], abs=1e-6)
    assert answer["ocr_errors"][0] == (case["recognised"] == "ocr_error")


def test_a_failing_engine_costs_its_picture_only_and_is_counted():
    """Report K10."""

    def read(picture):
        if picture[0, 0, 0] == 1:
            raise RuntimeError("engine failed")
        return [("open", 0.9)]

    images = [torch.full((3, 4, 4), i, dtype=torch.uint8) for i in range(3)]
    with pytest.warns(UserWarning, match="engine failed"):
        answer = scores([{"prompt": 'a sign "open"'}] * 3, images, read)
    assert answer["ocr"].tolist() == [1, 0, 1] and answer["ocr_errors"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("prompt", ["", '"', '""', '" "', "a sign", "“”", 'a sign ""'])
def test_prompts_that_quote_nothing_score_0_and_never_crash(prompt):
    assert target(prompt) == ""
    assert closeness(prompt, [("open", 0.9)]) == 0


def test_closeness_stays_within_0_and_1():
    for read in ("", "x", "open", "opennow" * 40, "日本"):
        assert 0 <= closeness('a "open now"', [(read, 0.9)]) <= 1


def test_rows_are_the_lines_of_the_file_and_every_one_quotes_a_text():
    found = rows("test", str(shared("data/ocr_test_prompts.txt")))
    assert len(found) == 1018 and all(target(row["prompt"]) for row in found)


def test_a_prompt_without_a_quoted_text_names_file_and_line(tmp_path):
    path = tmp_path / "test.txt"
    path.write_text('A sign "Open"\n\nA sign without text\n')
    with pytest.raises(ValueError, match=r"test.txt:3: no text in double quotes"):
        rows("test", str(tmp_path))
    with pytest.raises(ValueError, match="--task ocr: .*give --data PATH"):
        rows("test", None)
    with pytest.raises(ValueError, match="--protocol x"):
        task("x")


def draw(text, size=(256, 256), background="white", noise=False):
    """Black (on black: white) text on a plain or a noisy ground: uint8 [3, H, W]."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", size, background)
    if noise:
        pixels = np.random.default_rng(0).integers(150, 256, (size[1], size[0], 3), dtype=np.uint8)
        pixels[90:150] = 255
        image = Image.fromarray(pixels)
    color = "white" if background == "black" else "black"
    ImageDraw.Draw(image).text((20, 100), text, fill=color, font=ImageFont.load_default(30))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.fixture(scope="module")
def reader():
    pytest.importorskip("rapidocr_onnxruntime")
    return ocr.load_reader()


def test_recogniser_reads_what_was_drawn(reader):
    """The real one; colours in RGB, as the picture has them."""
    given = [{"prompt": 'A shop sign that reads "Grand Opening" above the door'}] * 4
    images = [draw("Grand Opening"), draw("Grand Opera"), draw("7"), draw("")]
    answer = scores(given, images, reader)["ocr"]
    assert answer[0] == 1
    assert 0.5 < answer[1] < 1
    assert answer[2] < 0.2 and answer[3] == 0


def test_recogniser_on_a_list_is_the_recogniser_on_each(reader):
    images = [draw("Open"), draw("Soup", (160, 200))]
    given = [{"prompt": 'a sign "Open"'}, {"prompt": 'a sign "Soap"'}]
    together = scores(given, images, reader)["ocr"]
    alone = [scores([r], [i], reader)["ocr"][0] for r, i in zip(given, images, strict=True)]
    assert together.tolist() == alone == [1, 0.75]


def test_recogniser_by_name_through_the_reward_interface(reader):
    given = [{"prompt": 'a sign "Open"'}, {"prompt": "a sign"}]
    rewards = Rewards(task(), "ocr=1,edges=0", strict=True)
    parts = rewards.components(given, [draw("Open"), draw("Open")])
    assert parts["ocr"].tolist() == [1, 0] and parts["ocr_errors"].tolist() == [0, 0]
    assert rewards.total(parts).tolist() == [1, 0]
    assert (parts["edges"] > 0).all()


def test_black_picture_with_perfect_text_shows_in_a_statistic_that_is_no_reward(reader):
    """Report K11: the text score is the same, the held-out ``edges`` and ``luminance`` fall."""
    prompt = [{"prompt": 'a sign "Open"'}] * 2
    rich, black = draw("Open", noise=True), draw("Open", background="black")
    assert scores(prompt, [rich, black], reader)["ocr"].tolist() == [1, 1]
    for name in ("edges", "luminance"):
        assert statistics(black)[name] < 0.4 * statistics(rich)[name]


def test_recogniser_is_loaded_at_once_where_it_is_named_and_else_never(monkeypatch):
    monkeypatch.setattr(ocr, "load_reader", lambda: pytest.fail("loaded"))
    parts = Rewards(task(), "edges=1", strict=True).components([{"prompt": 'a "b"'}], [draw("b")])
    assert "edges" in parts and "ocr" not in parts
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        Rewards(task(), "edges=1,ocr=0")


def test_no_rows_are_answered_without_the_recogniser():
    assert {k: v.shape for k, v in task().reward([], []).items()} == {"ocr": (0,), "ocr_errors": (0,)}


def test_something_that_is_no_picture_raises_instead_of_scoring_0():
    """Report K10: only the recogniser's own failure is a bad picture."""
    with pytest.raises(AttributeError):
        scores([{"prompt": 'a "b"'}], [None], lambda picture: [])


def test_a_missing_recogniser_stops_with_the_name_of_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(SystemExit, match="pip install rapidocr-onnxruntime"):
        ocr.load_reader.__wrapped__()
