"""MBPP: short Python functions, judged by running their tests in `eval/sandbox.py`.

Components of the reward: ``tests`` (share of tests passed, 0..1), ``format`` (0.5: code that parses, 0.25: a
fenced block that does not, 0: no code) and the score ``correctness`` (1 if all tests pass). The public
MaskGRPO code reports the mean of ``tests`` over tasks 1 to 500; the usual split, taken here, has tasks 11 to
510 for the test.
"""

import ast
import functools
import textwrap
import warnings

import numpy as np

from eval.asserts import called_names, parse_test
from eval.jsonl import read_jsonl
from eval.sandbox import Program, judge, require
from eval.task import Task

# maskgrpo: the public prompt, which names no format, so bare code is well-formed too.
# d1: has no code task; its reasoning and answer tags around a fence (ours).
# llada: three worked examples between [BEGIN] and [DONE], as in OpenCompass (without its quotes around the
# code).
PROTOCOLS = ("maskgrpo", "d1", "llada")
FIELDS = ("task_id", "text", "code", "test_list")
SPLITS = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "train": range(601, 975),
}  # task_id; 511-600: validation
SHOTS = (2, 3, 4)  # task_id
D1_FORMAT = """

Respond in the following format:
<reasoning>
Your reasoning here
</reasoning>
<answer>
```python
# your code here
```
</answer>"""


def task(protocol: str | None = None, unsafe_exec: bool = False) -> Task:
    """MBPP under a protocol (default maskgrpo).

    Raises ValueError for an unknown protocol, and where code cannot be isolated, unless ``unsafe_exec``.
    """
    protocol = protocol or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise ValueError(f"--protocol {protocol}: unknown to --task mbpp; accepted: {', '.join(PROTOCOLS)}")
    require(unsafe_exec)
    return Task(
        name="mbpp",
        modality="text",
        rows=functools.partial(rows, protocol=protocol),
        reward=functools.partial(reward, unsafe_exec=unsafe_exec),
        weights={"tests": 1.0, "format": 1.0},
        score="correctness",
    )


def rows(split: str, data: str | None = None, protocol: str = PROTOCOLS[0]) -> list[dict]:
    """The tasks of a split ("train" 374, "test" 500), each with its prompt.

    ``data``: a jsonl file with the fields of MBPP, whose task_id tells the split. Raises ValueError naming
    the file and row for a malformed task, or when the split is empty.
    """
    if data is None:
        from datasets import load_dataset

        source = "google-research-datasets/mbpp"
        found = {name: list(load_dataset(source, "full", split=name)) for name in {split, "prompt"}}
    else:
        source, numbered = data, list(enumerate(read_jsonl(data, FIELDS), start=1))
        for number, row in numbered:
            _check_row(row, f"{data}: row {number}")
        tasks = [row for _, row in numbered]
        found = {name: [r for r in tasks if r["task_id"] in SPLITS[name]] for name in {split, "prompt"}}
    if not found[split]:
        ids = SPLITS[split]
        raise ValueError(f"{source}: holds no task of split {split} (task_id {ids[0]} to {ids[-1]})")
    shots = ""
    if protocol == "llada":
        by_id = {row["task_id"]: row for row in found["prompt"]}
        if not by_id.keys() >= set(SHOTS):
            raise ValueError(
                f"{source}: --protocol llada takes its examples from tasks {SHOTS}, not all there"
            )
        shots = "".join(
            f"{_question(by_id[i])}\n\n[BEGIN]\n{_normal(by_id[i]['code']).strip()}\n[DONE]\n\n"
            for i in SHOTS
        )
    ending = {"maskgrpo": "", "d1": D1_FORMAT, "llada": "\n\n[BEGIN]\n"}[protocol]
    return [row | {"prompt": shots + _question(row) + ending} for row in found[split]]


def reward(rows: list[dict], completions: list[str], unsafe_exec: bool = False) -> dict[str, np.ndarray]:
    """Float arrays [n]: tests, format, correctness. Raises TypeError for a completion that is no string."""
    programs, formats = [], []
    for row, completion in zip(rows, completions, strict=True):
        if not isinstance(completion, str):
            raise TypeError(f"a completion of --task mbpp is a string, got {type(completion).__name__}")
        code, well_formed = extract_code(completion, row["test_list"])
        programs.append(Program(code, tuple(row["test_list"]), row.get("test_setup_code") or ""))
        formats.append(well_formed)
    verdicts = judge(programs, unsafe_exec=unsafe_exec)
    return {
        "tests": np.array([verdict.rate for verdict in verdicts]),
        "format": np.array(formats, dtype=float),
        "correctness": np.array([float(bool(v.passed) and all(v.passed)) for v in verdicts]),
    }


def extract(completion: str, row: dict) -> str | None:
    """The program that is run; None where the completion holds no code."""
    return extract_code(completion, row["test_list"])[0] or None


def extract_code(completion: str, tests: list[str] | tuple[str, ...]) -> tuple[str, float]:
    """(code, format reward) of a completion.

    The code is the last fenced Python block that defines a name which the tests call, else the first fenced
    block; without any fence, the whole text (what stands between [BEGIN] and [DONE], where these are). A
    block that is not closed was cut and is no code. Common indentation is removed.
    """
    names = set().union(*(called_names(parse_test(test)) for test in tests))
    text = _normal(completion).partition("[DONE]")[0].rpartition("[BEGIN]")[2]
    if "```" not in text:
        code = textwrap.dedent(text)
        return code, 0.5 if _defined(code) & names else 0.0
    blocks = fenced_blocks(text)
    if not blocks:
        return "", 0.0
    code = next((block for block in reversed(blocks) if _defined(block) & names), blocks[0])
    return code, 0.25 if _parse(code) is None else 0.5


def fenced_blocks(text: str) -> list[str]:
    """The closed fenced blocks marked as Python or not marked; one pass, linear in the text (K9)."""
    blocks, position = [], text.find("```")
    while position >= 0:
        line_end = text.find("\n", position)
        if line_end < 0:
            break
        language = text[position + 3 : line_end].strip().lower()
        if "```" in language:  # code within one line
            position = text.find("```", text.find("```", position + 3) + 3)
            continue
        end = text.find("```", line_end)
        if end < 0:
            break
        if language in ("", "python", "py", "python3"):
            blocks.append(textwrap.dedent(text[line_end + 1 : end]))
        position = text.find("```", end + 3)
    return blocks


def _normal(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _question(row: dict) -> str:
    tests = "\n".join(row["test_list"])
    task = f"You are an expert Python programmer, and here is your task: {row['text']}"
    return f"{task} Your code should pass these tests:\n\n{tests}"


def _parse(code: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in a model's strings
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _defined(code: str) -> set[str]:
    """Names that the code binds anywhere; none where it does not parse."""
    names = set()
    for node in ast.walk(_parse(code) or ast.Module([], [])):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias():
                names.add(node.asname or node.name)
    return names


def _check_row(row: dict, where: str):
    kinds = {"task_id": int, "text": str, "code": str, "test_list": list}
    for field, kind in kinds.items():
        if type(row[field]) is not kind:
            raise ValueError(
                f"{where}: {field} must be of type {kind.__name__}, got {type(row[field]).__name__}"
            )
    if not row["test_list"] or not all(isinstance(test, str) for test in row["test_list"]):
        raise ValueError(f"{where}: test_list must hold assert statements")
    if not isinstance(row.get("test_setup_code") or "", str):
        raise ValueError(f"{where}: test_setup_code must be of type str")
    for test in row["test_list"]:
        try:
            parse_test(test)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
