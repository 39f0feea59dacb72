"""tiny-math: word problems over the numbers 0-9, worked out step by step. In the role of GSM8K; exact reward,
no download.

    ann has 3 pears gets 4 loses 2 ?   ->   3 + 4 = 7 - 2 = 5 answer 5

A problem (numbers and operations, names aside) belongs to train or test by its hash, so that the two are
disjoint. The base model learns from ``base_rows``, where part of the solutions make systematic slips: what it
has to unlearn by reward.
"""

import functools
import hashlib
import re

import numpy as np

from eval.jsonl import check_texts, read_jsonl
from eval.task import Task

NAMES = ("ann", "ben", "eve", "tom")
THINGS = ("pears", "nuts", "cups", "pens")
DIGITS = tuple(str(n) for n in range(10))
WORDS = (*DIGITS, "+", "-", "=", "answer", "has", "gets", "loses", "?", *NAMES, *THINGS)
FIELDS = ("prompt", "answer")
LENGTH = 16  # tokens of a completion
LARGEST_STEP = 4  # what is got or lost at once
SLIPS = {"skip the last step": 0.45, "flip an operator": 0.25, "miscalculate": 0.05}
LAYOUT = re.compile(r"\d( [+-] \d = \d)+ answer \d")


def problem(rng: np.random.Generator) -> dict:
    """A start and 2 or 3 operations, every result within 0..9."""
    value = start = int(rng.integers(10))
    operations = []
    for _ in range(int(rng.integers(2, 4))):
        add = value == 0 or (value < 9 and rng.random() < 0.5)
        operand = int(rng.integers(1, min(LARGEST_STEP, 9 - value if add else value) + 1))
        value += operand if add else -operand
        operations.append(("gets" if add else "loses", operand))
    return {"start": start, "operations": operations, "answer": value}


def split_of(p: dict) -> str:
    digest = hashlib.sha256(repr((p["start"], p["operations"])).encode()).digest()
    return "test" if digest[0] < 32 else "train"


def prompt(p: dict, rng: np.random.Generator) -> str:
    told = " ".join(f"{verb} {operand}" for verb, operand in p["operations"])
    return f"{rng.choice(NAMES)} has {p['start']} {rng.choice(THINGS)} {told} ?"


def solution(p: dict, rng: np.random.Generator | None = None) -> str:
    """The worked solution; with ``rng`` it makes the slips of the base data."""
    operations = list(p["operations"])
    slip = {name: rng is not None and rng.random() < chance for name, chance in SLIPS.items()}
    if slip["skip the last step"]:
        operations.pop()
    flipped = int(rng.integers(len(operations))) if slip["flip an operator"] else -1
    wrong = int(rng.integers(len(operations))) if slip["miscalculate"] else -1
    value, steps = p["start"], []
    for i, (verb, operand) in enumerate(operations):
        sign = (1 if verb == "gets" else -1) * (-1 if i == flipped else 1)
        if not 0 <= value + sign * operand <= 9:
            sign = -sign  # a flip that leaves 0..9 is not made
        result = int(rng.integers(10)) if i == wrong else value + sign * operand
        if not 0 <= result <= 9:
            break  # after a wrong result the story can leave 0..9; the solution then stops short
        steps.append(f"{'+' if sign > 0 else '-'} {operand} = {result}")
        value = result
    return " ".join([str(p["start"]), *steps, f"answer {value}"])


def rows(split: str, data: str | None = None) -> list[dict]:
    """2,000 train or 500 test problems, or those of a jsonl with prompt and answer."""
    if data:
        return read_jsonl(data, FIELDS, functools.partial(check_texts, fields=FIELDS))
    rng = np.random.default_rng(("train", "test").index(split))
    made = []
    while len(made) < (2000 if split == "train" else 500):
        p = problem(rng)
        if split_of(p) == split:
            made.append({"prompt": prompt(p, rng), "answer": str(p["answer"]), "solution": solution(p)})
    return made


def base_rows(n: int, seed: int) -> list[dict]:
    """Training pairs (prompt, completion) for the base, slips included, from train problems only."""
    rng = np.random.default_rng((seed, 2))
    made = []
    while len(made) < n:
        p = problem(rng)
        if split_of(p) == "train":
            made.append({"prompt": prompt(p, rng), "completion": solution(p, rng)})
    return made


def reward(rows: list[dict], completions: list[str]) -> dict[str, np.ndarray]:
    """correct: the completion ends with "answer N" and N is right; format: steps, then the answer, nothing
    else."""
    correct = [c.split()[-2:] == ["answer", r["answer"]] for r, c in zip(rows, completions, strict=True)]
    return {
        "correct": np.array(correct, dtype=float),
        "format": np.array([bool(LAYOUT.fullmatch(c)) for c in completions], dtype=float),
    }


def task(protocol: str | None = None) -> Task:
    if protocol:
        raise ValueError(f"--protocol {protocol}: tiny-math has none")
    return Task("tiny-math", "text", rows, reward, {"correct": 1.0, "format": 0.1}, "correct")
