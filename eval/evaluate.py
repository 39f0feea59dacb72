"""Score a policy on a task: the same sampler as in training, every item once, sharded over the processes."""

from dataclasses import dataclass

import numpy as np
import torch

import samplers
from common import World, end_of_text, generator


@dataclass
class Scored:
    """summary: score, se, n, the mean of each component, length; parts: each component [n]; completions: this
    rank's, of the items ``mine``."""

    summary: dict
    parts: dict[str, np.ndarray]
    completions: list
    mine: list[int]


def evaluate(
    policy, task, rows: list[dict], settings: dict, *, seed: int, world: World, micro_batch: int
) -> Scored:
    """One completion of each row. Item i has a generator of its own, so any number of processes gives the
    same."""
    mine, _ = world.share(len(rows))
    prompts = policy.encode([r["prompt"] for r in rows])
    completions, lengths = [], []
    for i in range(0, len(mine), micro_batch):
        index = mine[i : i + micro_batch]
        noise = [generator("eval", seed, n) for n in index]
        out = samplers.sample(policy, prompts[index], noise, settings)
        completions += list(policy.decode(out.x_0))
        lengths.append(end_of_text(out.x_0, policy.end_ids))
    parts = task.reward([rows[n] for n in mine], completions)
    parts = {k: world.gather(torch.as_tensor(v), len(rows)).numpy() for k, v in parts.items()}
    score, se = mean_and_error(parts[task.score], [r.get(task.category) for r in rows])
    means = {k: float(v.mean()) for k, v in parts.items()}
    length = world.gather(torch.cat(lengths), len(rows)).double().mean().item()
    return Scored(
        {"score": score, "se": se, "n": len(rows), **means, "length": length}, parts, completions, mine
    )


def mean_and_error(values: np.ndarray, categories: list) -> tuple[float, float]:
    """Mean over categories of their means (one category: the plain mean), and its standard error."""
    in_category = [values[[c == name for c in categories]] for name in dict.fromkeys(categories)]
    variance = sum(v.var(ddof=1) / len(v) if len(v) > 1 else 0.0 for v in in_category)
    return float(np.mean([v.mean() for v in in_category])), float(np.sqrt(variance) / len(in_category))


def evaluate_run(run, step: int, policy, task, rows: list[dict], settings: dict, args) -> None:
    """When an evaluation is due after ``step`` iterations: score the held-out prompts greedily and sampled,
    write samples.

    A resumed run scores what is missing of a step, and nothing twice.
    """
    if step not in (0, args.iterations) and not (args.eval_every and step % args.eval_every == 0):
        return
    from eval.gallery import write_samples

    rows, scored = rows[: args.eval_prompts or None], None
    done = {s["mode"] for s in run.scores() if s["step"] == step}
    for mode, temperature in (("greedy", 0.0), ("sampled", args.temperature)):
        if run.world.any(mode in done):
            continue
        chosen = settings | {"temperature": temperature, "steps": args.eval_steps or settings["steps"]}
        scored = evaluate(
            policy, task, rows, chosen, seed=args.seed, world=run.world, micro_batch=args.micro_batch
        )
        run.score(step, task.name, mode, scored.summary)
    if scored and run.world.rank == 0:
        shown = scored.mine[:16]
        write_samples(
            run.dir / "samples" / f"step_{step:06d}",
            [rows[n]["prompt"] for n in shown],
            scored.completions[: len(shown)],
            scored.parts[task.score][shown].tolist(),
        )
