"""GenEval's verdict on one picture, given what a detector found in it; no model, no pixels.

Thresholds, order of the checks and wording of the reasons are those of djghosh13/geneval, whose own verdicts
are the golden cases of the test.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
# The 80 classes of COCO in the order of every detector trained on it, under the names that GenEval uses.
_NAMES = """
person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign,
parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella,
handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove,
skateboard, surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple,
sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining
table, toilet, tv, laptop, computer mouse, tv remote, computer keyboard, cell phone, microwave, oven,
toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, hair drier, toothbrush
"""
CLASSES = tuple(" ".join(_NAMES.split()).split(", "))


@dataclass(frozen=True)
class Detection:
    """One object: score 0..1, box (x1, y1, x2, y2) in pixels, mask bool [H, W], colour once it is known."""

    name: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None
    color: str | None = None


@dataclass(frozen=True)
class Rule:
    """The thresholds of the benchmark; with ``max_overlap`` 1 boxes may overlap as they like."""

    threshold: float = 0.3
    counting_threshold: float = 0.9
    max_objects: int = 16
    max_overlap: float = 1.0
    position_threshold: float = 0.1


RULE = Rule()


def check_row(row: dict, where: str) -> None:
    """Raises ValueError, beginning with ``where``, unless the row is one that the rule can judge."""
    if not isinstance(row.get("prompt"), str) or row.get("tag") not in TAGS:
        raise ValueError(f"{where}: needs a prompt, and a tag out of {', '.join(TAGS)}")
    for key in ("include", "exclude"):
        clauses = row.get(key, [])
        if not isinstance(clauses, list) or not all(isinstance(clause, dict) for clause in clauses):
            raise ValueError(f"{where}: {key} must be a list of objects with class and count")
        for i, clause in enumerate(clauses):
            name, count, position = clause.get("class"), clause.get("count"), clause.get("position")
            if name not in CLASSES:
                raise ValueError(f"{where}: {key} names the class {name!r}, which is none of the 80 of COCO")
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{where}: {key} wants {count!r} of {name}; the count must be 1 or more")
            if clause.get("color", "red") not in COLORS:
                raise ValueError(f"{where}: colour {clause['color']!r}; accepted: {', '.join(COLORS)}")
            if position is not None and position not in [[r, k] for r in RELATIONS for k in range(i)]:
                raise ValueError(
                    f"{where}: position {position!r}; accepted: one of {', '.join(RELATIONS)}, "
                    f"and the index of an earlier clause"
                )


def keep(detections: list[Detection], tag: str, rule: Rule = RULE) -> dict[str, list[Detection]]:
    """The objects that count, by class, in order of falling score.

    Those over the threshold of the tag (compared in float32, as the benchmark does), of these the best
    ``max_objects`` of a class, of these the ones that overlap no better one.
    """
    threshold = np.float32(rule.counting_threshold if tag == "counting" else rule.threshold)
    kept: dict[str, list[Detection]] = {}
    taken: dict[str, int] = {}
    for d in sorted(detections, key=lambda d: -d.score):
        if np.float32(d.score) <= threshold or taken.get(d.name, 0) == rule.max_objects:
            continue
        taken[d.name] = taken.get(d.name, 0) + 1
        others = kept.setdefault(d.name, [])
        if rule.max_overlap == 1 or all(iou(d.box, o.box) < rule.max_overlap for o in others):
            others.append(d)
    return kept


def iou(a: tuple, b: tuple) -> float:
    """Intersection over union of two boxes, whose last pixel counts: a side is x2 - x1 + 1 long."""

    def area(x1, y1, x2, y2):
        return max(x2 - x1 + 1, 0) * max(y2 - y1 + 1, 0)

    both = area(max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3]))
    union = area(*a) + area(*b) - both
    return both / union if union else 0.0


def relations(a: tuple, b: tuple, slack: float = 0.1) -> list[str]:
    """Where box a lies, seen from box b: at most one of left of, right of, then at most one of above, below.

    The offset of the centres, each coordinate shortened by ``slack`` of both sizes, has to point that way by
    more than half of the offset's length.
    """
    a, b = np.reshape(a, (2, 2)), np.reshape(b, (2, 2))  # rows: corners, columns: x, y
    offset = a.mean(0) - b.mean(0)
    sizes = np.abs(a[1] - a[0]) + np.abs(b[1] - b[0])
    beyond = np.maximum(np.abs(offset) - slack * sizes, 0) * np.sign(offset)
    if np.all(np.abs(beyond) < 1e-3):
        return []
    dx, dy = beyond / np.linalg.norm(offset)
    return [name for name, far in zip(RELATIONS, (-dx, dx, -dy, dy), strict=True) if far > 0.5]


def judge(row: dict, objects: dict[str, list[Detection]], rule: Rule = RULE) -> tuple[bool, str]:
    """(correct, reason): each include clause holds for the best objects of its class, no exclude clause does.

    ``objects`` as ``keep`` returns them; where a clause has a colour, those of its first ``count`` are known.
    """
    reasons, groups = [], []
    for clause in row.get("include", []):
        found = objects.get(clause["class"], [])[: clause["count"]]
        reason = _unmet(clause, found, groups, rule)
        groups.append(None if reason else found)
        reasons.append(reason)
    for clause in row.get("exclude", []):
        name, limit, n = clause["class"], clause["count"], len(objects.get(clause["class"], []))
        reasons.append(f"expected {name}<{limit}, found {n}" if n >= limit else "")
    reason = "\n".join(filter(None, reasons))
    return not reason, reason


def _unmet(clause: dict, found: list[Detection], groups: list, rule: Rule) -> str:
    """Why an include clause fails, "" where it holds; groups: what each earlier clause matched, or None."""
    name, n = clause["class"], clause["count"]
    if len(found) < n:
        return f"expected {name}>={n}, found {len(found)}"
    if color := clause.get("color"):
        colors = [d.color for d in found]
        if (hits := colors.count(color)) < n:
            seen = ", ".join(f"{colors.count(c)} {c}" for c in COLORS if c in colors)
            return f"expected {color} {name}>={n}, found {hits} {color}; and {seen}"
    if "position" in clause:
        relation, target = clause["position"]
        if groups[target] is None:
            return f"no target for {name} to be {relation}"
        for a, b in product(found, groups[target]):
            true = relations(a.box, b.box, rule.position_threshold)
            if relation not in true:
                return f"expected {name} {relation} target, found {' and '.join(true)} target"
    return ""


def dense(row: dict, objects: dict[str, list[Detection]], rule: Rule = RULE) -> float:
    """Partial credit in 0..1, the mean over parts (no parts: 0); what UDM-GRPO and Flow-GRPO train with.

    A clause that asks for n objects, of which there are m, has the part max(0, 1 - |m - n|/n). With m = n a
    colour adds the share of objects that have it, a position 1 or 0; with m != n a single 0 stands for both.
    Two things are ours: the public form has no max and ignores exclude clauses. Here an exclude clause adds 1
    if kept, else 0, unless its class is included too (then m = n says it already).
    """
    parts, groups = [], []
    for clause in row.get("include", []):
        found, n = objects.get(clause["class"], []), clause["count"]
        matched = len(found) == n
        parts.append(max(0.0, 1 - abs(len(found) - n) / n))
        if not matched and ("color" in clause or "position" in clause):
            parts.append(0.0)
        if matched and "color" in clause:
            parts.append(sum(d.color == clause["color"] for d in found) / n)
            matched = parts[-1] == 1
        if matched and "position" in clause:
            relation, target = clause["position"]
            matched = groups[target] is not None and all(
                relation in relations(a.box, b.box, rule.position_threshold)
                for a, b in product(found, groups[target])
            )
            parts.append(float(matched))
        groups.append(found if matched else None)
    included = {clause["class"] for clause in row.get("include", [])}
    for clause in row.get("exclude", []):
        if clause["class"] not in included:
            parts.append(float(len(objects.get(clause["class"], [])) < clause["count"]))
    return sum(parts) / len(parts) if parts else 0.0
