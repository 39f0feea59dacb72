"""Score a policy on a task: the same sampler as in training, every item once, sharded over the processes."""

import numpy as np
import torch

import samplers
from common import World, end_of_text, generator


def evaluate(policy, task, rows: list[dict], settings: dict, *, seed: int, world: World, micro_batch: int) -> tuple[dict, list]:
    """({"score", "se", "n", a mean for each component, "length"}, this rank's completions).

    Sample i has a generator of its own, so the result is the same for any number of processes.
    """
    mine, weights = world.share(len(rows))
    prompts = policy.encode([r["prompt"] for r in rows])
    completions, lengths = [], []
    for i in range(0, len(mine), micro_batch):
        index = mine[i : i + micro_batch]
        out = samplers.sample(policy, prompts[index], [generator("eval", seed, n) for n in index], settings)
        completions += list(policy.decode(out.x_0))
        lengths.append(end_of_text(out.x_0, policy.end_ids))
    parts = task.reward([rows[n] for n in mine], completions)
    parts = {k: world.gather(torch.as_tensor(v), len(rows)).numpy() for k, v in parts.items()}
    length = world.gather(torch.cat(lengths), len(rows)).float().mean().item()
    score, se = mean_and_error(parts[task.score], [r.get(task.category) for r in rows])
    means = {k: float(v.mean()) for k, v in parts.items()}
    return {"score": score, "se": se, "n": len(rows), **means, "length": length}, completions


def mean_and_error(values: np.ndarray, categories: list) -> tuple[float, float]:
    """Mean over categories of their means (one category: the plain mean), and its standard error."""
    groups = [values[[c == name for c in categories]] for name in dict.fromkeys(categories)]
    variance = sum(g.var(ddof=1) / len(g) if len(g) > 1 else 0.0 for g in groups)
    return float(np.mean([g.mean() for g in groups])), float(np.sqrt(variance) / len(groups))
