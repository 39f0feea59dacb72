"""Finding the answer in a completion: boxes, answer tags, numbers. Every scan is linear in the text."""

import re
from collections.abc import Iterator

SPECIAL = re.compile(r"<\|[^<>|]*\|>")  # <|eot_id|> and the like
BRACE = re.compile(r"\\boxed\s*\{|\\[\\{}]|[{}]")
BARE_BOX = re.compile(r"\\boxed\s*([-+.$\d\\][^$\n]*)")  # \boxed 42
PLACEHOLDER = re.compile(r"(?:[.…\s]|\\[lc]?dots)*")


def boxes(text: str) -> Iterator[str]:
    r"""The contents of each ``\boxed{...}`` with balanced braces, last box first."""
    opened, spans = [], []
    for brace in BRACE.finditer(text):
        if brace[0] == "}":
            box = opened.pop() if opened else None
            if box is not None and not (spans and spans[-1][0] > box):  # of nested boxes, the inner one
                spans.append((box, brace.start()))
        elif brace[0][-1] == "{" and brace[0] != r"\{":
            opened.append(brace.end() if len(brace[0]) > 1 else None)
    for start, end in sorted(spans, reverse=True):
        yield text[start:end]


def last_box(text: str) -> str | None:
    r"""The last box that is neither empty nor a placeholder (``\boxed{...}``); None without one."""
    for box in boxes(text):
        if not PLACEHOLDER.fullmatch(box):
            return box.strip()
    bare = BARE_BOX.findall(text)
    return bare[-1].strip() if bare else None


def last_box_or_all(text: str) -> str:
    r"""The public reading: what stands in the last ``\boxed``, as it is; without one, the whole text."""
    box = text[max(text.rfind(r"\boxed"), 0) :]
    for content in boxes(box):
        return content
    bare = BARE_BOX.match(box)
    return bare[1] if bare else text


def answer_blocks(text: str) -> list[str]:
    """What follows each ``<answer>``, up to ``</answer>`` or the end: a cut completion has no closing tag."""
    return [block.split("</answer>")[0].strip() for block in text.split("<answer>")[1:]]


def last_block_or_all(text: str) -> str:
    """d1's reading: what follows the last ``<answer>`` (else the whole text), up to ``</answer>``."""
    return text.rpartition("<answer>")[2].split("</answer>")[0].strip()


def final_answer(completion: str) -> str | None:
    """The one rule by which a MATH answer is read: the last box, else the last ``<answer>`` block that is not
    empty; None where there is none."""
    text = SPECIAL.sub("", completion)
    box = last_box(text)
    if box is not None:
        return box
    return next((block for block in reversed(answer_blocks(text)) if block), None)


UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
NUMBER = re.compile(
    r"(?P<sign>(?<![\d)}])-(?:(?<![\d)}] -)\s+)?)?(?:"  # 6 - 10 is a difference, 6 and -10 are two numbers
    r"(?:(?P<whole>\d+)\s*)?\\[dtc]?frac"
    r"\s*(?:\{\s*(?P<n>-?\d+)\s*\}|(?P<n1>\d))\s*(?:\{\s*(?P<d>\d+)\s*\}|(?P<d1>\d))"
    rf"|(?:(?P<mixed>\d+)\s+(?=\d+\s*/))?(?P<a>{UNSIGNED})(?:\s*/\s*(?P<b>{UNSIGNED}))?)"
)
# What stands inside or around a number and is not part of it.
NUMBER_NOISE = (
    (re.compile("[−﹣－]"), "-"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=\d)(?:\\[,!;: ]|[\u00a0\u2009\u202f])(?=\d{3})"), ""),  # 10\,000
    (re.compile(r"\\[,!;: ]|\\?[$%]|\^\s*\{?\s*\\circ\s*\}?|°"), ""),
    (re.compile(r"(?<=[A-Za-z}])\^\{?\d\}?"), ""),  # cm^2
)


def numbers(text: str) -> list[float]:
    r"""Every number of a text, in order: ``$1,234.00``, ``10{,}000``, ``1/4``, ``\frac{1}{2}``, ``25\%``."""
    for noise, plain in NUMBER_NOISE:
        text = noise.sub(plain, text)
    found = []
    for match in NUMBER.finditer(text):
        if match["a"]:
            above, below = match["a"].replace(",", ""), (match["b"] or "1").replace(",", "")
        else:
            above, below = match["n"] or match["n1"], match["d"] or match["d1"]
        if float(below):
            value = float(match["whole"] or match["mixed"] or 0) + float(above) / float(below)
            found.append(-value if match["sign"] else value)
    return found


def final_number(completion: str) -> float | None:
    """The one rule by which a GSM8K answer is read; None where there is none.

    The last box that holds a number, else the last ``<answer>`` block that does, else the number after the
    last ``####``. In a box or block an equation gives what follows its last ``=``; otherwise the first number
    of a box, the last of a block.
    """
    text = SPECIAL.sub("", completion)
    for position, places in ((0, boxes(text)), (-1, reversed(answer_blocks(text)))):
        for place in places:
            if found := numbers(place.rpartition("=")[2]) if "=" in place else []:
                return found[0]
            if found := numbers(place):
                return found[position]
    _, mark, tail = text.rpartition("####")
    return (numbers(tail) or [None])[0] if mark else None


def last_number(completion: str) -> float | None:
    """The last number anywhere (the flexible rule); None where there is none."""
    return (numbers(SPECIAL.sub("", completion)) or [None])[-1]


def same_number(a: float | None, b: float | None) -> bool:
    """Equal within 1e-6; no answer equals nothing."""
    return a is not None and b is not None and abs(a - b) <= 1e-6
