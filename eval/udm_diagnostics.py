"""What UDM-GRPO argues from: how sure the prediction is in the states that are trained, and how far these are
from the states that the base was trained on.

``python -m eval.report udm RUN...`` draws both by timestep, and KL and clip share over training.

The paper measures the distance as FID. On the built-in world it is a total variation: the share of the 36
pairs of colours of neighbouring cells, counted over the states at t, against the share in the states x_t ~
p_t(x | x_1) of the base's own pictures x_1, which is exact, without a draw. A few states differ from it by
chance alone: "training" is the distance of as many true training states, the zero of the scale. Forward
states are noised clean samples, and noise brings distributions closer: they are never farther than those are.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import samplers
from common import World, generator
from eval.report import groups, picture, read, series, spread
from flags import one_sentence

TRAJECTORIES = ("backward", "forward")
PICTURES = 2000  # of the base's training data, for its share of pairs


@torch.no_grad()
def entropy(policy, prompt, x_t: Tensor, null=None, w: float = 0.0) -> Tensor:
    """Entropy of p(x_1^k | x_t, c) in nats, averaged over the tokens: [B], within 0..log K."""
    logits = policy(prompt, x_t, null=null, cfg=w)  # [B L, K]
    rows = max(1, samplers.CHUNK // logits.shape[-1])
    parts = [torch.distributions.Categorical(logits=z).entropy() for z in logits.split(rows)]
    return torch.cat(parts).view(x_t.shape).mean(-1)


class TrainingStates:
    """The states that the base of tiny-geneval was trained on, by the colours of neighbouring cells."""

    def __init__(self, policy, path):
        from eval.tiny_geneval import COLOURS, SIDE, SLOTS, base_rows

        self.path, self.side, self.n = path, SIDE, 1 + len(COLOURS)
        self.x_1 = policy.respond([row["completion"] for row in base_rows(PICTURES, 0)])
        colour = {n: COLOURS.index(c) + 1 for (_, c), patches in SLOTS.items() if c for n in patches.tolist()}
        variants = policy.vocab_size // (1 + len(colour))
        of_code = [colour.get(k // variants, 0) for k in range(policy.vocab_size)]
        self.colour = torch.tensor(of_code, device=self.x_1.device)  # [K]; 0 is background
        self.pairs = pair_counts(self.x_1, self.side, len(self.colour))
        self.pairs /= self.pairs.sum()

    def share(self, t: float) -> Tensor:
        """Probability [36] of each pair of colours at t: p_t(x | x_1) p_t(y | y_1), averaged over the pairs
        (x_1, y_1) of the pictures."""
        codes = torch.arange(len(self.colour), device=self.colour.device)
        p = self.path.probability(codes, t).double()  # [x_1, x]
        lumped = p.new_zeros(len(codes), self.n).index_add(1, self.colour, p)
        return (lumped.T @ self.pairs @ lumped).flatten()

    def counts(self, x_t: Tensor) -> Tensor:
        """How often each pair of colours [36] is in states x_t [B, L]."""
        return pair_counts(self.colour[x_t], self.side, self.n).flatten()

    def drawn(self, n: int, t: float) -> Tensor:
        """n states at t [n, L] of pictures drawn from the training data."""
        g = generator("training states", n, t)
        x_1 = self.x_1[torch.randint(len(self.x_1), (n,), generator=g)]
        return self.path.corrupt(x_1, t, torch.rand(x_1.shape, generator=g).to(x_1.device))


def training_states(policy, task, path) -> TrainingStates | None:
    """None where the pictures that the base was trained on are not known."""
    built_in = str(getattr(getattr(policy, "vq", None), "source", "")).startswith("tiny")
    return TrainingStates(policy, path) if built_in and task.name == "tiny-geneval" else None


def pair_counts(x: Tensor, side: int, K: int) -> Tensor:
    """[K, K] float64: how often values stand side by side or one above the other in grids x [B, side^2]."""
    grid = x.view(-1, side, side)
    first = torch.cat([grid[:, :, :-1].flatten(), grid[:, :-1].flatten()])
    second = torch.cat([grid[:, :, 1:].flatten(), grid[:, 1:].flatten()])
    return torch.bincount(first * K + second, minlength=K * K).view(K, K).double()


def total_variation(counts: Tensor, share: Tensor) -> float:
    """Half the sum of absolute differences between normalised counts and shares: within 0..1."""
    return (counts / counts.sum() - share).abs().sum().item() / 2


def diagnose(
    policy, prompt, null, w: list[float], batches: list[slice], state_at: Callable[[str, int, float], Tensor],
    times: list[float], training: TrainingStates | None, real: Tensor, world: World,
) -> dict[str, float]:  # fmt: skip
    """Metrics ``entropy/<trajectory>/<t>`` and, with ``training``, ``distance/<trajectory>/<t>``.

    state_at(trajectory, k, t): x_t [B, L] at the k-th of ``times``, where guidance is w; real [B]: 0 for
    padding.
    """
    found = {}
    n = world.sum(real.sum())[0]
    for name in TRAJECTORIES:
        for k, (t, w_t) in enumerate(zip(times, w, strict=True)):
            x_t = state_at(name, k, t)
            h = [entropy(policy, prompt[b], x_t[b], None if null is None else null[b], w_t) for b in batches]
            found[f"entropy/{name}/{t:.3f}"] = world.sum((torch.cat(h) * real).sum())[0] / n
            if training:
                counts = world.sum(training.counts(x_t[real > 0]))[0]
                counts = torch.tensor(counts, dtype=torch.float64, device=x_t.device)
                found[f"distance/{name}/{t:.3f}"] = total_variation(counts, training.share(t))
    for t in times if training else ():
        chance = training.counts(training.drawn(int(n), t))
        found[f"distance/training/{t:.3f}"] = total_variation(chance, training.share(t))
    return found


# ---- The figure and the table


def profile(runs: list[Path], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(times [n], values [n] in the first and in the last iteration that measured) of ``name``, such as
    ``entropy/forward``, averaged over the runs."""
    keys = sorted({key for run in runs for row in read(run)[1] for key in row if key.startswith(f"{name}/")})
    values = [series(runs, key)[1].mean(0) for key in keys]
    times = [float(key.rpartition("/")[2]) for key in keys]
    return np.array(times), np.array([v[0] for v in values]), np.array([v[-1] for v in values])


def draw(named: dict[str, list[Path]], path: Path) -> None:
    """Entropy and distance by timestep, KL and clip share over training, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(17, 3.6))
    for i, (name, runs) in enumerate(named.items()):
        for trajectory, style in zip((*TRAJECTORIES, "training"), ("-", "--", ":"), strict=True):
            for axis, measure in zip(axes, ("entropy", "distance"), strict=False):
                times, first, last = profile(runs, f"{measure}/{trajectory}")
                if trajectory == "training":  # the same in every run: once, in grey
                    if i == 0 and len(times):
                        axis.plot(times, last, style, color="grey", label="true training states")
                    continue
                label = trajectory if len(named) == 1 else f"{name}: {trajectory}"
                axis.plot(times, last, style, color=f"C{i}", label=label)
                if len(named) == 1:
                    axis.plot(times, first, style, color="C7", alpha=0.6, label=f"{trajectory}, base")
        for axis, key in zip(axes[2:], ("kl_token", "clip_fraction"), strict=True):
            steps, values = series(runs, key)
            axis.plot(steps, values.mean(0), color=f"C{i}", label=name)
            axis.fill_between(steps, values.min(0), values.max(0), color=f"C{i}", alpha=0.2, linewidth=0)
    titles = ("entropy of the prediction", "distance from training states", "KL, k3 of tokens", "clip share")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="t" if axis in axes[:2] else "iteration")
        axis.grid(alpha=0.25)
        if any(axis.get_legend_handles_labels()[1]):
            axis.legend(fontsize=6, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(named: dict[str, list[Path]]) -> str:
    """Markdown: held-out score of the base, the best and the last (a collapse parts the two), KL of either
    kind, clip share, and the distances averaged over t, at the end."""
    heads = "run, seeds, base, best, end, KL of tokens, KL of means, clip share, backward, forward, chance"
    lines = [f"| {heads.replace(', ', ' | ')} |", "|---" * 11 + "|"]
    for name, runs in named.items():
        scores = series(runs, "score", "sampled")[1]
        ends = [series(runs, key)[1][:, -1].mean() for key in ("kl_token", "kl_mean")]
        clipped = series(runs, "clip_fraction")[1].mean()
        far = [profile(runs, f"distance/{kind}")[2] for kind in (*TRAJECTORIES, "training")]
        cells = (
            [*(spread(s) for s in (scores[:, 0], scores.max(1), scores[:, -1]))] if scores.size else ["-"] * 3
        )
        cells += (
            [f"{v:.4f}" for v in ends]
            + [f"{clipped:.3f}"]
            + [f"{v.mean():.3f}" if len(v) else "-" for v in far]
        )
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "eval.report udm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories of udm_grpo.py")
    parser.add_argument("--out", type=picture, default="udm.png", help="the picture to write")
    args = parser.parse_args(argv)
    with one_sentence():
        named = groups(args.runs)
        if strangers := [str(run) for run in args.runs if read(run)[0]["name"] != "udm_grpo"]:
            raise ValueError(f"{', '.join(strangers)}: no run of udm_grpo.py")
        for name, of_name in named.items():
            if not len(series(of_name, "kl_token")[0]):
                raise ValueError(f"{name}: no iteration is logged that all {len(of_name)} of its runs have")
    print(table(named))
    draw(named, args.out)
    print(f"figure: {args.out}")
