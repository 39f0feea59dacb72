"""GenEval as a task, as rewards and on folders in the benchmark's layout, with a stand-in detector."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import shared

from eval import evaluate, geneval
from eval.geneval import main, read_folder, rows, show, summarize, task, verdicts
from eval.geneval_rule import TAGS, Detection
from eval.rewards import Rewards
from models import tiny

CUP = {"tag": "single_object", "include": [{"class": "cup", "count": 1}], "prompt": "a photo of a cup"}
TWO = {"tag": "counting", "include": [{"class": "cup", "count": 2}], "prompt": "a photo of two cups"}
RED = {
    "tag": "colors",
    "include": [{"class": "cup", "count": 1, "color": "red"}],
    "prompt": "a photo of a red cup",
}


def detector(images, threshold=0.0):
    """Sees as many cups as the picture's first pixel says, each with score 0.95."""
    boxes = [[(10.0 * i, 0.0, 10.0 * i + 9, 9.0) for i in range(int(image[0, 0, 0]))] for image in images]
    return [[Detection("cup", 0.95, box) for box in found] for found in boxes]


def colors(image, detections):
    return ["red" if image[1, 0, 0] else "blue"] * len(detections)


def picture(cups, red=False):
    image = torch.zeros(3, 16, 16, dtype=torch.uint8)
    image[0, 0, 0], image[1, 0, 0] = cups, int(red)
    return image


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(geneval, "load_models", lambda *args: (detector, colors))


def write_folder(path, samples):
    """A folder in the benchmark's layout out of [(row, [picture, ...]), ...]."""
    from PIL import Image

    for i, (row, images) in enumerate(samples):
        (path / f"{i:05}" / "samples").mkdir(parents=True)
        (path / f"{i:05}" / "metadata.jsonl").write_text(json.dumps(row))
        for j, image in enumerate(images):
            pixels = Image.fromarray(image.permute(1, 2, 0).numpy())
            pixels.save(path / f"{i:05}" / "samples" / f"{j:04}.png")
    return str(path)


def test_verdicts_keep_the_order_and_do_not_depend_on_the_batch():
    given = [CUP, TWO, RED, RED, TWO] * 3
    images = [picture(1), picture(2), picture(1, red=True), picture(1), picture(3)] * 3
    found = verdicts(given, images, detector, colors, batch=4)
    assert [v.correct for v in found] == [True, True, True, False, True] * 3
    assert [v.dense for v in found] == [1, 1, 1, 0.5, 0.5] * 3
    assert found == [verdicts([r], [i], detector, colors)[0] for r, i in zip(given, images, strict=True)]


def test_only_the_objects_of_the_clause_are_given_a_colour():
    seen = []

    def counting(image, detections):
        seen.append(len(detections))
        return ["red"] * len(detections)

    verdicts([RED, RED, CUP], [picture(3), picture(0), picture(1)], detector, counting)
    assert seen == [1]


def test_task_trains_on_the_dense_form_and_scores_the_strict_one(stand_ins):
    found = task()
    assert (found.weights, found.score, found.category) == ({"geneval_dense": 1.0}, "geneval", "tag")
    answer = found.reward([CUP, TWO], [picture(1), picture(1)])
    assert {k: v.tolist() for k, v in answer.items()} == {"geneval": [1, 0], "geneval_dense": [1, 0.5]}


def test_a_detector_that_is_named_and_absent_ends_the_run_before_it_begins(monkeypatch):
    def absent(*args):
        raise SystemExit("geneval: the detector or CLIP cannot be loaded")

    monkeypatch.setattr(geneval, "load_models", absent)
    for spec in (None, "geneval=1", "edges=1,geneval_dense=0"):
        with pytest.raises(SystemExit, match="cannot be loaded"):
            Rewards(task(), spec)
    parts = Rewards(task(), "edges=1", strict=True).components([CUP], [picture(1)])
    assert "edges" in parts and "geneval" not in parts


def test_no_rows_are_answered_without_loading_a_model():
    answer = task().reward([], [])
    assert {name: values.shape for name, values in answer.items()} == {"geneval": (0,), "geneval_dense": (0,)}


def test_both_rewards_answer_first_with_their_own_name(stand_ins):
    given = [TWO], [picture(1)]
    assert list(geneval.reward()(*given)) == ["geneval", "geneval_dense"]
    assert list(geneval.dense_reward()(*given)) == ["geneval_dense", "geneval"]
    assert geneval.dense_reward()(*given)["geneval_dense"].tolist() == [0.5]


def test_rewards_by_name_are_the_components_of_the_task(stand_ins):
    rewards = Rewards(task(), "geneval=1,geneval_dense=0.5", strict=True)
    parts = rewards.components([TWO, CUP], [picture(1), picture(1)])
    assert rewards.total(parts).tolist() == [0.25, 1.5]


def test_reward_of_rows_that_are_not_genevals_says_so(stand_ins):
    with pytest.raises(ValueError, match="rows come from --task geneval"):
        geneval.reward()([{"prompt": "a cup"}], [picture(1)])


def test_a_detector_that_cannot_be_loaded_stops_the_run(tmp_path):
    """An exception would be counted as a bad picture, and the run would train on zeros."""
    with pytest.raises(SystemExit, match="cannot be loaded"):
        geneval.load_models("cpu", str(tmp_path))


@pytest.mark.parametrize("name, n", [("evaluation_metadata", 553), ("style_train_prompts", 600)])
def test_rows_are_those_of_the_file(name, n):
    found = rows("test", str(shared(f"data/geneval_{name}.jsonl")))
    assert len(found) == n and all(row["prompt"].startswith("a photo of") for row in found)
    if n == 553:
        counts = Counter(row["tag"] for row in found)
        assert [counts[tag] for tag in TAGS] == [80, 99, 80, 94, 100, 100]


def test_rows_errors_are_one_sentence_that_names_flag_or_file(tmp_path):
    with pytest.raises(ValueError, match="--task geneval: .*give --data PATH"):
        rows("train", None)
    path = tmp_path / "train_metadata.jsonl"
    path.write_text(json.dumps(CUP) + "\n" + json.dumps(CUP | {"include": [{"class": "elf", "count": 1}]}))
    with pytest.raises(ValueError, match=r"train_metadata.jsonl: row 2: .*'elf'"):
        rows("train", str(tmp_path))
    with pytest.raises(ValueError, match="--protocol x"):
        task("x")


def test_folder_to_result_file_to_summary(stand_ins, tmp_path, capsys):
    right, wrong = [picture(2)] * 3 + [picture(1)], [picture(0)] * 4
    folder = write_folder(tmp_path / "images", [(TWO, right), (CUP, wrong), (RED, [picture(1, True)] * 4)])
    out = tmp_path / "results.jsonl"
    main([folder, "--out", str(out)])
    scored = capsys.readouterr().out
    assert "overall (mean over tasks) 0.58333" in scored and "not comparable" in scored
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["correct"] for r in results] == [True] * 3 + [False] * 5 + [True] * 4
    assert results[0]["filename"] == f"{folder}/00000/samples/0000.png"
    assert json.loads(results[0]["metadata"]) == TWO
    assert json.loads(results[0]["details"]) == {"cup": [[0, 0, 9, 9, 0.95], [10, 0, 19, 9, 0.95]]}
    assert results[3]["reason"] == "expected cup>=2, found 1"
    assert list(results[0]) == ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    main([str(out)])
    assert capsys.readouterr().out == scored


def test_pictures_that_an_evaluation_saves_are_scored_as_they_stand(monkeypatch, tmp_path, capsys):
    """The same score on both ways; the stand-ins see every pixel, so that one changed would show."""

    def seen(images, threshold=0.0):
        return detector([picture(int(image.long().sum()) % 4) for image in images])

    def hue(image, detections):
        return ["red" if image.long().sum() % 2 else "blue"] * len(detections)

    monkeypatch.setattr(geneval, "load_models", lambda *args: (seen, hue))
    tiny.build("tiny-geneval").save(tmp_path / "model")
    prompts, images = tmp_path / "prompts.jsonl", tmp_path / "images"
    prompts.write_text("\n".join(json.dumps(row) for row in (CUP, TWO, RED)))
    flags = f"--model {tmp_path}/model --task geneval --data {prompts} --sampler emerge --steps 2 --samples 4"
    result = evaluate.main([*flags.split(), "--out", str(tmp_path / "out"), "--save-images", str(images)])
    assert [row for _, row in read_folder(str(images), 4, str(prompts))] == [CUP] * 4 + [TWO] * 4 + [RED] * 4
    main([str(images), "--out", str(tmp_path / "results.jsonl"), "--data", str(prompts)])
    assert f"overall (mean over tasks) {result['score']:.5f}" in capsys.readouterr().out
    items = [json.loads(line) for line in (tmp_path / "out/items.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [r["correct"] for r in found] == [i["verdict"] == 1 for i in items]
    assert 0 < result["score"] < 1


def test_summary_agrees_with_the_steps_of_the_benchmarks_own_script(stand_ins, tmp_path):
    """pandas, as there: read_json with lines, mean by tag, mean of those; any by metadata."""
    pandas = pytest.importorskip("pandas")
    images = [picture(int(n)) for n in np.random.default_rng(0).integers(0, 4, 12)]
    samples = [(CUP, images[:4]), (TWO, images[4:8]), (RED, images[8:])]
    out = tmp_path / "results.jsonl"
    main([write_folder(tmp_path / "images", samples), "--out", str(out)])
    frame = pandas.read_json(out, orient="records", lines=True)
    summary = summarize([json.loads(line) for line in out.read_text().splitlines()])
    assert summary["overall"] == pytest.approx(frame.groupby("tag")["correct"].mean().mean())
    assert summary["correct_images"] == pytest.approx(frame["correct"].mean())
    assert summary["correct_prompts"] == pytest.approx(frame.groupby("metadata")["correct"].any().mean())


def benchmark_results(per_prompt=4):
    """Lines as the benchmark's script writes them, a prompt a task, task k with k correct of 4."""
    pandas = pytest.importorskip("pandas")
    records = [
        {
            "filename": f"out/{i:05}/samples/{j:05}.png",
            "tag": tag,
            "prompt": tag,
            "correct": j < min(i, 4),
            "reason": "",
            "metadata": json.dumps({"tag": tag, "include": [], "prompt": tag}),
            "details": "{}",
        }
        for i, tag in enumerate(TAGS)
        for j in range(per_prompt)
    ]
    return pandas.DataFrame(records).to_json(orient="records", lines=True)


def test_a_result_file_of_the_benchmark_is_summarised(tmp_path, capsys):
    path = tmp_path / "theirs.jsonl"
    path.write_text(benchmark_results())
    main([str(path)])
    shown = capsys.readouterr().out
    assert "overall (mean over tasks) 0.58333" in shown  # (0 + 1 + 2 + 3 + 4 + 4) / 4 / 6
    assert "counting         50.00%" in shown


@pytest.mark.parametrize("n", [23, 25])
def test_summary_is_refused_when_image_count_is_not_n_times_prompts(n, tmp_path):
    """Report L3."""
    lines = benchmark_results(5).splitlines()
    lines = [line for line in lines if "/00004.png" not in line.replace("\\", "")] + lines[4:5]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(lines[:n]))
    with pytest.raises(SystemExit, match=f"{n} pictures for 6 prompts x 4 = 24: no summary"):
        main([str(path)])


def test_folder_with_a_picture_too_few_is_refused_before_any_scoring(tmp_path):
    """Report L3: no model is loaded (there is none here), nothing is written."""
    folder = write_folder(tmp_path / "images", [(CUP, [picture(1)] * 4), (CUP, [picture(1)] * 3)])
    with pytest.raises(SystemExit, match="00001: 3 pictures, not 4; nothing is scored"):
        main([folder, "--out", str(tmp_path / "out.jsonl")])
    assert not (tmp_path / "out.jsonl").exists()


def test_folder_that_lacks_a_prompt_is_refused(tmp_path):
    """Report L3: by its numbers, and by the prompts file when that is given."""
    folder = write_folder(tmp_path / "images", [(CUP, [picture(1)]), (TWO, [picture(1)])])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in (CUP, TWO, RED)))
    assert len(read_folder(folder, 1)) == 2
    with pytest.raises(ValueError, match="3 folders 00000, 00001, ... expected, found 2"):
        read_folder(folder, 1, str(prompts))
    prompts.write_text("\n".join(json.dumps(row) for row in (CUP, RED)))
    with pytest.raises(ValueError, match="00001/metadata.jsonl: not the prompt of row 2"):
        read_folder(folder, 1, str(prompts))
    (tmp_path / "images/00000").rename(tmp_path / "images/00007")
    with pytest.raises(ValueError, match="folders 00000, 00001, ... expected"):
        read_folder(folder, 1)


def test_sanity_pictures_failed_leaves_no_score_behind(tmp_path, monkeypatch):
    """Report L1: a stub detector that finds nothing; the evaluator exits non-zero and writes nothing."""
    from eval import geneval_detector

    monkeypatch.setattr(
        geneval_detector, "Mask2Former", lambda *args: lambda images, t=0: [[] for _ in images]
    )
    monkeypatch.setattr(geneval_detector, "ClipColors", lambda *args: colors)
    geneval.load_models.cache_clear()
    folder = write_folder(tmp_path / "images", [(CUP, [picture(1)] * 4)])
    with pytest.raises(SystemExit, match="sanity pictures failed") as stop:
        main([folder, "--out", str(tmp_path / "out.jsonl")])
    assert stop.value.code != 0 and not (tmp_path / "out.jsonl").exists()


def test_prompts_hash_tells_prompt_sets_apart_and_not_orders():
    """Report L3: which prompts were scored is part of the result."""

    def results(*given):
        return [
            {"filename": f"{i}/samples/0.png", "tag": r["tag"], "correct": True, "metadata": json.dumps(r)}
            for i, r in enumerate(given)
        ]

    one, other = summarize(results(CUP, TWO), 1), summarize(results(TWO, CUP), 1)
    assert one["prompts_sha256"] == other["prompts_sha256"]
    assert one["prompts_sha256"] != summarize(results(CUP, RED), 1)["prompts_sha256"]
    assert one["prompts_sha256"][:16] in show(one)
