"""How much a token counts in an update of RebRL, by when it is revealed: measured, and in closed form.

    python -m eval.report credit                     # the figure, on the built-in world
    python -m eval.report credit --mu 12 --gamma 0.2 # any flag of rebrl.py

Beside it the exploration potential of a timestep: how much the reward of the predicted picture changes there.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import rebrl
import samplers
from common import generator, times
from eval.report import picture

NAMES = {"none": "none (UniGRPO)", "first": "first order", "second": "second order", "token": "token (RebRL)"}


def closed_form(rebalance: str, t: list[float]) -> np.ndarray:
    """Weight [mu] of a token revealed at t_j under nested masks: sum over j' >= j of lambda(t_j') / t_j', and
    1 whatever j for ``token``. With t_j = j/mu: mu sum 1/j' | mu - j + 1 | sum j'/mu | 1.

    RebRL prints the middle two in shares, 1 - j/mu and sum_{j'>=j} j' / sum j'; its 1 - j/mu counts j' > j.
    """
    if rebalance == "token":
        return np.ones(len(t))
    return np.array([t_j ** rebrl.ORDER[rebalance] / t_j for t_j in t])[::-1].cumsum()[::-1]


def measured(
    args: argparse.Namespace, L: int = 1024, factor: Callable[[Tensor], Tensor | float] = lambda mask: 1.0
) -> tuple[Tensor, Tensor]:
    """(j - 1, weight) [G, L] of each token of a group: the first t_j at which it is masked, and
    d(sum_j J_j) / d log p_k at frozen weights and ratio 1, per unit advantage, times the G L of the mean.

    ``args`` are flags of rebrl.py. J_j is multiplied by ``factor(mask [G, L])``, to try another normaliser.
    """
    G, t = args.group_size, times(args.mu, args.gamma)
    revealed = torch.rand(G, L, generator=generator("revealed", args.seed)).argsort(-1)
    masked = torch.stack([rebrl.masked_at(args, j, 0, list(range(G)), revealed) for j in range(args.mu)])
    weight = rebrl.credit(args.rebalance, masked, t) / (G * L)
    A = torch.tensor([(-1.0) ** i * (i + 1) for i in range(G)])
    log_p = torch.full((G, L), math.log(0.5), requires_grad=True)
    for j, mask in enumerate(masked):
        now = log_p[mask]
        loss, _ = rebrl.objective(now, now.detach(), None, mask, A, weight[j], args)
        (loss * factor(mask)).backward()
    return masked.int().argmax(0), -log_p.grad / A[:, None] * G * L


def by_time(args: argparse.Namespace) -> np.ndarray:
    """The measured weights, their mean over the tokens revealed at each t_j: [mu]."""
    j, weight = measured(args)
    return np.array([weight[j == n].mean().item() for n in range(args.mu)])


@torch.no_grad()
def potential(policy, task, rows: list[dict], args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """(t [T + 1], reward [T + 1]) along rollouts of the prompts of rows, at each share t of masked tokens.

    The reward, as ``task`` weighs it, is that of the most likely picture: what is masked filled in by argmax.
    """
    settings = samplers.settings_of(args, policy.length)
    total, ts = 0.0, []
    for i in range(0, len(rows), args.micro_batch):
        part = rows[i : i + args.micro_batch]
        prompt = policy.encode([row["prompt"] for row in part])
        noise = [generator("potential", args.seed, i + n) for n in range(len(part))]
        out = samplers.sample(policy, prompt, noise, settings, keep_trajectory=True)
        null = policy.unconditional(prompt) if args.cfg else None
        ts, rewards = [], []
        for x_t, t in [*out.trajectory, (out.x_0, 0.0)]:
            where = x_t == policy.mask_id
            logits = policy(prompt, x_t, where=where, null=null, cfg=args.cfg)
            components = task.reward(part, list(policy.decode(x_t.masked_scatter(where, logits.argmax(-1)))))
            rewards.append(sum(w * np.sum(components[name]) for name, w in task.weights.items()))
            ts.append(t)
        total = total + np.array(rewards)
    return np.array(ts), total / len(rows)


def draw(args: argparse.Namespace, rollouts: tuple[np.ndarray, np.ndarray] | None, path: Path) -> None:
    """Weight against reveal time, and of ``rollouts`` (t, reward) the gain between times, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    t = times(args.mu, args.gamma)
    figure, axes = plt.subplots(
        1, 1 + bool(rollouts), figsize=(5.2 * (1 + bool(rollouts)), 3.6), squeeze=False
    )
    axis = axes[0, 0]
    for i, (rebalance, name) in enumerate(NAMES.items()):
        args.rebalance = rebalance
        axis.plot(t, closed_form(rebalance, t), color=f"C{i}", linewidth=1, label=name)
        axis.plot(t, by_time(args), "o", color=f"C{i}", markersize=5)
    axis.set(
        yscale="log", ylabel="accumulated weight (1 at t = 1)", title="line: closed form, dots: measured"
    )
    axis.legend(fontsize=8, frameon=False)
    if rollouts:
        at, reward = rollouts
        axes[0, 1].bar(at[1:], np.diff(reward), width=at[:-1] - at[1:], align="edge", edgecolor="white")
        axes[0, 1].axhline(0, color="black", linewidth=0.5)
        axes[0, 1].set(ylabel="reward change", title="exploration potential")
    for axis in axes[0]:
        axis.set(xlabel="t at which a token is revealed (generation goes right)", xlim=(1.05, 0))
        axis.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(args: argparse.Namespace) -> str:
    """Markdown: closed form and measured weight at each t_j, a row a way of rebalancing."""
    t = times(args.mu, args.gamma)
    lines = ["| rebalance | " + " | ".join(f"t = {t_j:.3g}" for t_j in t) + " |", "|---" * (len(t) + 1) + "|"]
    for rebalance in NAMES:
        args.rebalance = rebalance
        cells = zip(closed_form(rebalance, t), by_time(args), strict=True)
        lines.append(f"| {rebalance} | " + " | ".join(f"{c:.3f} ({m:.3f})" for c, m in cells) + " |")
    return "closed form (measured)\n\n" + "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "eval.report credit",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=picture, default="credit.png", help="the picture to write")
    parser.add_argument("--no-rollouts", action="store_true", help="the weights alone: no model is loaded")
    own, rest = parser.parse_known_args(argv)
    args = rebrl.flags(["--mu", "8", *rest])
    rollouts = None
    if not own.no_rollouts:
        from common import start_processes
        from eval.task import load_task
        from flags import one_sentence
        from scale import load_policy

        with one_sentence():
            task = load_task(args.task, args.protocol)
            policy, _ = load_policy(args, start_processes(), task)
            rows = task.rows("test", args.data)[: args.eval_prompts or None]
            rollouts = potential(policy, task, rows, args)
        print("t        reward of the predicted picture")
        print("\n".join(f"{t:.3f}    {r:.4f}" for t, r in zip(*rollouts, strict=True)))
    print(table(args))
    draw(args, rollouts, own.out)
    print(f"figure: {own.out}")
