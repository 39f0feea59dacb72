"""Rewards by name, each logged apart, summed with weights: ``--reward hpsv3=1,clip=0.5,http://host:8000/ocr=1``."""

import importlib
import math
import warnings
from collections.abc import Callable

import numpy as np

from common import import_file
from eval.reward_client import RewardClient, RewardServersDown
from eval.task import Task

Score = Callable[[list[dict], list], dict[str, np.ndarray]]

URL = ("http://", "https://")
# Rewards of pictures: name -> module of eval, and after a colon its function where that is not `reward`.
REWARDS = {
    "clip": "clip_score",
    "pickscore": "pickscore",
    "imagereward": "imagereward",
    "hpsv3": "hpsv3",
    "unified": "unified",
    "deqa": "deqa",
    "geneval": "geneval",
    "geneval_dense": "geneval:dense_reward",
    "ocr": "ocr",
    "edges": "image_statistics",
}


def parse_rewards(spec: str) -> list[tuple[str, float]]:
    """``"a=2,b"`` -> ``[("a", 2.0), ("b", 1.0)]``: split at commas, weight after the last ``=``, 1 by
    default.

    Weight 0 makes a held-out metric: measured and logged, not trained on. Raises ValueError for an empty or
    repeated name and for a weight that is not a finite number.
    """
    rewards = []
    for part in spec.split(","):
        name, separator, weight = part.strip().rpartition("=")
        name, weight = (name.strip(), weight) if separator else (weight, "1")
        if not name:
            raise ValueError(f"--reward {spec!r}: empty name; accepted: name=weight, separated by commas")
        if name in dict(rewards):
            raise ValueError(f"--reward {spec!r}: {name} is named twice; name each reward once")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(
                f"--reward {part.strip()}: weight {weight!r} is not a number; accepted: {name}=0.5"
            )
        rewards.append((name, value))
    return rewards


def short_name(name: str) -> str:
    """The component that a reward must answer: ``clip`` of ``clip``, ``red`` of ``path/to/file.py:red``."""
    return name.rpartition(":")[2]


def load_reward(name: str, device: str = "cpu") -> Score:
    """The scoring function of a name in REWARDS (its weights are loaded here), or of
    ``path/to/file.py:function``.

    A custom function is itself ``function(rows, completions) -> {"function": n floats}``. Raises ValueError
    for an unknown name, a missing file or function.
    """
    if name in REWARDS:
        module, _, function = REWARDS[name].partition(":")
        return getattr(importlib.import_module(f"eval.{module}"), function or "reward")(device)
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(
            f"--reward {name}: unknown; accepted: {', '.join(REWARDS)}, path/to/file.py:function"
        )
    return getattr(import_file(path, "--reward", function), function)


def as_scores(values, n: int) -> np.ndarray:
    """n plain numbers (list, array, or tensor on any device) as float64 [n], NaN in place of None.

    Raises TypeError for anything else, such as another length or shape.
    """
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    scores = np.array([math.nan if value is None else value for value in values])
    if scores.shape != (n,) or scores.dtype.kind not in "biuf":
        raise TypeError(f"{n} numbers expected, got shape {scores.shape} of {scores.dtype}")
    return scores.astype(np.float64)


class Rewards:
    """The components of ``spec`` (default: the task's weights) and, logged beside them, all others of the
    task. A task whose reward has models to load, by ``reward.load()`` (GenEval's detector), is asked only if
    ``spec`` names one of its components, and then they are loaded at once.

    A name means a component of the task, else a reward of REWARDS, a URL of a reward server (several: with
    ``|`` between them), or ``path/to/file.py:function``. A reward that raises, or answers with another number
    of scores, scores 0 for that call and adds 1 to ``errors``; so does each score that is None, NaN or
    infinite. With ``strict`` both raise. RewardServersDown always passes. Raises ValueError for an unknown
    name.
    """

    def __init__(
        self,
        task: Task,
        spec: str | None = None,
        *,
        strict: bool = False,
        device: str = "cpu",
        timeout: float = 120.0,
        token: str | None = None,
    ):
        named = dict(task.weights) if spec is None else dict(parse_rewards(spec))
        own = dict.fromkeys(filter(None, [*task.weights, task.score]))
        if any(_is_plain(name) and name not in own and name not in REWARDS for name in named):
            own.update(dict.fromkeys(_answered(task)))
        if not named:
            raise ValueError(f"--task {task.name} has no reward of its own: name one, as in --reward clip=1")
        for name in named:
            if name in own:
                continue
            if _is_plain(name) and name not in REWARDS:
                raise ValueError(
                    f"--reward {name}: unknown; accepted: {', '.join(own)} (of --task {task.name}), "
                    f"{', '.join(REWARDS)}, http://host:port/name, path/to/file.py:function"
                )
            if name in REWARDS and task.modality != "image":
                raise ValueError(f"--reward {name}: scores pictures, but --task {task.name} completes text")
        self.strict, self.errors = strict, 0
        self.weights: dict[str, float] = {}  # component -> weight
        # Name, function, and which of its answers must be there as which component.
        self._sources: list[tuple[str, Score, dict[str, str]]] = [("task", task.reward, {c: c for c in own})]
        self._extra: set[str] = set()  # components seen beyond these
        self._warned: set[str] = set()
        if load := getattr(task.reward, "load", None):
            if own.keys() & named.keys():
                load()
            else:
                own, self._sources = {}, []
        for name, weight in named.items():
            if name in own:
                self.weights[name] = weight
                continue
            if name.startswith(URL):
                score = RewardClient(name, timeout=timeout, token=token)
                answer = score.name
            else:
                score, answer = load_reward(name, device), short_name(name)
            component = name if answer in own or answer in self.weights else answer
            self.weights[component] = weight
            self._sources.append((name, score, {answer: component}))

    def components(self, rows: list[dict], completions: list) -> dict[str, np.ndarray]:
        """Every component, float64 [n], n = len(rows) = len(completions).

        The named ones and those of the task's weights are always there, also for n = 0, and stand first, in
        one order; the others follow by name.
        """
        n = len(rows)
        if n != len(completions):
            raise ValueError(f"{n} rows for {len(completions)} completions")
        found, extra = {}, {}
        for name, score, wanted in self._sources:
            scores = self._answer(name, score, wanted, rows, completions)
            found.update({component: scores.pop(key, np.zeros(n)) for key, component in wanted.items()})
            extra.update(scores)
        self._extra = (self._extra | extra.keys()) - found.keys()
        return found | {key: extra.get(key, np.zeros(n)) for key in sorted(self._extra)}

    def _answer(
        self, name: str, score: Score, wanted: dict[str, str], rows: list[dict], completions: list
    ) -> dict[str, np.ndarray]:
        n = len(rows)
        if n == 0:  # the shard of a process may be empty
            return {}
        try:
            answer = score(rows, completions)
            if not isinstance(answer, dict) or not wanted.keys() <= answer.keys():
                got = ", ".join(answer) if isinstance(answer, dict) else type(answer).__name__
                raise TypeError(f"a dictionary with {', '.join(wanted)} expected, got {got}")
            scores = {key: as_scores(values, n) for key, values in answer.items()}
        except RewardServersDown:
            raise
        except Exception as error:
            if self.strict:
                raise
            self._count(name, 1, f"{type(error).__name__}: {error}")
            return {}
        for key, values in scores.items():
            bad = int(n - np.isfinite(values).sum())
            if bad:
                fault = f"{bad} of {n} scores of {key} are None, NaN or infinite"
                if self.strict:
                    raise ValueError(f"--reward {name}: {fault}")
                self._count(name, bad, fault)
        return {key: np.where(np.isfinite(values), values, 0) for key, values in scores.items()}

    def _count(self, name: str, errors: int, fault: str):
        self.errors += errors
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"--reward {name}: {fault}; scored 0, counted in reward/errors", stacklevel=4)

    def total(
        self, components: dict[str, np.ndarray], group_size: int | None = None, normalize: bool = False
    ) -> np.ndarray:
        """The weighted sum, float64 [n]; ``normalize``: of each component brought to mean 0, std 1 in its
        group.

        A group is ``group_size`` neighbours; a component without spread in a group is 0 there.
        """
        total = np.zeros(len(next(iter(components.values()))))
        for name, weight in self.weights.items():
            values = components[name]
            if normalize:
                values = _normalized(values, group_size)
            total += weight * values
        return total


def _normalized(values: np.ndarray, group_size: int | None) -> np.ndarray:
    if not group_size or len(values) % group_size:
        raise ValueError(f"--reward-normalize: {len(values)} scores do not make groups of {group_size}")
    groups = values.reshape(-1, group_size)
    # Equal scores can have a rounding error for a standard deviation; the test on max and min is exact.
    spread = groups.max(1, keepdims=True) > groups.min(1, keepdims=True)
    std = np.where(spread, groups.std(1, keepdims=True), 1)
    return np.where(spread, (groups - groups.mean(1, keepdims=True)) / std, 0).reshape(-1)


def _is_plain(name: str) -> bool:
    return not name.startswith(URL) and ".py:" not in name


def _answered(task: Task) -> list[str]:
    """Components beyond the task's weights and score; a task that cannot tell them for no rows has none."""
    try:
        return list(task.reward([], []))
    except Exception:
        return []
