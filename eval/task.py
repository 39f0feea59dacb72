"""What a task is: prompts, a reward, and which of its components is the score."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np

from common import import_file


@dataclass(frozen=True)
class Task:
    """A data set with its reward, kept together so that the prompt asks for what the reward counts.

    ``rows(split, data)`` returns a list of dictionaries, each with a ``"prompt"``; split is ``"train"`` or
    ``"test"``, data an optional path in place of the task's own source. ``reward(rows, completions)`` returns
    one float array [n] a component; a completion is a string (cut at its end of text) or a uint8 image [3, H,
    W].
    """

    name: str
    modality: str  # "text" or "image"
    rows: Callable[[str, str | None], list[dict]]
    reward: Callable[[list[dict], list], dict[str, np.ndarray]]
    weights: dict[str, float]  # the default --reward
    score: str  # the component, within 0..1, that is reported as the score
    category: str | None = None  # row key: the score is the mean over categories of their means


def load_task(name: str, protocol: str | None = None, unsafe_exec: bool = False) -> Task:
    """The task ``eval/<name>.py``; ``path/to/file.py`` loads a task of your own. ``unsafe_exec``: code of the
    model runs without isolation, for a task that runs any.

    Raises ValueError when there is no such task, when the task has no such protocol, or when it is none; its
    ``rows`` does so for rows without a prompt, and where there are none.
    """
    make = task_module(name).task
    signature = inspect.signature(make)
    try:
        signature.bind(protocol)
    except TypeError as error:
        raise ValueError(f"--task {name}: task() must take one argument, the protocol ({error})") from None
    if unsafe_exec and "unsafe_exec" not in signature.parameters:
        raise ValueError(f"--unsafe-exec: --task {name} runs no code")
    task = make(protocol, unsafe_exec=True) if unsafe_exec else make(protocol)
    if not isinstance(task, Task):
        raise ValueError(f"--task {name}: task() gives a {type(task).__name__}, no eval.task.Task")

    def rows(split: str, data: str | None = None) -> list[dict]:
        found = task.rows(split, data)
        if not isinstance(found, list) or not found:
            raise ValueError(f"--task {name}: rows({split!r}) must give a list with at least one row")
        for i, row in enumerate(found):
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError(
                    f"--task {name}: rows({split!r})[{i}] is no dictionary with a text as prompt"
                )
        return found

    return replace(task, rows=rows)


def task_module(name: str) -> ModuleType:
    """The module of a task; ValueError when there is none."""
    if name.endswith(".py"):
        return import_file(name, "--task", "task")
    module_name = "eval." + name.replace("-", "_")
    if name not in TASKS or importlib.util.find_spec(module_name) is None:
        raise ValueError(f"--task {name}: unknown; accepted: {', '.join(TASKS)}, or a path to a .py file")
    return importlib.import_module(module_name)


TASKS = ("tiny-math", "tiny-geneval", "gsm8k", "math500", "mbpp", "geneval", "dpg", "ocr", "captions")
