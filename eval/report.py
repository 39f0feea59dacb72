"""Curves and tables of runs: ``python -m eval.report runs/a_s0 runs/a_s1 runs/b_s0``.

Runs that differ in the seed alone are one line, with a band from the lowest to the highest seed.
``python -m eval.report credit`` draws RebRL's credit of timesteps instead (eval/credit.py), ``python -m
eval.report udm RUN...`` the diagnostics of UDM-GRPO (eval/udm_diagnostics.py).
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

from flags import one_sentence
from models.weights import read_json
from run import read_log

NOT_COMPARED = {"seed", "out", "track", "dry_run", "resume"}  # flags in which runs of one line may differ


def read(run: Path) -> tuple[dict, list[dict], list[dict]]:
    """(config, metrics, scores) of a run directory; ValueError where it holds none, or damaged ones."""
    if not (run / "config.json").exists():
        raise ValueError(f"{run}: no run in there (config.json is missing)")
    config = read_json(run / "config.json")
    if "name" not in config:
        raise ValueError(f"{run}: no run in there (config.json is of something else)")
    return config, read_log(run / "metrics.jsonl"), read_log(run / "eval.jsonl")


def groups(runs: list[Path]) -> dict[str, list[Path]]:
    """Runs that differ in the seed alone, under a name made of the flags in which the groups differ."""
    configs = {run: {k: v for k, v in read(run)[0].items() if k not in NOT_COMPARED} for run in runs}
    differing = sorted(
        k
        for k in {k for c in configs.values() for k in c}
        if len({json.dumps(c.get(k)) for c in configs.values()}) > 1
    )
    named = {}
    for run, config in configs.items():
        name = ", ".join(f"{k.replace('_', '-')} {config.get(k)}" for k in differing) or config["name"]
        named.setdefault(name, []).append(run)
    return named


def series(runs: list[Path], key: str, mode: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(steps [n], values [runs, n]) of a metric, or with ``mode`` of the scores in eval.jsonl, at the steps
    all runs have."""
    tables = []
    for run in runs:
        _, metrics, scores = read(run)
        rows = [r for r in scores if r.get("mode") == mode] if mode else metrics
        tables.append({r["step"]: r[key] for r in rows if key in r})
    steps = sorted(set.intersection(*(set(t) for t in tables)))
    return np.array(steps), np.array([[t[s] for s in steps] for t in tables])


PANELS = {
    "held-out score": [("score", "sampled", "-"), ("score", "greedy", "--")],
    "reward of the rollouts": [("reward/mean", None, "-")],
    "KL to the reference": [("kl", None, "-")],
    "loss": [("loss", None, "-")],
}


def draw(named: dict[str, list[Path]], path: Path) -> bool:
    """A PNG of the panels for which there are numbers: a line a group, with a band over its seeds. False
    where there are none, and nothing is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = {}  # title -> lines (label, colour, style, steps, values)
    for title, keys in PANELS.items():
        found[title] = [
            (
                mode if len(named) == 1 else name if style == "-" else None,
                f"C{i}",
                style,
                *series(runs, key, mode),
            )
            for key, mode, style in keys
            for i, (name, runs) in enumerate(named.items())
        ]
    if len(named) == 1:
        (runs,) = named.values()
        found["each reward, held out"] = [
            (key, f"C{i}", "-", *series(runs, key, "sampled")) for i, key in enumerate(components(runs[0]))
        ]
    found = {title: lines for title, lines in found.items() if any(len(line[3]) for line in lines)}
    if not found:
        return False
    figure, axes = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.4), squeeze=False)
    for axis, (title, lines) in zip(axes[0], found.items(), strict=True):
        for label, colour, style, steps, values in lines:
            axis.plot(steps, values.mean(0), style, color=colour, label=label)
            axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
        axis.set(title=title, xlabel="iteration")
        axis.grid(alpha=0.25)
        if any(axis.get_legend_handles_labels()[1]):
            axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def components(run: Path) -> list[str]:
    """The rewards of a run's evaluations, trained or only measured, where there is more than one."""
    scores = read(run)[2]
    known = {"step", "task", "mode", "score", "se", "n", "length"}
    names = [k for k in scores[0] if k not in known] if scores else []
    return names if len(names) > 1 else []


def table(named: dict[str, list[Path]]) -> str:
    """Markdown: score of the base and after, sampled and greedy, mean and range over seeds; last KL."""
    lines = ["| run | seeds | sampled | greedy | KL at the end |", "|---|---|---|---|---|"]
    for name, runs in named.items():
        cells = []
        for mode in ("sampled", "greedy"):
            steps, values = series(runs, "score", mode)
            cells.append(f"{spread(values[:, 0])} -> {spread(values[:, -1])}" if len(steps) else "-")
        steps, kl = series(runs, "kl")
        lines.append(
            f"| {name} | {len(runs)} | {' | '.join(cells)} | {kl[:, -1].mean():.4f} |"
            if len(steps)
            else f"| {name} | {len(runs)} | {' | '.join(cells)} | - |"
        )
    return "\n".join(lines)


def picture(name: str) -> Path:
    """The file of a figure, as argparse's type: its directory is made; what cannot be written is refused."""
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{error.filename}: {error.strerror}") from None
    if path.suffix != ".png" or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name}: must be a .png in a directory that can be written to")
    return path


def spread(values: np.ndarray) -> str:
    mean = f"{values.mean():.3f}"
    return mean if len(values) == 1 else f"{mean} ({values.min():.3f}-{values.max():.3f})"


def main() -> None:
    if sys.argv[1:2] == ["credit"]:
        from eval import credit

        return credit.main(sys.argv[2:])
    if sys.argv[1:2] == ["udm"]:
        from eval import udm_diagnostics

        return udm_diagnostics.main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        "eval.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--out", type=picture, default="curve.png", help="the picture to write")
    args = parser.parse_args()
    with one_sentence():
        named = groups(args.runs)
    print(table(named))
    print(f"curves: {args.out}" if draw(named, args.out) else "no curves: the logs are empty so far")


if __name__ == "__main__":
    main()
