"""Curves and tables out of run directories."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval import report

ROOT = Path(__file__).resolve().parents[2]


def make(path: Path, seed: int, gamma: float, final: float) -> Path:
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"seed": seed, "gamma": gamma, "name": "maskgrpo", "out": str(path)})
    )
    metrics = [{"step": s, "reward/mean": 0.1 * s, "kl": 0.01 * s} for s in (1, 2)]
    scores = [
        {"step": s, "mode": m, "score": v, "se": 0.01, "n": 8, "task": "tiny-math"}
        for s, v in ((0, 0.25), (2, final))
        for m in ("greedy", "sampled")
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in metrics))
    (path / "eval.jsonl").write_text("".join(json.dumps(r) + "\n" for r in scores))
    return path


@pytest.fixture
def runs(tmp_path):
    cells = [("a0", 0, 0.6, 0.7), ("a1", 1, 0.6, 0.9), ("b0", 0, 0.0, 0.5)]
    return [make(tmp_path / name, seed, gamma, final) for name, seed, gamma, final in cells]


def test_seeds_are_one_line_and_other_flags_another(runs):
    named = report.groups(runs)
    assert {name: len(group) for name, group in named.items()} == {"gamma 0.6": 2, "gamma 0.0": 1}


def test_table_has_base_and_end_with_the_range_over_seeds(runs):
    table = report.table(report.groups(runs))
    assert "| gamma 0.6 | 2 | 0.250 (0.250-0.250) -> 0.800 (0.700-0.900) |" in table
    assert "| gamma 0.0 | 1 | 0.250 -> 0.500 |" in table and "0.0200" in table


def test_picture_is_drawn_and_the_command_prints_the_table(runs, tmp_path):
    command = [sys.executable, "-m", "eval.report", *map(str, runs), "--out", str(tmp_path / "c.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "gamma 0.6" in done.stdout and (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_directory_without_a_run_is_one_sentence(tmp_path):
    command = [sys.executable, "-m", "eval.report", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "no run in there" in done.stderr and "Traceback" not in done.stderr
