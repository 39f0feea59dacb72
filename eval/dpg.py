"""DPG-Bench (Hu et al. 2024): long captions, with yes-no questions that a VQA model answers on the picture.

    python -m eval.dpg FOLDER --dpg-questions dpg_bench.csv --vqa-url http://host:8000/v1 --vqa-model NAME

The folder holds ``<item_id>.png``, a 2 x 2 grid of a caption's four pictures. A question whose parent fails
counts 0. A picture scores the mean over its questions, the benchmark the mean over pictures. Published scores
rest on mPLUG-large's answers; another VQA model's are not comparable, and the result says whose they are.

Not taken over from the benchmark's own script: it skips the first question of the file, averages categories
over the last picture of each grid alone and whatever the parents, and leaves out a grid that it cannot read.
"""

import argparse
import csv
import functools
import json
import os
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
from torch import Tensor

from eval.reward_client import RewardServersDown
from eval.task import Task

LOCAL = "Qwen/Qwen2.5-VL-7B-Instruct"
COLUMNS = (
    "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    "question_natural_language"
).split(",")
PICTURES = (".png", ".jpg", ".jpeg", ".webp")
ANSWER = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)


def task(protocol: str | None = None) -> Task:
    """DPG-Bench's captions, out of ``--data dpg_bench.csv``, with component ``dpg``; VQA as ``load_judge``.

    Raises ValueError for any protocol: there is but one.
    """
    if protocol is not None:
        raise ValueError(f"--protocol {protocol}: --task dpg has none")

    def load():
        import torch

        return load_judge("cuda" if torch.cuda.is_available() else "cpu")[0]

    def lazy_reward(rows: list[dict], images: list[Tensor]) -> dict[str, np.ndarray]:
        return scores(rows, images, load() if rows else None)

    lazy_reward.load = load  # as in eval/geneval.py
    return Task("dpg", "image", rows, lazy_reward, {"dpg": 1.0}, "dpg")


def rows(split: str, data: str | None) -> list[dict]:
    """The captions of a question file with their questions; one file for both splits."""
    if data is None:
        raise ValueError(
            "--task dpg: the questions are on no data hub; give --data PATH, "
            "dpg_bench/dpg_bench.csv of TencentQQGYLab/ELLA"
        )
    return read_questions(data)


def reward(device: str = "cpu"):
    """Share of a caption's questions that the picture passes, in 0..1; rows of --task dpg."""
    judge, _ = load_judge(device)
    return lambda rows, images: scores(rows, images, judge)


def read_questions(path: str) -> list[dict]:
    """Rows ``{"item_id", "prompt", "questions": [{"id", "parents", "category", "detail", "text"}, ...]}``.

    Raises ValueError naming the file and the line that is not a question, or lacks its parent.
    """
    found: dict[str, dict] = {}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise ValueError(f"{path}: lacks the columns {', '.join(missing)}")
            for line in reader:
                _add_question(found, line, f"{path}:{reader.line_num}")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file in UTF-8: {error}") from None
    for item, row in found.items():
        known = {q["id"] for q in row["questions"]}
        for q in row["questions"]:
            if not known.issuperset(q["parents"]):
                raise ValueError(f"{path}: question {q['id']} of {item} depends on one that is not there")
    if not found:
        raise ValueError(f"{path}: holds no questions")
    return list(found.values())


def _add_question(found: dict[str, dict], line: dict, where: str) -> None:
    item, text = (line["item_id"] or "").strip(), (line["question_natural_language"] or "").strip()
    if not item or not text:
        raise ValueError(f"{where}: lacks item_id or question_natural_language")
    row = found.setdefault(item, {"item_id": item, "prompt": (line["text"] or "").strip(), "questions": []})
    try:
        number = int(line["proposition_id"])
        parents = [int(p) for p in (line["dependency"] or "0").split(",")]
    except (TypeError, ValueError):
        raise ValueError(f"{where}: proposition_id and dependency must be whole numbers") from None
    if any(q["id"] == number for q in row["questions"]):
        raise ValueError(f"{where}: a second question {number} of {item}")
    kind = {"category": line["category_broad"], "detail": line["category_detailed"]}
    row["questions"].append({"id": number, "parents": [p for p in parents if p], **kind, "text": text})


def passed(questions: list[dict], yes: dict[int, bool]) -> dict[int, bool]:
    """The answers with every child of a failed question failed too, down all generations."""
    holds = dict(yes)
    for _ in questions:  # a generation a round, in whatever order the questions come
        for q in questions:
            holds[q["id"]] = holds[q["id"]] and all(holds[p] for p in q["parents"])
    return holds


def look(rows: list[dict], pictures: list, judge) -> tuple[list[dict[int, bool]], np.ndarray]:
    """Which of its row's questions each PIL picture passes, and the share of unread answers, [n].

    ``judge(questions, pictures) -> answers``; one that says neither yes nor no is unread and counts as no.
    """
    asked = [(i, q) for i, row in enumerate(rows) for q in row["questions"]]
    replies = judge(
        [f"{q['text']} Answer with yes or no only." for _, q in asked], [pictures[i] for i, _ in asked]
    )
    yes: list[dict[int, bool]] = [{} for _ in rows]
    unread = np.zeros(len(rows))
    for (i, q), reply in zip(asked, replies, strict=True):
        answer = ANSWER.match(reply)
        yes[i][q["id"]] = answer is not None and answer[1].lower() == "yes"
        unread[i] += (answer is None) / len(rows[i]["questions"])
    return [passed(row["questions"], y) for row, y in zip(rows, yes, strict=True)], unread


def scores(rows: list[dict], images: list[Tensor], judge) -> dict[str, np.ndarray]:
    """``dpg`` and ``dpg_unread``, each [n], of uint8 pictures [3, H, W]."""
    from eval.reward_model import pil_images

    for row in rows:
        if not row.get("questions"):
            raise ValueError("dpg: a row without questions; its rows come from --task dpg")
    if not rows:
        return {"dpg": np.zeros(0), "dpg_unread": np.zeros(0)}
    holds, unread = look(rows, pil_images(images), judge)
    return {"dpg": np.array([np.mean(list(h.values())) for h in holds]), "dpg_unread": unread}


@functools.cache
def load_judge(device: str = "cpu", url: str | None = None, model: str | None = None) -> tuple:
    """(judge, who answers): the model at an endpoint, $DPG_URL by default, else a transformers VLM.

    The model is $DPG_MODEL by default, or LOCAL; an endpoint's key is $DPG_KEY. SystemExit where it cannot be
    had: an exception would count as a bad picture and let the run go on.
    """
    from eval.vlm import endpoint_judge, local_judge

    url, model = url or os.environ.get("DPG_URL"), model or os.environ.get("DPG_MODEL")
    try:
        if url and not model:
            raise ValueError("an endpoint needs the name of the model it serves: --vqa-model or $DPG_MODEL")
        if url:
            judge = endpoint_judge(url, model, key=os.environ.get("DPG_KEY"), max_tokens=8)
            return judge, f"{model} at {url}"
        return local_judge(model or LOCAL, device, max_tokens=8), f"{model or LOCAL} in transformers"
    except (ImportError, ValueError) as error:
        raise SystemExit(f"dpg: {error}") from error


def tiles(picture, side: int = 2) -> list:
    """The side x side equal parts of a PIL grid, in reading order; ValueError unless it divides evenly."""
    width, height = picture.width // side, picture.height // side
    if (width * side, height * side) != picture.size or not width or not height:
        raise ValueError(f"{picture.width} x {picture.height} pixels have no {side} x {side} equal parts")
    corners = [(x * width, y * height) for y in range(side) for x in range(side)]
    return [picture.crop((x, y, x + width, y + height)) for x, y in corners]


def score_folder(folder: str, rows: list[dict], judge, side: int = 2) -> dict:
    """The result on ``<item_id>.png`` grids: score and categories, 0..1, and the score of each picture.

    Raises ValueError unless the folder holds every caption's grid, and no other.
    """
    from PIL import Image

    files = {p.stem: p for p in sorted(Path(folder).iterdir()) if p.suffix.lower() in PICTURES}
    wanted = {row["item_id"] for row in rows}
    if files.keys() != wanted:
        raise ValueError(
            f"{folder}: {len(wanted - files.keys())} of {len(wanted)} grids are missing, "
            f"{len(files.keys() - wanted)} belong to no caption; the first is {min(wanted ^ files.keys())}"
        )
    per_picture, kinds, unread = {}, defaultdict(list), []
    for row in rows:
        try:
            with Image.open(files[row["item_id"]]) as grid:
                parts = tiles(grid.convert("RGB"), side)
        except (OSError, ValueError) as error:
            raise ValueError(f"{files[row['item_id']]}: {error}") from None
        holds, share = look([row] * len(parts), parts, judge)
        per_picture[row["item_id"]] = [float(np.mean(list(h.values()))) for h in holds]
        unread += share.tolist()
        for q in row["questions"]:
            for h in holds:
                kinds[q["category"]].append(h[q["id"]])
                kinds[f"{q['category']} - {q['detail']}"].append(h[q["id"]])
    return {
        "score": float(np.mean(list(per_picture.values()))),
        "categories": {kind: float(np.mean(holds)) for kind, holds in sorted(kinds.items())},
        "prompts": len(rows),
        "pictures": len(rows) * side * side,
        "unread": float(np.mean(unread)),
        "scores": per_picture,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.dpg", description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="<item_id>.png, a grid for each caption")
    parser.add_argument("--dpg-questions", required=True, metavar="PATH", help="dpg_bench.csv of ELLA")
    parser.add_argument("--out", default="dpg.json", help="where the result goes")
    parser.add_argument("--grid", type=int, default=2, help="pictures a side of a grid (1: a single picture)")
    parser.add_argument("--vqa-url", help="OpenAI-compatible, http://host:port/v1 (default $DPG_URL)")
    parser.add_argument("--vqa-model", help=f"its model, else a local VLM (default $DPG_MODEL, {LOCAL})")
    parser.add_argument("--device", default="cpu", help="of the local VLM")
    args = parser.parse_args(arguments)
    try:
        rows = read_questions(args.dpg_questions)
        judge, who = load_judge(args.device, args.vqa_url, args.vqa_model)
        result = {"vqa": who, **score_folder(args.folder, rows, judge, args.grid)}
    except (ValueError, RewardServersDown) as error:
        raise SystemExit(f"dpg: {error}") from None
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for kind, share in result["categories"].items():
        print(f"{kind:<28} {share:.2%}")
    print(f"DPG score {result['score']:.2%}, {result['pictures']} pictures of {result['prompts']} captions")
    print(f"VQA by {who}: not comparable with published scores, which are mPLUG-large's")


if __name__ == "__main__":
    main()
