"""DPG-Bench with ten questions of our own, a stand-in judge, a tiny random VLM and a real local endpoint."""

import csv
import json

import numpy as np
import pytest
import torch
from tiny_rewards import redraw, save_tokenizer, stand_in

from eval import dpg
from eval.dpg import COLUMNS, look, main, passed, read_questions, rows, score_folder, scores, task, tiles
from eval.rewards import Rewards

# item, id, dependency, category, detail, question
QUESTIONS = [
    ("kettle", 1, "0", "entity", "whole", "Is there a kettle?"),
    ("kettle", 2, "0", "entity", "whole", "Is there a table?"),
    ("kettle", 3, "1", "attribute", "color", "Is the kettle red?"),
    ("kettle", 4, "1,2", "relation", "spatial", "Is the kettle on the table?"),
    ("kettle", 5, "4", "relation", "spatial", "Is it in the middle of the table?"),
    ("lake", 1, "0", "global", "", "Is it a painting?"),
    ("lake", 2, "0", "entity", "whole", "Is there a lake?"),
    ("lake", 3, "2", "entity", "state", "Is the lake still?"),
    ("lake", 4, "0", "other", "count", "Are there two swans?"),
    ("lake", 5, "2, 4", "relation", "spatial", "Are the swans on the lake?"),
]


def write_questions(path, questions=QUESTIONS):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for item, number, dependency, category, detail, question in questions:
            kind = f"{category} - {detail} (x)"
            writer.writerow(
                [item, f"A {item}, drawn", "", number, dependency, category, detail, kind, question]
            )
    return str(path)


@pytest.fixture
def captions(tmp_path):
    return read_questions(write_questions(tmp_path / "dpg_bench.csv"))


def picture(red):
    return torch.full((3, 8, 8), red, dtype=torch.uint8)


def judge_of(noes):
    """Answers no to the questions listed for a picture's red value, else yes."""

    def judge(questions, pictures):
        return [
            "No." if any(n in q for n in noes.get(p.getpixel((0, 0))[0], ())) else " Yes, it is."
            for q, p in zip(questions, pictures, strict=True)
        ]

    return judge


def write_grids(path, reds):
    """<item>.png of 2 x 2 tiles with the given red values."""
    from PIL import Image

    path.mkdir()
    for item, values in reds.items():
        grid = Image.new("RGB", (16, 16))
        for i, red in enumerate(values):
            grid.paste((red, 0, 0), (8 * (i % 2), 8 * (i // 2), 8 * (i % 2) + 8, 8 * (i // 2) + 8))
        grid.save(path / f"{item}.png")
    return str(path)


def test_child_of_a_failed_parent_counts_0(captions):
    """Report L4: parent no, child yes -> child counted 0; so are its children."""
    questions = captions[0]["questions"]
    assert passed(questions, {1: False, 2: True, 3: True, 4: True, 5: True}) == {
        1: False, 2: True, 3: False, 4: False, 5: False,
    }  # fmt: skip
    assert passed(questions, {1: True, 2: True, 3: False, 4: True, 5: True})[5]
    assert passed(questions[::-1], {1: True, 2: False, 3: True, 4: True, 5: True})[5] is False


def test_grid_gives_four_equal_tiles_in_reading_order():
    """Report L4."""
    from PIL import Image

    pixels = np.arange(6 * 4, dtype=np.uint8).reshape(4, 6)
    found = [np.asarray(tile) for tile in tiles(Image.fromarray(pixels))]
    assert [tile[0, 0] for tile in found] == [0, 3, 12, 15]
    assert all(tile.shape == (2, 3) for tile in found)
    np.testing.assert_array_equal(np.vstack([np.hstack(found[:2]), np.hstack(found[2:])]), pixels)
    with pytest.raises(ValueError, match="7 x 4 pixels have no 2 x 2 equal parts"):
        tiles(Image.new("RGB", (7, 4)))


def test_every_question_of_the_file_is_kept_the_first_one_too(captions):
    assert [row["item_id"] for row in captions] == ["kettle", "lake"]
    assert captions[0]["prompt"] == "A kettle, drawn"
    assert captions[0]["questions"][0]["text"] == "Is there a kettle?"
    assert [q["parents"] for q in captions[0]["questions"]] == [[], [], [1], [1, 2], [4]]
    assert sum(len(row["questions"]) for row in captions) == 10
    json.dumps(captions)  # rows travel to reward servers


def test_a_picture_scores_the_mean_over_its_questions(captions):
    judge = judge_of({1: ["a kettle"], 2: ["painting", "swans on"]})
    answer = scores([captions[0], captions[1], captions[1]], [picture(1), picture(2), picture(3)], judge)
    assert answer["dpg"].tolist() == [0.2, 0.6, 1]
    assert answer["dpg_unread"].tolist() == [0, 0, 0]


def test_an_answer_that_is_neither_yes_nor_no_counts_as_no_and_is_reported(captions):
    replies = ["YES", "no", "**Yes**", "Yesterday", ""]

    def judge(questions, pictures):
        return replies

    [holds], unread = look(captions[:1], [None], judge)
    assert holds == {1: True, 2: False, 3: True, 4: False, 5: False}
    assert unread.tolist() == [0.4]


def test_folder_counts_every_picture_in_score_and_categories(captions, tmp_path):
    """Only the first tile of a grid fails: the benchmark's script would show it in the score alone."""
    folder = write_grids(tmp_path / "grids", {"kettle": [1, 0, 0, 0], "lake": [2, 0, 0, 3]})
    judge = judge_of({1: ["a kettle"], 2: ["painting"], 3: ["two swans"]})
    result = score_folder(folder, captions, judge)
    assert result["scores"] == {"kettle": [0.2, 1, 1, 1], "lake": [0.8, 1, 1, 0.6]}
    assert result["score"] == pytest.approx(6.6 / 8)
    kinds = result["categories"]
    assert kinds["entity"] == pytest.approx(15 / 16) and kinds["attribute"] == 0.75
    assert kinds["global"] == 0.75 and kinds["other - count"] == 0.75
    assert kinds["relation - spatial"] == pytest.approx(9 / 12)
    assert (result["prompts"], result["pictures"], result["unread"]) == (2, 8, 0)


@pytest.mark.parametrize(
    "items, message",
    [
        (["kettle"], "1 of 2 grids are missing"),
        (["kettle", "lake", "hill"], "1 belong to no caption; .* hill"),
    ],
)
def test_folder_without_every_grid_is_not_scored(captions, tmp_path, items, message):
    folder = write_grids(tmp_path / "grids", {item: [0] * 4 for item in items})
    with pytest.raises(ValueError, match=message):
        score_folder(folder, captions, judge_of({}))


def test_a_grid_that_cannot_be_read_stops_the_scoring(captions, tmp_path):
    folder = write_grids(tmp_path / "grids", {"kettle": [0] * 4, "lake": [0] * 4})
    (tmp_path / "grids/lake.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="lake.png"):
        score_folder(folder, captions, judge_of({}))


@pytest.mark.parametrize(
    "change, message",
    [
        (("kettle", "one", "0", "entity", "whole", "Is it?"), r"dpg.csv:3: .*must be whole numbers"),
        (("kettle", 1, "0", "entity", "whole", "Is it?"), r"dpg.csv:3: a second question 1 of kettle"),
        (("kettle", 2, "7", "entity", "whole", "Is it?"), "question 2 of kettle depends on one that is not"),
        (("kettle", 2, "0", "entity", "whole", ""), r"dpg.csv:3: lacks item_id or question"),
    ],
)
def test_a_bad_question_names_file_and_line(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_questions(write_questions(tmp_path / "dpg.csv", [QUESTIONS[0], change]))


def test_a_bad_question_file_is_one_sentence(tmp_path):
    path = tmp_path / "dpg.csv"
    path.write_text("item_id,text\nx,y\n")
    with pytest.raises(ValueError, match="dpg.csv: lacks the columns keywords, proposition_id"):
        read_questions(str(path))
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(ValueError, match="dpg.csv: holds no questions"):
        read_questions(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        read_questions(str(tmp_path / "absent.csv"))
    with pytest.raises(ValueError, match="--task dpg: .*give --data PATH"):
        rows("test", None)
    with pytest.raises(ValueError, match="--protocol x"):
        task("x")


def test_rows_of_another_task_are_refused_and_no_rows_need_no_judge():
    with pytest.raises(ValueError, match="rows come from --task dpg"):
        scores([{"prompt": "a cup"}], [picture(0)], judge_of({}))
    assert {k: v.shape for k, v in task().reward([], []).items()} == {"dpg": (0,), "dpg_unread": (0,)}


@pytest.fixture
def endpoint():
    """An OpenAI-compatible server on loopback that says yes unless the question names a lake."""
    pytest.importorskip("httpx")
    asked = []

    def answer(path, body, headers):
        text = json.dumps(body["messages"])
        asked.append((path, body["model"], text))
        content = "No" if "lake" in text else "Yes"
        return 200, {"choices": [{"message": {"content": content}}]}

    with stand_in(answer) as address:
        yield address + "/v1", asked


def test_command_line_scores_a_folder_by_an_endpoint_and_says_so(endpoint, tmp_path, capsys):
    url, asked = endpoint
    questions = write_questions(tmp_path / "dpg_bench.csv")
    folder = write_grids(tmp_path / "grids", {"kettle": [0] * 4, "lake": [0] * 4})
    out = tmp_path / "out" / "dpg.json"
    main([folder, "--dpg-questions", questions, "--out", str(out), "--vqa-url", url, "--vqa-model", "judge"])
    result = json.loads(out.read_text())
    # "Is there a lake?" fails with its two children, "Is the lake still?" and the swans on it
    assert result["scores"] == {"kettle": [1] * 4, "lake": [0.4] * 4}
    assert result["vqa"] == f"judge at {url}"
    assert len(asked) == 40
    assert all(path == "/v1/chat/completions" and model == "judge" for path, model, _ in asked)
    assert all(
        "data:image/png;base64," in text and "Answer with yes or no only." in text for *_, text in asked
    )
    shown = capsys.readouterr().out
    assert "DPG score 70.00%, 8 pictures of 2 captions" in shown
    assert f"VQA by judge at {url}: not comparable with published scores" in shown


def test_judge_is_loaded_at_once_where_it_is_named_and_else_never(captions, monkeypatch):
    monkeypatch.setattr(dpg, "load_judge", lambda device: pytest.fail("loaded"))
    parts = Rewards(task(), "edges=1", strict=True).components(captions[:1], [picture(0)])
    assert "edges" in parts and "dpg" not in parts
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        Rewards(task())


def test_task_asks_the_endpoint_that_the_environment_names(endpoint, captions, monkeypatch):
    monkeypatch.setenv("DPG_URL", endpoint[0])
    monkeypatch.setenv("DPG_MODEL", "judge")
    dpg.load_judge.cache_clear()
    assert task().reward(captions, [picture(0), picture(0)])["dpg"].tolist() == [1, 0.4]
    dpg.load_judge.cache_clear()


def test_a_transformers_vlm_answers_and_words_that_say_nothing_count_as_no(captions, tmp_path):
    """A tiny random Qwen2-VL through the whole path."""
    import transformers as t

    save_tokenizer(tmp_path)
    ids = dict(image_token_id=261, video_token_id=262, vision_start_token_id=259, vision_end_token_id=260)
    text = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text |= dict(num_key_value_heads=1, vocab_size=263, pad_token_id=256, bos_token_id=None, eos_token_id=258)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)
    model = t.Qwen2VLForConditionalGeneration(t.Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    redraw(model).save_pretrained(tmp_path)
    size = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    t.Qwen2VLImageProcessorPil(size=size).save_pretrained(tmp_path)
    judge, who = dpg.load_judge("cpu", None, str(tmp_path))
    assert who == f"{tmp_path} in transformers"
    answer = scores(captions, [picture(9), picture(200)], judge)
    assert answer["dpg"].tolist() == [0, 0] and answer["dpg_unread"].tolist() == [1, 1]


def test_a_judge_that_cannot_be_had_stops_the_run(tmp_path):
    with pytest.raises(SystemExit, match="needs the name of the model"):
        dpg.load_judge("cpu", "http://127.0.0.1:9/v1")
    with pytest.raises(SystemExit, match="dpg: .*can be loaded"):
        dpg.load_judge("cpu", None, str(tmp_path))
