"""tiny-geneval: coloured shapes asked for in words, over the six tasks of GenEval. Exact detector.

The picture has 2 x 2 slots; a slot holds nothing, or one shape of one colour drawn by 2 x 2 patches of 16 px.
The detector reads the pixels, the nearest patch of each cell. Four patches that do not make up one shape of
one colour are something unknown, and then the picture is wrong.
"""

import functools
import hashlib
import itertools

import numpy as np
import torch
from torch import Tensor

from eval.jsonl import read_jsonl
from eval.task import Task

SIDE, CELL, PATCH = 4, 2, 16  # cells a side, cells of a slot, pixels of a cell
PALETTE = {
    "background": (236, 233, 226),
    "red": (206, 52, 48),
    "green": (62, 150, 70),
    "blue": (46, 96, 190),
    "yellow": (240, 196, 40),
}
COLOURS = tuple(PALETTE)[1:]
SHAPES = ("square", "circle", "diamond")
NOTHING = (None, None)
# What a slot may hold: (shape, colour) -> the patches of its four cells, by number; patch 0 is background
SLOTS = {NOTHING: np.zeros(4, dtype=np.int64)} | {
    content: 1 + 4 * i + np.arange(4) for i, content in enumerate(itertools.product(SHAPES, COLOURS))
}
NUMBERS = {2: "two", 3: "three", 4: "four"}
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
TEMPLATES = ("{}", "a photo of {}", "a picture of {}", "a drawing of {}")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
FLAWS = {"wrong caption": 0.15, "distractor": 0.2, "prompt dropped": 0.1}


WORDS = tuple(
    dict.fromkeys(
        ["a", "and", "photo", "of", "picture", "drawing", *SHAPES, *(f"{s}s" for s in SHAPES), *COLOURS]
        + [*NUMBERS.values(), *" ".join(RELATIONS).split()]
    )
)


def cores() -> list[dict]:
    """Every request: tag, what to include (GenEval's metadata), and its words."""
    made = []
    for a in SHAPES:
        made.append(("single_object", [{"class": a, "count": 1}], f"a {a}"))
        for colour in COLOURS:
            made.append(("colors", [{"class": a, "count": 1, "color": colour}], f"a {colour} {a}"))
        for n, word in NUMBERS.items():
            made.append(("counting", [{"class": a, "count": n}], f"{word} {a}s"))
    for a, b in itertools.permutations(SHAPES, 2):
        made.append(("two_object", [{"class": a, "count": 1}, {"class": b, "count": 1}], f"a {a} and a {b}"))
        for relation in RELATIONS:
            include = [{"class": b, "count": 1}, {"class": a, "count": 1, "position": [relation, 0]}]
            made.append(("position", include, f"a {a} {relation} a {b}"))
        for p, q in itertools.permutations(COLOURS, 2):
            include = [{"class": a, "count": 1, "color": p}, {"class": b, "count": 1, "color": q}]
            made.append(("color_attr", include, f"a {p} {a} and a {q} {b}"))
    return [{"tag": tag, "include": include, "words": words} for tag, include, words in made]


def prompts(split: str) -> list[dict]:
    """All requests in all templates: the quarter of each tag that comes first by hash is test."""
    of_tag = {tag: [] for tag in TAGS}
    for core, template in itertools.product(cores(), TEMPLATES):
        text = template.format(core["words"])
        of_tag[core["tag"]].append({"tag": core["tag"], "include": core["include"], "prompt": text})
    made = []
    for of_one in of_tag.values():
        of_one.sort(key=lambda r: hashlib.sha256(r["prompt"].encode()).digest())
        made += of_one[: len(of_one) // 4] if split == "test" else of_one[len(of_one) // 4 :]
    return made


def rows(split: str, data: str | None = None) -> list[dict]:
    """1,200 train or 300 test prompts, as many of each tag, or those of a GenEval-like jsonl."""
    if data:
        return read_jsonl(data, ("tag", "include", "prompt"))
    rng = np.random.default_rng(("train", "test").index(split))
    of_tag = {tag: [r for r in prompts(split) if r["tag"] == tag] for tag in TAGS}
    n = 1200 if split == "train" else 300
    return [dict(of_tag[tag][rng.integers(len(of_tag[tag]))]) for _ in range(n // len(TAGS)) for tag in TAGS]


# ---- Pictures


@functools.cache
def patches() -> np.ndarray:
    """uint8 [49, 16, 16, 3]: the background, then the four quarters of each shape in each colour."""
    half = CELL * PATCH / 2
    y, x = np.abs(np.mgrid[0.5 - half : half, 0.5 - half : half])
    r = half * 0.9
    inside = {"square": np.maximum(x, y) < 0.85 * r, "circle": np.hypot(x, y) < r, "diamond": x + y < r}
    made = [np.full((PATCH, PATCH, 3), PALETTE["background"], dtype=np.uint8)]
    for shape, colour in list(SLOTS)[1:]:
        picture = np.where(inside[shape][..., None], PALETTE[colour], PALETTE["background"]).astype(np.uint8)
        made += [quarter for row in np.split(picture, 2) for quarter in np.split(row, 2, axis=1)]
    return np.stack(made)


def scene(include: list[dict], rng: np.random.Generator, distractor: bool = False) -> np.ndarray:
    """A grid [6, 6] of palette indices that shows what was asked for, everything left open drawn at
    random."""
    objects = [{**part, "count": 1} for part in include for _ in range(part["count"])]
    while True:
        slots = [tuple(int(v) for v in divmod(s, 2)) for s in rng.permutation(4)[: len(objects)]]
        if all(holds(o, s, slots) for o, s in zip(objects, slots, strict=True)):
            break
    free = [s for s in itertools.product(range(2), range(2)) if s not in slots]
    if distractor and free:
        objects.append({"class": str(rng.choice(SHAPES))})
        slots.append(free[rng.integers(len(free))])
    grid = np.zeros((SIDE, SIDE), dtype=np.int64)
    for o, (row, column) in zip(objects, slots, strict=True):
        numbers = SLOTS[o["class"], o.get("color") or str(rng.choice(COLOURS))].reshape(CELL, CELL)
        grid[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = numbers
    return grid


def render(grid: np.ndarray, rng: np.random.Generator) -> Tensor:
    """uint8 picture [3, 64, 64] of patch numbers [4, 4], each cell in a shade of its own."""
    cells = patches()[grid] + rng.integers(-8, 9, (SIDE, SIDE, 1, 1, 3))  # [4, 4, 16, 16, 3]
    rows = cells.clip(0, 255).astype(np.uint8).swapaxes(1, 2).reshape(SIDE * PATCH, SIDE * PATCH, 3)
    return torch.from_numpy(rows).permute(2, 0, 1)


def holds(part: dict, slot: tuple[int, int], slots: list[tuple[int, int]]) -> bool:
    """Whether an object in ``slot`` stands as its position clause asks, relative to the object it names."""
    if "position" not in part:
        return True
    relation, target = part["position"]
    down, right = RELATIONS[relation]
    y, x = slot[0] - slots[target][0], slot[1] - slots[target][1]
    return y * down > 0 if down else x * right > 0


def cells(images: Tensor) -> Tensor:
    """uint8 or float images [B, 3, 64, 64] -> their patches, flattened: float [B, 16, 16 * 16 * 3]."""
    parts = images.float().unflatten(2, (SIDE, PATCH)).unflatten(4, (SIDE, PATCH))  # [B, 3, 4, 16, 4, 16]
    return parts.permute(0, 2, 4, 3, 5, 1).reshape(len(images), SIDE * SIDE, -1)


def detect(image: Tensor) -> list[tuple[str, str, tuple[int, int]]] | None:
    """Objects (shape, colour, slot) in a uint8 picture [3, 64, 64]; None if a slot holds anything else."""
    known = torch.from_numpy(patches()).float().flatten(1)
    grid = torch.cdist(cells(image[None].cpu())[0], known).argmin(-1).view(SIDE, SIDE).numpy()
    found = []
    for row, column in itertools.product(range(2), range(2)):
        slot = grid[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL].ravel()
        content = next((c for c, numbers in SLOTS.items() if (numbers == slot).all()), None)
        if content is None:
            return None
        if content != NOTHING:
            found.append((*content, (row, column)))
    return found


def correct(include: list[dict], image: Tensor) -> bool:
    """The exact number of objects, each as asked for: anything more would teach the policy to add objects."""
    found = detect(image)
    if found is None or len(found) != sum(part["count"] for part in include):
        return False
    for order in itertools.permutations(found):
        objects = [part for part in include for _ in range(part["count"])]
        slots = [slot for _, _, slot in order]
        if all(
            shape == part["class"] and part.get("color", colour) == colour and holds(part, slot, slots)
            for part, (shape, colour, slot) in zip(objects, order, strict=True)
        ):
            return True
    return False


def reward(rows: list[dict], completions: list[Tensor]) -> dict[str, np.ndarray]:
    """correct: 1 where the picture shows exactly what the prompt asks for."""
    hits = [correct(r["include"], image) for r, image in zip(rows, completions, strict=True)]
    return {"correct": np.array(hits, dtype=float)}


def base_rows(n: int, seed: int) -> list[dict]:
    """Training pairs (prompt, picture) for the base, flaws included; the prompt is "" where dropped, for
    guidance."""
    rng = np.random.default_rng((seed, 2))
    of_tag = {tag: [r for r in prompts("train") if r["tag"] == tag] for tag in TAGS}
    made = []
    for i in range(n):
        same_tag = of_tag[TAGS[i % len(TAGS)]]
        row = same_tag[rng.integers(len(same_tag))]
        flaw = {name: rng.random() < chance for name, chance in FLAWS.items()}
        shown = same_tag[rng.integers(len(same_tag))] if flaw["wrong caption"] else row
        grid = scene(shown["include"], rng, flaw["distractor"])
        made.append(
            {"prompt": "" if flaw["prompt dropped"] else row["prompt"], "completion": render(grid, rng)}
        )
    return made


def task(protocol: str | None = None) -> Task:
    if protocol:
        raise ValueError(f"--protocol {protocol}: tiny-geneval has none")
    return Task("tiny-geneval", "image", rows, reward, {"correct": 1.0}, "correct", category="tag")
