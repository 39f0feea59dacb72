"""GSM8K: grade-school word problems with a number for an answer."""

import re
from pathlib import Path

from eval.answers import (
    final_number,
    last_block_or_all,
    last_box_or_all,
    last_number,
    numbers,
    same_number,
)
from eval.jsonl import check_texts, read_hub, read_jsonl
from eval.math_tasks import D1_TEST, D1_TRAIN, EXPERT, MASKGRPO, PROTOCOLS, math_task
from eval.task import Task

HUB, CONFIG = "openai/gsm8k", "main"
FIELDS = ("question", "answer")
SHOTS = Path(__file__).with_name("gsm8k_shots.jsonl")

# (protocol, split): both public recipes word training and evaluation differently.
PROMPTS = {
    ("d1", "train"): D1_TRAIN + "\n\n{question}",
    ("d1", "test"): EXPERT + " " + D1_TEST + "\n\n{question}",  # the blank is in the public prompt
    ("maskgrpo", "train"): EXPERT + " " + MASKGRPO + "\n\nQuestion:{question}\n",
    ("maskgrpo", "test"): EXPERT + " " + MASKGRPO + "\n\n{question}",
}
LLADA = "Question: {question}\nLet's think step by step\nAnswer:"  # after the four examples of SHOTS


def task(protocol: str | None = None) -> Task:
    """GSM8K with the prompts of d1 (default), MaskGRPO, or LLaDA's four-shot evaluation.

    By default the reward is ours: ``correctness`` (the `verdict`), ``format`` and ``int``, each within 0..1;
    ``flexible`` (by the last number of the text) is only reported. d1 and MaskGRPO, when named, bring their
    own terms, in their own sizes, and the score is ``verdict``. LLaDA is scored by the last number, as in its
    own evaluation. Raises ValueError for an unknown protocol.
    """
    presets = {
        None: (_ours, {"correctness": 2.0, "format": 1.5, "int": 0.5}, "correctness"),
        "d1": (
            _d1,
            {"xmlcount": 1.0, "soft_format": 1.0, "strict_format": 1.0, "int": 1.0, "correctness": 1.0},
            "verdict",
        ),
        "maskgrpo": (_maskgrpo, {"soft_format": 1.0, "int": 1.0, "correctness": 1.0}, "verdict"),
        "llada": (_llada, {"correctness": 2.0, "format": 0.5}, "correctness"),
    }
    return math_task("gsm8k", protocol, presets, rows, gold)


def rows(split: str, data: str | None = None, protocol: str = PROTOCOLS[0]) -> list[dict]:
    """The problems of a split ("train" 7,473, "test" 1,319), each with its prompt.

    ``data``: a jsonl file with question and answer (``... #### 42``); ``{split}`` in its name stands for the
    split. Raises ValueError naming file and line of a malformed row.
    """
    if data is None:
        found = read_hub(HUB, split, CONFIG, FIELDS, _check)
    else:
        found = read_jsonl(data.replace("{split}", split), FIELDS, _check)
    if protocol == "llada":
        shots = read_jsonl(str(SHOTS), FIELDS)
        examples = "".join(LLADA.replace("{question}", shot["question"]) + shot["answer"] for shot in shots)
        template = examples + LLADA
    else:
        template = PROMPTS[protocol, split]
    return [row | {"prompt": template.replace("{question}", row["question"])} for row in found]


def _check(row: dict) -> None:
    check_texts(row, FIELDS)
    if "####" not in row["answer"] or not numbers(gold(row)):
        raise ValueError("answer does not end with '#### ' and a number")


def gold(row: dict) -> str:
    """The gold answer as written: what follows ``####``."""
    return row["answer"].rpartition("####")[2].strip()


def extract(completion: str, row: dict) -> float | None:
    """What the verdict reads out of a completion of any row; None is no answer."""
    return final_number(completion)


def verdict(completion: str, gold: str) -> bool:
    """Is the number that `final_number` reads the gold one? The default correctness, and the score."""
    return same_number(final_number(completion), numbers(gold)[0])


def _ours(text: str, gold: str) -> dict[str, float]:
    value = final_number(text)
    d1_format = xmlcount(text) + soft_format(text) + strict_format(text)
    return {
        "correctness": verdict(text, gold),
        "format": max(d1_format, 0.0) / 1.5,
        "int": value is not None and value.is_integer(),
        "flexible": flexible(text, gold),
    }


def _d1(text: str, gold: str) -> dict[str, float]:
    answer = last_block_or_all(text)
    return {
        "xmlcount": xmlcount(text),
        "soft_format": soft_format(text),
        "strict_format": strict_format(text),
        "int": 0.5 * answer.isdecimal(),  # isdigit, as published, takes a superscript for a digit
        "correctness": 2.0 * (answer == gold),
        "verdict": verdict(text, gold),
        "flexible": flexible(text, gold),
    }


def _maskgrpo(text: str, gold: str) -> dict[str, float]:
    answer = last_box_or_all(text)
    return {
        "soft_format": 0.5 * bool(re.search(r"<reasoning>.*?</reasoning>", text, re.DOTALL)),
        "int": 0.5 * answer.isdecimal(),
        "correctness": 2.0 * (answer == gold),
        "verdict": verdict(text, gold),
        "flexible": flexible(text, gold),
    }


def _llada(text: str, gold: str) -> dict[str, float]:
    return {
        "correctness": flexible(text, gold),
        "format": bool(re.search(r"[Tt]he answer is\s*\S*\d", text)),
        "verdict": verdict(text, gold),
    }


def flexible(text: str, gold: str) -> bool:
    """Is the last number, before any next question that the model went on to write, the gold one?"""
    return same_number(last_number(text.partition("Question:")[0]), numbers(gold)[0])


def xmlcount(text: str) -> float:
    """d1: 0.125 for each tag with its line feeds, less 0.001 for each character after the last closing tag.

    The length is taken off once for each of the two answer terms that were earned. As published, the whole
    text counts as that tail when its last line feed is missing; here white space is never a tail.
    """
    count = 0.125 * ((text.count("<reasoning>\n") == 1) + (text.count("\n</reasoning>\n") == 1))
    _, closing, after = text.rpartition("\n</answer>")
    tail = len(after.strip()) if closing else 0
    for tag in ("\n<answer>\n", "\n</answer>"):
        if text.count(tag) == 1:
            count += 0.125 - 0.001 * tail
    return count


def soft_format(text: str) -> float:
    """d1: 0.5 for reasoning, then an answer, at the start; here on any number of lines."""
    return 0.5 * bool(re.match(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", text, re.DOTALL))


def strict_format(text: str) -> float:
    """d1: 0.5 for exactly the prompt's layout; here on any number of lines, the last line feed optional."""
    layout = r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?"
    return 0.5 * bool(re.fullmatch(layout, text, re.DOTALL))
