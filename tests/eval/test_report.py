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


def refused(monkeypatch, capsys, *argv: str) -> str:
    """The one sentence with which the command ends."""
    monkeypatch.setattr(sys, "argv", ["eval.report", *argv])
    with pytest.raises(SystemExit) as stopped:
        report.main()
    return f"{stopped.value} {capsys.readouterr().err}"


def test_directory_without_a_run_is_one_sentence(tmp_path, monkeypatch, capsys):
    assert "no run in there" in refused(monkeypatch, capsys, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # of a stored model
    assert "no run in there" in refused(monkeypatch, capsys, str(tmp_path))


def test_run_that_was_killed_or_damaged(runs, tmp_path, monkeypatch, capsys):
    """A last line that was cut off is passed over; damage elsewhere is named."""
    whole = report.table(report.groups(runs))
    for name in ("metrics.jsonl", "eval.jsonl"):
        with open(runs[0] / name, "a") as f:
            f.write('{"step": 3, "mo')
    assert report.table(report.groups(runs)) == whole
    (runs[1] / "eval.jsonl").write_text('{"step": 0, "mo\n{"step": 2, "mode": "greedy", "score": 1}\n')
    assert f"{runs[1]}/eval.jsonl:1: a damaged line" in refused(monkeypatch, capsys, *map(str, runs))
    (runs[2] / "config.json").write_text("{")
    assert "config.json: not JSON" in refused(monkeypatch, capsys, str(runs[2]))


@pytest.mark.parametrize("kind", [[], ["udm"], ["credit"]])
def test_directory_of_the_picture_is_made_and_what_cannot_be_written_refused(
    kind, runs, tmp_path, monkeypatch, capsys
):
    for out in (tmp_path, f"{runs[0]}/config.json/c.png", tmp_path / "c.doc"):
        said = refused(monkeypatch, capsys, *kind, str(runs[0]), "--out", str(out))
        assert "argument --out" in said and str(out).removesuffix("/c.png") in said
    monkeypatch.setattr(sys, "argv", ["eval.report", str(runs[0]), "--out", f"{tmp_path}/new/c.png"])
    report.main()
    assert (tmp_path / "new/c.png").exists()


def test_run_without_a_line_so_far_has_no_curves_and_says_so(runs, tmp_path, monkeypatch, capsys):
    for name in ("metrics.jsonl", "eval.jsonl"):
        (runs[0] / name).unlink()
    monkeypatch.setattr(sys, "argv", ["eval.report", str(runs[0]), "--out", f"{tmp_path}/c.png"])
    report.main()
    assert "no curves" in capsys.readouterr().out and not (tmp_path / "c.png").exists()
