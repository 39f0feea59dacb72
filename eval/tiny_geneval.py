"""tiny-geneval: coloured shapes on a grid, asked for in words, over the six tasks of GenEval; exact detector,
no download.

The picture is 6 x 6 patches of 16 px, in 2 x 2 slots of 3 x 3 cells. A slot holds nothing or one shape of one
colour. The detector reads the pixels: it takes the nearest palette colour of each cell and compares the slot
with the three shapes.
"""

import hashlib
import itertools

import numpy as np
import torch
from torch import Tensor

from eval.jsonl import read_jsonl
from eval.task import Task

SIDE, CELL, PATCH = 6, 3, 16  # cells a side, cells of a slot, pixels of a cell
PALETTE = {
    "background": (236, 233, 226),
    "red": (206, 52, 48),
    "green": (62, 150, 70),
    "blue": (46, 96, 190),
    "yellow": (240, 196, 40),
    "purple": (132, 68, 160),
}
COLOURS = tuple(PALETTE)[1:]
SHAPES = {"square": "111111111", "cross": "010111010", "ring": "111101111"}
NUMBERS = {2: "two", 3: "three", 4: "four"}
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (-1, 0), "below": (1, 0)}
TEMPLATES = ("{}", "a photo of {}", "a picture of {}", "a drawing of {}")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
FLAWS = {"wrong caption": 0.2, "distractor": 0.2, "prompt dropped": 0.1}


def plural(shape: str) -> str:
    return shape + ("es" if shape == "cross" else "s")


WORDS = tuple(
    dict.fromkeys(
        ["a", "and", "photo", "of", "picture", "drawing", *SHAPES, *map(plural, SHAPES), *COLOURS]
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
            made.append(("counting", [{"class": a, "count": n}], f"{word} {plural(a)}"))
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
        objects.append({"class": str(rng.choice(list(SHAPES)))})
        slots.append(free[rng.integers(len(free))])
    grid = np.zeros((SIDE, SIDE), dtype=np.int64)
    for o, (row, column) in zip(objects, slots, strict=True):
        colour = tuple(PALETTE).index(o.get("color") or str(rng.choice(COLOURS)))
        cells = np.array([int(c) for c in SHAPES[o["class"]]]).reshape(CELL, CELL)
        grid[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = colour * cells
    return grid


def render(grid: np.ndarray, rng: np.random.Generator) -> Tensor:
    """uint8 picture [3, 96, 96] of a grid [6, 6], each cell in a shade of its own."""
    cells = np.array(list(PALETTE.values()))[grid] + rng.integers(-8, 9, (SIDE, SIDE, 3))
    image = cells.clip(0, 255).astype(np.uint8).repeat(PATCH, 0).repeat(PATCH, 1)
    return torch.from_numpy(image).permute(2, 0, 1)


def holds(part: dict, slot: tuple[int, int], slots: list[tuple[int, int]]) -> bool:
    """Whether an object in ``slot`` stands as its position clause asks, relative to the object it names."""
    if "position" not in part:
        return True
    relation, target = part["position"]
    down, right = RELATIONS[relation]
    y, x = slot[0] - slots[target][0], slot[1] - slots[target][1]
    return y * down > 0 if down else x * right > 0


def detect(image: Tensor) -> list[tuple[str, str, tuple[int, int]]] | None:
    """Objects (shape, colour, slot) in a uint8 picture [3, 96, 96]; None if a slot holds something
    unknown."""
    cells = image.float().view(3, SIDE, PATCH, SIDE, PATCH).mean((2, 4)).permute(1, 2, 0)  # [6, 6, 3]
    colours = torch.cdist(cells.reshape(-1, 3), torch.tensor(list(PALETTE.values())).float()).argmin(-1)
    grid = colours.view(SIDE, SIDE).numpy()
    found = []
    for row, column in itertools.product(range(2), range(2)):
        slot = grid[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL].ravel()
        shown = sorted(set(slot) - {0})
        if not shown:
            continue
        pattern = "".join(str(int(c > 0)) for c in slot)
        shape = next((name for name, cells in SHAPES.items() if cells == pattern), None)
        if len(shown) > 1 or shape is None:
            return None
        found.append((shape, tuple(PALETTE)[shown[0]], (row, column)))
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
