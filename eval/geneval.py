"""GenEval (Ghosh et al. 2023): does the picture show the objects, counts, colours and places of its caption?

The task, two rewards, and the scoring of a folder of pictures laid out as the benchmark's:

    python -m eval.geneval FOLDER --out results.jsonl
    python -m eval.geneval results.jsonl

The folder holds ``00000/metadata.jsonl`` (one JSON object), ``00000/samples/0000.png`` and so on. The second
form summarises a result file, ours or the benchmark's. The overall score is the mean of the six tasks' shares
of correct pictures.
"""

import argparse
import functools
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from eval.captions import split_file
from eval.geneval_rule import RULE, TAGS, Detection, Rule, check_row, dense, judge, keep
from eval.jsonl import read_jsonl
from eval.task import Task

METADATA, SAMPLES = "metadata.jsonl", "samples"  # in the folder of a prompt


def task(protocol: str | None = None) -> Task:
    """GenEval's prompts with components ``geneval`` (correct or not) and ``geneval_dense`` (partial credit).

    Raises ValueError for any protocol: there is but one (rewritten prompts are another ``--data``).
    """
    if protocol is not None:
        raise ValueError(f"--protocol {protocol}: --task geneval has none")

    def load() -> tuple:
        import torch

        return load_models("cuda" if torch.cuda.is_available() else "cpu")

    def lazy_reward(rows: list[dict], images: list[Tensor]) -> dict[str, np.ndarray]:
        return scores(rows, images, *(load() if rows else (None, None)))

    lazy_reward.load = load  # whoever is going to call it asks for the models before the work begins
    return Task("geneval", "image", rows, lazy_reward, {"geneval_dense": 1.0}, "geneval", category="tag")


def rows(split: str, data: str | None) -> list[dict]:
    """Rows of a metadata file, or of the split's in a directory: tag, include, exclude, prompt.

    Raises ValueError naming the file and the row that the rule cannot judge.
    """
    if data is None:
        raise ValueError(
            "--task geneval: the prompts are on no data hub; give --data PATH, such as "
            "prompts/evaluation_metadata.jsonl of djghosh13/geneval"
        )
    path = split_file(data, split)
    found = read_jsonl(path, required=("prompt", "tag"))
    for i, row in enumerate(found, start=1):
        check_row(row, f"{path}: row {i}")
    return found


def reward(device: str = "cpu"):
    """1 where the benchmark's verdict is correct, else 0; ``geneval_dense`` is logged beside it."""
    models = load_models(device)
    return lambda rows, images: scores(rows, images, *models)


def dense_reward(device: str = "cpu"):
    """Partial credit in 0..1, see ``geneval_rule.dense``; ``geneval`` is logged beside it."""
    models = load_models(device)
    return lambda rows, images: dict(reversed(scores(rows, images, *models).items()))


@functools.cache
def load_models(device: str, detector: str | None = None, clip: str | None = None) -> tuple:
    """(detector, colours), the detector having recognised our sanity pictures.

    SystemExit where they cannot be had: an exception would count as a bad picture and let the run go on.
    """
    from eval import geneval_detector as eyes

    try:
        models = (
            eyes.Mask2Former(detector or eyes.DETECTOR, device),
            eyes.ClipColors(clip or eyes.CLIP, device),
        )
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"geneval: the detector or CLIP cannot be loaded: {error}") from error
    eyes.check_sanity(models[0])
    return models


@dataclass(frozen=True)
class Verdict:
    """What the rule says of one picture, and the objects that it rests on, by class."""

    correct: bool
    reason: str
    dense: float
    objects: dict[str, list[Detection]]


def verdicts(
    rows: list[dict], images: list[Tensor], detector, colors, rule: Rule = RULE, batch: int = 8
) -> list[Verdict]:
    """One for each picture (uint8 [3, H, W]), in order; detector and colours as in ``geneval_detector``."""
    found = []
    lowest = min(rule.threshold, rule.counting_threshold)
    for i in range(0, len(images), batch):  # the masks of all pictures at once would fill the memory
        part = images[i : i + batch]
        for row, image, detections in zip(rows[i : i + batch], part, detector(part, lowest), strict=True):
            check_row(row, "--reward geneval (its rows come from --task geneval)")
            objects = keep(detections, row["tag"], rule)
            for clause in row.get("include", []):
                name, n = clause["class"], clause["count"]
                best = objects.get(name, [])[:n]
                if "color" in clause and len(best) == n:  # with fewer, no colour is asked for
                    seen = colors(image, best)
                    objects[name][:n] = [replace(d, color=c) for d, c in zip(best, seen, strict=True)]
            verdict = Verdict(*judge(row, objects, rule), dense(row, objects, rule), _without_masks(objects))
            found.append(verdict)
    return found


def _without_masks(objects: dict[str, list[Detection]]) -> dict[str, list[Detection]]:
    return {name: [replace(d, mask=None) for d in found] for name, found in objects.items()}


def scores(rows: list[dict], images: list[Tensor], detector, colors) -> dict[str, np.ndarray]:
    """Both components, each [n]."""
    found = verdicts(rows, images, detector, colors)
    return {
        "geneval": np.array([v.correct for v in found], dtype=float),
        "geneval_dense": np.array([v.dense for v in found], dtype=float),
    }


def sample_path(folder: Path, prompt: int, sample: int, row: dict) -> Path:
    """Where a picture stands in the benchmark's layout; its directory is made, with the row of the first."""
    path = folder / f"{prompt:05}" / SAMPLES / f"{sample:04}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    if sample == 0:  # one writer a prompt, however many processes share its samples
        (path.parent.parent / METADATA).write_text(json.dumps(row, default=str) + "\n", encoding="utf-8")
    return path


def prompt_folders(folder: Path) -> list[Path]:
    """Those of a folder in the benchmark's layout, by number."""
    return sorted((p for p in folder.iterdir() if p.is_dir() and p.name.isdigit()), key=lambda p: int(p.name))


def read_folder(folder: str, per_prompt: int, data: str | None = None) -> list[tuple[Path, dict]]:
    """(picture, row) of every sample of a folder in the benchmark's layout.

    Raises ValueError when a prompt is missing, is not that of ``data``, or has not ``per_prompt`` pictures.
    """
    folders = prompt_folders(Path(folder))
    expected = rows("test", data) if data else None
    n = len(expected) if expected else len(folders)
    if not folders or [int(p.name) for p in folders] != list(range(n)):
        raise ValueError(f"{folder}: {n or 'some'} folders 00000, 00001, ... expected, found {len(folders)}")
    pairs = []
    for i, path in enumerate(folders):
        try:
            row = json.loads((path / METADATA).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}/{METADATA}: not one JSON object: {error}") from None
        check_row(row, f"{path}/{METADATA}")
        if expected and row != expected[i]:
            raise ValueError(f"{path}/{METADATA}: not the prompt of row {i + 1} of {data}")
        pictures = sorted(p for p in (path / SAMPLES).glob("*.png") if p.stem.isdigit())
        if len(pictures) != per_prompt:
            raise ValueError(
                f"{path}: {len(pictures)} pictures, not {per_prompt}; nothing is scored unless each of "
                f"the {n} prompts has {per_prompt} (--images-per-prompt)"
            )
        pairs += [(picture, row) for picture in pictures]
    return pairs


def result_of(picture: Path, row: dict, verdict: Verdict) -> dict:
    """One line of a result file, with the benchmark's fields."""
    boxes = {name: [[*d.box, d.score] for d in found] for name, found in verdict.objects.items()}
    return {
        "filename": str(picture),
        "tag": row["tag"],
        "prompt": row["prompt"],
        "correct": verdict.correct,
        "reason": verdict.reason,
        "metadata": json.dumps(row),
        "details": json.dumps(boxes),
    }


def summarize(results: list[dict], per_prompt: int = 4) -> dict:
    """Shares of correct pictures: of all, by task, and ``overall``, the mean of the tasks that are there.

    ``prompts_sha256`` tells prompt sets apart. ValueError unless each prompt has ``per_prompt`` pictures.
    """
    # A folder is a prompt; the metadata alone would merge a prompt that is listed twice.
    prompts = Counter((str(Path(r["filename"]).parent), r["metadata"]) for r in results)
    wrong = [where for (where, _), n in prompts.items() if n != per_prompt]
    if wrong:
        raise ValueError(
            f"{len(results)} pictures for {len(prompts)} prompts x {per_prompt} = "
            f"{len(prompts) * per_prompt}: no summary (--images-per-prompt; first wrong: {wrong[0]})"
        )
    by_task = {tag: [r["correct"] for r in results if r["tag"] == tag] for tag in TAGS}
    tasks = {tag: float(np.mean(correct)) for tag, correct in by_task.items() if correct}
    solved = {(str(Path(r["filename"]).parent), r["metadata"]) for r in results if r["correct"]}
    texts = sorted(json.dumps(json.loads(metadata), sort_keys=True) for _, metadata in prompts)
    return {
        "images": len(results),
        "prompts": len(prompts),
        "correct_images": float(np.mean([r["correct"] for r in results])),
        "correct_prompts": len(solved) / len(prompts),
        "tasks": tasks,
        "overall": float(np.mean(list(tasks.values()))),
        "prompts_sha256": hashlib.sha256("\n".join(texts).encode()).hexdigest(),
    }


def show(summary: dict) -> str:
    """The summary as text."""
    lines = [f"{tag:<16} {share:.2%}" for tag, share in summary["tasks"].items()]
    if len(summary["tasks"]) < len(TAGS) or summary["prompts"] != 553:
        lines.append("not the benchmark's 553 prompts in six tasks: not comparable with published scores")
    lines.append(f"pictures {summary['images']}, correct {summary['correct_images']:.2%}")
    lines.append(f"prompts {summary['prompts']}, with a correct picture {summary['correct_prompts']:.2%}")
    lines.append(f"prompts sha256 {summary['prompts_sha256'][:16]}")
    lines.append(f"overall (mean over tasks) {summary['overall']:.5f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.geneval", description=__doc__.split("\n")[0])
    parser.add_argument("path", help="a folder of pictures to score, or a result file to summarise")
    parser.add_argument("--out", default="results.jsonl", help="where the results of a folder go")
    parser.add_argument("--images-per-prompt", type=int, default=4, help="anything else is refused")
    parser.add_argument("--data", help="metadata jsonl that the folder has to cover, row for row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--detector", help="Mask2Former with COCO's 80 classes, path or hub id")
    parser.add_argument("--clip", help="CLIP for the colours, path or hub id")
    args = parser.parse_args(arguments)
    try:
        if Path(args.path).is_dir():
            results = score_folder(args)
        else:
            results = read_jsonl(args.path, required=("filename", "tag", "correct", "metadata"))
        print(show(summarize(results, args.images_per_prompt)))
    except ValueError as error:
        raise SystemExit(f"geneval: {error}") from None


def score_folder(args: argparse.Namespace) -> list[dict]:
    """Scores the pictures of ``args.path`` and writes ``args.out``."""
    import torch
    from PIL import Image, ImageOps

    pairs = read_folder(args.path, args.images_per_prompt, args.data)
    models = load_models(args.device, args.detector, args.clip)
    results = []
    for picture, row in pairs:
        with Image.open(picture) as image:
            pixels = torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB"))).permute(
                2, 0, 1
            )
        results.append(result_of(picture, row, verdicts([row], [pixels], *models)[0]))
        if len(results) % 100 == 0:
            print(f"{len(results)} of {len(pairs)} pictures", flush=True)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
