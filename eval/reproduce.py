"""The papers' ablations on the built-in worlds: rows of flags, several seeds each, one table.

    python -m eval.reproduce rebrl --seeds 3
    python -m eval.reproduce maskgrpo-text --seeds 3 --iterations 60     # flags of the script, for all rows

Each run is a process of its own with one thread, under runs/reproduce/<table>/<row>_s<seed>; a seed is one of
base and RL alike. What is there already is not run again, what was cut off is resumed; ``--only-table`` runs
nothing.
"""

import argparse
import importlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import World
from eval.report import draw, read, series, spread
from flags import check_ranges

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 6  # iterations over which the reward of rollouts is averaged


@dataclass(frozen=True)
class Table:
    """An ablation: the script, the flags of all rows, and what each row adds; the first is the baseline."""

    script: str
    flags: str
    rows: dict[str, str]


TABLES = {
    "rebrl": Table(
        "rebrl.py",
        "--task tiny-geneval",
        {name: f"--rebalance {name}" for name in ("none", "first", "second", "token")},
    ),
    "maskgrpo-text": Table(
        "maskgrpo.py",
        "--task tiny-math",
        {
            "diffu-GRPO": "--remask full --adv-std none --mask-seed batch",
            "+ managed randomness": "--remask full --adv-std none",
            "+ AR-like reversing": "--remask fading --gamma 0",
            "+ truncation (MaskGRPO)": "--remask fading --gamma 0.6",
            "TraceRL-style": "--remask trace --gamma 0",
        },
    ),
    "maskgrpo-image": Table(
        "maskgrpo.py",
        "--task tiny-geneval",
        {
            "UniGRPO": "--remask random --gamma 0 --sampler maskgit",
            "+ truncation": "--remask random --gamma 0.8 --sampler maskgit",
            "+ emerge sampler (MaskGRPO)": "--remask random --gamma 0.8 --sampler emerge",
        },
    ),
    "udm": Table(
        "udm_grpo.py",
        "--task tiny-geneval",
        {
            "naive (Flow-GRPO)": "--trajectory backward --action intermediate --cfg 0.5",
            "+ clean action": "--trajectory backward --action clean --cfg 0.5",
            "+ forward trajectory": "--trajectory forward --action clean --cfg 0.5",
            "+ CFG-Free (UDM-GRPO)": "--trajectory forward --action clean --cfg 0",
        },
    ),
}


def directory(root: Path, row: str, seed: int) -> Path:
    return root / f"{re.sub('[^A-Za-z0-9]+', '-', row).strip('-')}_s{seed}"


def train(table: Table, row: str, seed: int, base: Path | None, out: Path, more: list[str]) -> None:
    """One run, unless it is done. Raises RuntimeError with the last line of what it said where it fails."""
    if (out / "model").exists():
        return
    command = [sys.executable, table.script, *table.flags.split(), *table.rows[row].split(), *more]
    command += ["--model", str(base)] if base else []
    command += ["--seed", str(seed), "--out", str(out)] + ["--resume"] * (out / "checkpoints").exists()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    print(f"{' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{row}, seed {seed}: {done.stderr.strip().splitlines()[-1:]}")


def bases(table: Table, seeds: int, more: list[str]) -> list[Path | None]:
    """Of each seed the base of the built-in world, made where there is none; None with a --model."""
    from sft import base

    args = importlib.import_module(Path(table.script).stem).flags([*table.flags.split(), *more])
    if args.model.split(":")[0] != "tiny":
        return [None] * seeds
    world, path = World(0, 1, torch.device("cpu")), getattr(args, "path", None)
    return [base(args.task, args.model, world, path, seed).resolve() for seed in range(seeds)]


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean [runs, n] over the last WINDOW iterations, fewer at the start."""
    total = np.pad(values.cumsum(-1), ((0, 0), (1, 0)))
    last = np.arange(1, values.shape[-1] + 1)
    first = np.maximum(last - WINDOW, 0)
    return (total[:, last] - total[:, first]) / (last - first)


def markdown(runs: dict[str, list[Path]], target: float | None = None) -> str:
    """A row a line, mean (lowest-highest seed): reward of rollouts after a third, two thirds and all
    iterations, held-out score before and after, KL at the end (median of WINDOW iterations), and iterations
    until the reward, mean over seeds, is ``target``: by default what the first row ends with, to show how
    much sooner others are there.
    """
    reward = {row: smooth(series(of_row, "reward/mean")[1]) for row, of_row in runs.items()}
    if target is None:
        target = float(next(iter(reward.values())).mean(0)[-1])
    n = min(values.shape[-1] for values in reward.values())
    at = [max(n * k // 3, 1) for k in (1, 2, 3)]
    kinds = {"kl": "KL at the end"}
    if all("kl_mean" in row for of_row in runs.values() for run in of_row for row in read(run)[1]):
        kinds["kl_mean"] = "of means"  # as UDM-GRPO's public code measures it
    head = ["row", *(f"reward at {i}" for i in at), "held out, sampled", *kinds.values()]
    head.append(f"iterations to reward {target:.3f}")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row, of_row in runs.items():
        _, score = series(of_row, "score", "sampled")
        # k3 has a heavy tail: one token that the reference finds unlikely would be the whole mean
        kl = [np.median(series(of_row, key)[1][:, -WINDOW:], -1).mean() for key in kinds]
        reached = np.flatnonzero(reward[row].mean(0) >= target - 1e-9)
        cells = [row, *(spread(reward[row][:, i - 1]) for i in at)]
        cells += [f"{spread(score[:, 0])} -> {spread(score[:, -1])}", *(f"{v:.3f}" for v in kl)]
        cells.append(str(reached[0] + 1) if len(reached) else "not reached")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "eval.reproduce",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("table", choices=tuple(TABLES))
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of base and RL")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--target", type=float, help="a reward: iterations until it (default: row 1's last)")
    parser.add_argument("--root", type=Path, default=Path("runs/reproduce"))
    parser.add_argument("--only-table", action="store_true", help="of the runs that are there")
    args, more = parser.parse_known_args(argv)
    check_ranges(parser, args)
    table, root = TABLES[args.table], (args.root / args.table).resolve()
    jobs = [(row, seed) for seed in range(args.seeds) for row in table.rows]  # whole seeds first
    if not args.only_table:
        of_seed = bases(table, args.seeds, more)
        with ThreadPoolExecutor(args.workers) as pool:
            runs = [
                pool.submit(train, table, row, seed, of_seed[seed], directory(root, row, seed), more)
                for row, seed in jobs
            ]
            failed = [str(run.exception()) for run in runs if run.exception()]
        if failed:
            sys.exit("\n".join(failed))
    done = {
        row: [out for s in range(args.seeds) if (out := directory(root, row, s) / "model").exists()]
        for row in table.rows
    }
    named = {row: [out.parent for out in of_row] for row, of_row in done.items() if of_row}
    if not named:
        sys.exit(f"{root}: no finished run of {args.table}")
    iterations = sorted({read(out)[0]["iterations"] for of_row in named.values() for out in of_row})
    print(
        f"\n{args.table}: seeds {', '.join(f'{row} {len(o)}' for row, o in named.items())}; {iterations=}\n"
    )
    print(markdown(named, args.target))
    draw(named, root / "curves.png")
    print(f"\ncurves: {root}/curves.png")


if __name__ == "__main__":
    main()
