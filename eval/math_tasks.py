"""What GSM8K and MATH share: the wording of the public prompts, protocols, and a reward of terms."""

import functools
from collections.abc import Callable

import numpy as np

from eval.task import Task

PROTOCOLS = ("d1", "maskgrpo", "llada")
# What both public recipes ask for; their line feeds differ from task to task.
EXPERT = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{}."
)
D1_TRAIN = """
Respond in the following format:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""
D1_TEST = r"""
Respond in the following format:
<reasoning>
Your reasoning here
</reasoning>
<answer>
\boxed{...}
</answer>"""
MASKGRPO = r"""
Respond in the following format:
<reasoning>
Your reasoning here
</reasoning>
\boxed{...}"""
Terms = Callable[[str, str], dict[str, float]]  # (completion, gold answer) -> component of the reward


def math_task(
    name: str,
    protocol: str | None,
    presets: dict[str | None, tuple[Terms, dict[str, float], str]],
    rows: Callable[[str, str | None, str], list[dict]],
    gold: Callable[[dict], str],
) -> Task:
    """A task under one of its protocols (None: d1's prompts, our reward); ValueError for an unknown one.

    presets: protocol -> terms, their default weights, and the one that is the score; ``rows(split, data,
    protocol)``; ``gold(row)``.
    """
    if protocol not in (None, *PROTOCOLS):
        raise ValueError(f"--protocol {protocol}: {name} accepts {', '.join(PROTOCOLS)}")
    terms, weights, score = presets[protocol]
    return Task(
        name=name,
        modality="text",
        rows=functools.partial(rows, protocol=protocol or PROTOCOLS[0]),
        reward=functools.partial(_reward, terms=terms, gold=gold),
        weights=weights,
        score=score,
    )


def _reward(
    rows: list[dict], completions: list[str], terms: Terms, gold: Callable[[dict], str]
) -> dict[str, np.ndarray]:
    """Each term as one float array [n]."""
    scores = [terms(completion, gold(row)) for completion, row in zip(completions, rows, strict=True)]
    return {name: np.array([score[name] for score in scores], float) for name in terms("", "0")}
