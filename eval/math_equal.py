r"""Are two LaTeX answers the same under the conventions of MATH?

Equal after MATH's string normalisation, or plainly the same object in another accepted form: ``\frac{9}{5}``
is ``1\frac{4}{5}`` and ``1.8``. Unreduced fractions, rounded decimals, lost signs and other brackets are not
equal. Lists, tuples, sets, unions and matrices are taken apart here; what is left goes to math-verify, in a
process of its own with hard limits, since no in-process timeout stops sympy on a hostile answer.
"""

import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from functools import lru_cache
from math import gcd

LONGEST = 400  # characters; beyond, and for the hostile forms below, only the string rule applies
HOSTILE = re.compile(
    r"\^\{?-?\d{4}|\^\{[^{}]*\^|\^\{?\d+\}?\)*[\^!]|\)\^\{?\d{2}|\d{4}!|!\)*!|\\binom\{\d{4}|\d{60}|(?:\{[^{}]*){20}"
)
CPU_SECONDS, WALL_SECONDS, MEMORY = 1.5, 30.0, 4 << 30  # of one comparison by math-verify

UNITS = (
    r"degrees?|cents?|dollars?|units?|points?|square|cubic|[ckm]m|inch(?:es)?|feet|foot|ft|yards?|miles?|mph"
    r"|(?:centi|kilo)?met(?:er|re)s?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|grams?|kg"
)
TEXT = r"\\(?:text(?:bf|it|rm|sf)?|mbox|hbox|mathrm|mathbf|mathit|operatorname)\s*\{([^{}]*)\}"
# Text that ends an answer, after something else, is a unit: \text{cm}, \mathrm{~m}, but not \mathrm{i}.
UNIT_TEXT = r"\\(?:text(?:bf|it|rm|sf)?|mbox|hbox|mathrm(?=\s*\{ ))\s*\{[^{}]*\}"
POWER = r"(?:\s*\^\s*\{?\s*\d\s*\}?)?"

REWRITES = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        ("[−﹣－]", "-"),
        ("√", r"\\sqrt "),
        ("π", r"\\pi "),
        ("∞", r"\\infty "),
        ("∪", r"\\cup "),
        ("[×∙·]", r"\\cdot "),
        (r"°|\\degree\b", r"^\\circ"),
        (
            r"\s+|~|(?<!\\)\\(?:[!,;: ]|q?quad\b)|\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])\.?",
            " ",
        ),
        (r"\^\s*(?:\\circ\b|\{\s*\\circ\s*\})", ""),
        (r"\\?[$%]", ""),
        (r"\\[dtc]frac\b|\\[dtc]frac(?=\d)", r"\\frac"),
        (r"\\(?:le|leqslant)(?![a-zA-Z])", r"\\leq"),
        (r"\\(?:ge|geqslant)(?![a-zA-Z])", r"\\geq"),
        (r"\\(begin|end)\s*\{[bp]?matrix\}", r"\\\1{pmatrix}"),
        (rf"(?<=\S)\s*{UNIT_TEXT}{POWER}\s*$", ""),
        (TEXT, r" \1 "),
        (rf"(?<=[\d}}])\s*(?:(?:{UNITS})\b{POWER}\s*)+$", ""),
        (r",?\s*\b(?:and|or)\b", ", "),
        (r"(?<=\d)\s*\{,\}\s*(?=\d{3})", ""),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"(?<=\d)\s+(\d+)\s*/\s*(\d+)", r"\\frac{\1}{\2}"),  # 17 1/2
        (r"\\varnothing\b", r"\\emptyset"),
        (r"_\s*\{\s*(\w)\s*\}", r"_\1"),
    )
)
NAME = r"(?:[a-zA-Z]'?|[A-Z]{2,3}|\\(?:theta|alpha|beta|lambda)|\\angle\s*[A-Z]+)(?:_\w)?(?:\s*\([^()=]*\))?"
LEFT_SIDE = re.compile(rf"\s*({NAME})\s*(?:=|\\in(?![a-zA-Z]))([^=<>]*)")
ARGUMENT = re.compile(r"\s*(\\[a-zA-Z]+|[^\s{}])")
RATIONAL = re.compile(
    r"(-?)(?:(\d+)?\\frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)/(\d+)|(\d+(?:\.\d*)?)|(\d{1,3}(?:,\d{3})+(?:\.\d*)?))"
)
LETTER = re.compile(r"\\[a-zA-Z]+|([a-zA-Z])")
FRACTION = re.compile(r"\\frac\{-?(\d+)\}\{-?(\d+)\}|(?<![\w}.])(\d+)/(\d+)(?![\w{.])")


def normal(answer: str) -> str:
    """One spelling for what MATH's own rule, or plain typography, spells in several ways."""
    text = re.sub(r"(?<=\d),?\s*\\!\s*(?=\d{3})", "", answer)  # 10,\!080
    for pattern, plain in REWRITES:
        text = pattern.sub(plain, text)
    text = text.strip().rstrip(".,").strip()
    named = [LEFT_SIDE.fullmatch(part) for part in split(text, ",")]
    if all(named) and len({match[1].strip() for match in named}) == 1:  # y = 2x + 3; x = 1, x = 2
        text = ",".join(match[2] for match in named)
    text = _braced(text)
    text = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])|\s+", lambda m: m[1] + " " if m[1] else "", text.strip())
    if re.fullmatch(r"[A-Za-z]{2,}", text):  # a word
        return text.lower()
    return re.sub(r"^\(([A-Z])\)$", r"\1", text)  # the letter of a choice


def _braced(text: str) -> str:
    r"""``\frac12`` and ``\sqrt 5`` with their arguments in braces."""
    parts = re.split(r"(\\frac|\\sqrt(?:\s*\[[^\]]*\])?)(?![a-zA-Z])", text)
    done = parts[-1]
    for command, before in zip(parts[-2::-2], parts[-3::-2], strict=True):
        first, rest = _argument(done)
        if command == r"\frac" and rest is not None:
            second, tail = _argument(rest)
            first, rest = (first + second, tail) if tail is not None else (first, rest)
        done = before + command.replace(" ", "") + (first + rest if rest is not None else done)
    return done


def _argument(text: str) -> tuple[str, str | None]:
    """The first argument of a command, in braces, and what follows; (text, None) where there is none."""
    start = text.lstrip()
    if start.startswith("{"):
        depth = 0
        for i, character in enumerate(start):
            depth += (character == "{") - (character == "}")
            if not depth:
                return "{" + start[1:i].strip() + "}", start[i + 1 :]
    elif single := ARGUMENT.match(start):
        name = single[1]
        if name.startswith(("\\frac", "\\sqrt")):  # \sqrt\frac{1}{2}: its arguments belong to it
            arity, rest = 1 + (name == "\\frac"), start[len(name) :]
            for _ in range(arity):
                argument, rest = _argument(rest)
                if rest is None:
                    return text, None
                name += argument
            return "{" + name + "}", rest
        return "{" + name + "}", start[single.end() :]
    return text, None


def string_equal(pred: str, gold: str) -> bool:
    r"""The MATH authors' string rule, which d1 and MaskGRPO reward: ``\frac12`` is ``1/2`` and ``0.5``."""
    if max(len(pred), len(gold)) > 10 * LONGEST:
        return pred == gold
    p, g = map(_hendrycks, (pred, gold))
    return p == g and (bool(p) or pred == gold)


def _hendrycks(text: str) -> str:
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\[$%]", "", re.sub("[td]frac", "frac", text))
    text = text.partition(r"\text{ ")[0]  # a unit on the right
    text = re.sub(r"^\.|(?<=[ {])\.", "0.", text)
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = _braced(text).replace(" ", "")
    text = re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)
    return r"\frac{1}{2}" if text == "0.5" else text


def rational(text: str) -> Fraction | None:
    """The exact value of a plain number, fraction or mixed number in normal form; None for anything else."""
    match = RATIONAL.fullmatch(text)
    if not match or len(text) > LONGEST:
        return None
    sign, whole, above, below, a, b, decimal, grouped = match.groups()
    if int(below or b or 1) == 0:
        return None
    if decimal or grouped:
        value = Fraction((decimal or grouped.replace(",", "")).rstrip("."))
    else:
        value = int(whole or 0) + Fraction(int(above or a), int(below or b))
    return -value if sign else value


def unreduced(text: str) -> set[tuple[int, int]]:
    """The fractions of whole numbers that are not in lowest terms."""
    pairs = [(int(a or c), int(b or d)) for a, b, c, d in FRACTION.findall(text)]
    return {(a, b) for a, b in pairs if gcd(a, b) != 1 and a}


def split(text: str, separator: str) -> list[str]:
    """Split at a separator that stands outside all brackets."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text.startswith(separator, i) and depth == 0:
            parts.append(text[start:i])
            start = i = i + len(separator)
            continue
        depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    return [*parts, text[start:]]


def equal(pred: str | None, gold: str | None) -> bool:
    """Is ``pred`` the answer ``gold``? Both in LaTeX, without box. Any input gets a verdict; None is wrong.

    Raises ImportError, with what to install, where math-verify is needed and absent.
    """
    if pred is None or gold is None:
        return False
    if max(len(pred), len(gold)) > 10 * LONGEST:
        return pred.strip() == gold.strip()
    p, g = normal(pred), normal(gold)
    if p == g:
        return bool(p) or pred.strip() == gold.strip()
    if not p or not g or unreduced(p) - unreduced(g):
        return False
    return _same(p, g)


def _same(p: str, g: str) -> bool:
    """Equality of two normal forms, taken apart as far as their structure goes."""
    if p == g:
        return True
    x, y = rational(p), rational(g)
    if x is not None and y is not None:
        return x == y
    if max(len(p), len(g)) > LONGEST or HOSTILE.search(p) or HOSTILE.search(g):
        return False
    if any(re.fullmatch(r"-?\d+_\w+", text) for text in (p, g)):  # a base: 52_8 is not 52
        return False
    if all(re.fullmatch(r"[A-Za-z]{2,}", text) for text in (p, g)):
        return False

    for separator in (r"\cup", ","):
        parts = split(p, separator), split(g, separator)
        if len(parts[0]) > 1 or len(parts[1]) > 1:
            return _unordered(*parts)
    if r"\begin{pmatrix}" in p + g:
        return _same_matrix(p, g)
    bracketed = [re.fullmatch(r"(\(|\[|\\\{)(.*?)(\)|\]|\\\})", text, re.S) for text in (p, g)]
    parts = [split(match[2], ",") if match else [] for match in bracketed]
    if max(map(len, parts)) > 1 or any(match and match[1] == r"\{" for match in bracketed):
        if not all(bracketed):
            return bool(re.search(r"[<>]|\\[lg]eq", p + g)) and _atoms(p, g)  # -2 < x < 7 for (-2, 7)
        if any(bracketed[0][i] != bracketed[1][i] for i in (1, 3)):
            return False
        return _unordered(*parts) if bracketed[0][1] == r"\{" else _ordered(*parts)
    if r"\pm" in p or r"\pm" in g:
        return _unordered([p], [g])

    sides = split(p, "="), split(g, "=")
    if (
        len(sides[0]) == len(sides[1]) == 2
    ):  # as printed or with the sides swapped; a multiple is another equation
        (a, b), (c, d) = sides
        return any(_atoms(f"{left}-({right})", f"{c}-({d})") for left, right in ((a, b), (b, a)))
    if len(sides[0]) != len(sides[1]):  # 6\cdot 7=42 is 42, but x+y=5 is not 5
        return len(sides[1]) == 1 and not any(LETTER.findall(p)) and _same(sides[0][-1], g)
    return _atoms(p, g)


def _ordered(p: list[str], g: list[str]) -> bool:
    return len(p) == len(g) and all(_same(a, b) for a, b in zip(p, g, strict=True))


def _unordered(p: list[str], g: list[str]) -> bool:
    r"""The same elements in any order, ``a \pm b`` standing for two."""
    p, g = (
        [element.replace(r"\pm", sign) for element in side for sign in _signs(element)] for side in (p, g)
    )
    if len(p) != len(g) or len(p) > 20:
        return False
    for element in p:
        match = next((other for other in g if _same(element, other)), None)
        if match is None:
            return False
        g.remove(match)
    return True


def _signs(element: str) -> tuple[str, ...]:
    return ("+", "-") if element.count(r"\pm") == 1 else ("",)


def _same_matrix(p: str, g: str) -> bool:
    matrices = []
    for text in (p, g):
        match = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text, re.S)
        if not match or r"\begin" in match[1]:
            return _atoms(p, g)
        rows = [row.split("&") for row in match[1].split(r"\\") if row.strip()]
        matrices.append(rows)
    return len(matrices[0]) == len(matrices[1]) and all(map(_ordered, *matrices))


def _atoms(p: str, g: str) -> bool:
    """Equality by math-verify, decimals as exact fractions so that a rounded one stays different."""
    letters, others = (set(LETTER.findall(text)) for text in (p, g))
    if letters != others and {x.lower() for x in letters} == {x.lower() for x in others}:
        return False  # math-verify does not tell X from x
    return _ask(*(re.sub(r"\d+\.\d+", _as_fraction, text) for text in (p, g)))


def _as_fraction(decimal: re.Match) -> str:
    value = Fraction(decimal[0])
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_lock = threading.Lock()
_worker: subprocess.Popen | None = None


@lru_cache(maxsize=4096)
def _ask(p: str, g: str) -> bool:
    """The worker's verdict; a comparison that breaks its limits ends the worker and is not equal."""
    global _worker
    with _lock:
        for _ in range(2):  # a worker may have died between two questions: ask a new one once
            fresh = _worker is None or _worker.poll() is not None
            if fresh:
                _worker = _start()
            try:
                _worker.stdin.write(json.dumps([p, g]).encode() + b"\n")
                _worker.stdin.flush()
            except BrokenPipeError:
                continue
            verdict = _worker.stdout.readline()
            if not verdict:
                _worker.wait()
            return verdict == b"1\n"
    return False


def _start() -> subprocess.Popen:
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("MATH answers are compared by math-verify: pip install -r requirements.txt")
    # -P: the folder of this file holds modules whose names other packages use.
    command = [sys.executable, "-P", os.path.abspath(__file__)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _serve() -> None:
    """The worker: one JSON pair a line in, 1 or 0 a line out; a timer or the memory limit kills it."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # units=False: `normal` has dropped them, and the m of 3m is a variable.
    spelling = NormalizationConfig(basic_latex=True, malformed_operators=True, units=False, nits=False)
    latex = [LatexExtractionConfig(normalization_config=spelling)]
    exact = dict(float_rounding=30, numeric_precision=40, allow_set_relation_comp=True, timeout_seconds=None)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        try:
            p, g = (
                parse(f"${text}$", latex, fallback_mode="no_fallback", parsing_timeout=None)
                for text in json.loads(line)
            )
            same = verify(g, p, **exact)
        except Exception:  # whatever a hostile answer provokes: no equality was shown
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(b"1\n" if same else b"0\n")


if __name__ == "__main__":
    _serve()
