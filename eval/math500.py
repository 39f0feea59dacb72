"""MATH: competition problems with an answer in LaTeX; trained on MATH's train split, tested on MATH500."""

from eval.answers import answer_blocks, final_answer, last_box, last_box_or_all
from eval.jsonl import check_texts, read_hub, read_jsonl
from eval.math_equal import equal, string_equal
from eval.math_tasks import D1_TEST, D1_TRAIN, EXPERT, MASKGRPO, PROTOCOLS, math_task
from eval.task import Task

HUB = {"train": "EleutherAI/hendrycks_math", "test": "HuggingFaceH4/MATH-500"}
SUBJECTS = (  # the configurations of the train set
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
FIELDS = ("problem", "solution")

LLADA = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."

# (protocol, split): both public recipes word training and evaluation differently.
PROMPTS = {
    ("d1", "train"): D1_TRAIN + "\n\n" + EXPERT + " \n\n{problem}",
    # the stray quotation mark is in the public prompt
    ("d1", "test"): EXPERT + D1_TEST + '" \n\n\n{problem}',
    ("maskgrpo", "train"): EXPERT + MASKGRPO + "\n\nQuestion:{problem}\n",
    ("maskgrpo", "test"): EXPERT + MASKGRPO + "\n\n{problem}",
    ("llada", "train"): LLADA,
    ("llada", "test"): LLADA,
}


def task(protocol: str | None = None) -> Task:
    """MATH500 with the prompts of d1 (default), MaskGRPO, or LLaDA's zero-shot evaluation.

    By default the reward is ours: ``correctness`` (the `verdict`) and ``format``, both within 0..1. d1 and
    MaskGRPO, when named, bring their own terms, in their own sizes, and the score is ``verdict``. Raises
    ValueError for an unknown protocol.
    """
    ours = {"correctness": 2.0, "format": 1.0}
    public = {"math_correctness": 1.0, "boxed_and_answer_tags": 1.0}
    presets = {
        None: (_ours, ours, "correctness"),
        "d1": (_d1, public, "verdict"),
        "maskgrpo": (_maskgrpo, public, "verdict"),
        "llada": (_llada, ours, "correctness"),
    }
    return math_task("math500", protocol, presets, rows, gold)


def rows(split: str, data: str | None = None, protocol: str = PROTOCOLS[0]) -> list[dict]:
    """The problems of a split ("train" 7,500 less those of MATH500, "test" 500), each with prompt and answer.

    ``data``: a jsonl file with problem and solution; ``{split}`` in its name stands for the split. Raises
    ValueError naming file and line of a malformed row.
    """
    found = _read(split, data)
    if split == "train" and (data is None or "{split}" in data):
        held_out = {_key(row) for row in _read("test", data)}
        found = [row for row in found if _key(row) not in held_out]
    template = PROMPTS[protocol, split]
    return [
        row | {"answer": gold(row), "prompt": template.replace("{problem}", row["problem"])} for row in found
    ]


def _read(split: str, data: str | None) -> list[dict]:
    if data is not None:
        return read_jsonl(data.replace("{split}", split), FIELDS, _check)
    configs = SUBJECTS if split == "train" else (None,)
    return [row for config in configs for row in read_hub(HUB[split], split, config, FIELDS, _check)]


def _key(row: dict) -> str:
    return "".join(row["problem"].split())


def _check(row: dict) -> None:
    check_texts(row, FIELDS)
    if not isinstance(gold(row), str) or not gold(row).strip():
        raise ValueError(r"no answer: a text in answer, or a \boxed{} in solution, is expected")


def gold(row: dict) -> str | None:
    """The gold answer: the field ``answer``, else the last box of the solution (MATH's train split)."""
    return row["answer"] if "answer" in row else last_box(row["solution"])


def extract(completion: str, row: dict) -> str | None:
    """What the verdict reads out of a completion of any row; None is no answer."""
    return final_answer(completion)


def verdict(completion: str, gold: str) -> bool:
    """Is what `final_answer` reads the gold one? The default correctness, and the score."""
    return equal(final_answer(completion), gold)


def _ours(text: str, gold: str) -> dict[str, float]:
    return {"correctness": verdict(text, gold), "format": boxed_and_answer_tags(text)}


def _d1(text: str, gold: str) -> dict[str, float]:
    return {
        "math_correctness": 2.0 * string_equal(last_box_or_all(text), gold),
        "boxed_and_answer_tags": boxed_and_answer_tags(text),
        "verdict": verdict(text, gold),
    }


def _maskgrpo(text: str, gold: str) -> dict[str, float]:
    return _d1(text, gold) | {"boxed_and_answer_tags": 0.5 * boxed(text)}


def _llada(text: str, gold: str) -> dict[str, float]:
    return {"correctness": verdict(text, gold), "format": r"\boxed" in text}


def boxed(text: str) -> float:
    return 1.0 if r"\boxed" in text else 0.5


def boxed_and_answer_tags(text: str) -> float:
    r"""d1: 0.5 for an answer tag, 0.5 for a box inside it, else 0.25; as published, no box is ever seen."""
    blocks = answer_blocks(text)
    return 0.5 * (bool(blocks) + boxed(blocks[0] if blocks else text))
