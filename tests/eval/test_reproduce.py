"""Tables of ablations: what is run, and what is made of the runs."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import maskgrpo
import rebrl
import udm_grpo
from eval import reproduce
from eval.reproduce import Table, markdown, smooth

SCRIPT = """
import json, pathlib, sys

args = sys.argv[1:]
value = lambda name: args[args.index(name) + 1]
out = pathlib.Path(value("--out"))
out.mkdir(parents=True, exist_ok=True)
with open(out / "calls.txt", "a") as f:
    f.write(" ".join(args) + "\\n")
if value("--seed") == "1" and "--resume" not in args:
    (out / "checkpoints").mkdir()
    sys.exit("killed")
speed = float(value("--speed")) + int(value("--seed"))
(out / "config.json").write_text(json.dumps({"name": "fake", "iterations": 30}))
rows = [{"step": i, "reward/mean": speed * i / 50, "kl": speed} for i in range(1, 31)]
(out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
rows = [{"step": i, "mode": "sampled", "score": speed * i} for i in (0, 30)]
(out / "eval.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
(out / "model").mkdir()
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Rows whose reward grows by (speed + seed)/50 an iteration; seed 1 is cut off once."""
    (tmp_path / "fake.py").write_text(SCRIPT)
    flags = lambda argv: types.SimpleNamespace(model="path", task="tiny-geneval")  # noqa: E731
    monkeypatch.setitem(sys.modules, "fake", types.SimpleNamespace(flags=flags))
    rows = {"slow": "--speed 1", "fast (ours)": "--speed 2"}
    monkeypatch.setitem(reproduce.TABLES, "fake", Table(str(tmp_path / "fake.py"), "--task t", rows))
    return tmp_path


def test_rows_times_seeds_are_run_once_and_what_was_cut_off_is_resumed(table, capsys):
    command = ["fake", "--seeds", "2", "--root", str(table / "runs"), "--steps", "7"]
    with pytest.raises(SystemExit, match="slow, seed 1.*killed"):
        reproduce.main(command)
    reproduce.main(command)
    reproduce.main(command)
    calls = {d.name: (d / "calls.txt").read_text().splitlines() for d in (table / "runs/fake").glob("*_s*")}
    assert {name: len(lines) for name, lines in calls.items()} == {
        "slow_s0": 1, "fast-ours_s0": 1, "slow_s1": 2, "fast-ours_s1": 2
    }  # fmt: skip
    out = table / "runs/fake/fast-ours_s1"
    assert calls["fast-ours_s1"][1] == f"--task t --speed 2 --steps 7 --seed 1 --out {out} --resume"
    assert (table / "runs/fake/curves.png").exists()
    assert "slow 2, fast (ours) 2" in capsys.readouterr().out


def test_each_seed_has_a_base_of_its_own(table, monkeypatch):
    flags = lambda argv: types.SimpleNamespace(model="tiny", task="tiny-geneval", path="metric")  # noqa: E731
    monkeypatch.setattr(sys.modules["fake"], "flags", flags)
    made = lambda task, model, world, path, seed: Path(f"/bases/{task}-{path}-{seed}")  # noqa: E731
    monkeypatch.setattr("sft.base", made)
    with pytest.raises(SystemExit):
        reproduce.main(["fake", "--seeds", "2", "--root", str(table / "runs")])
    for seed in (0, 1):
        called = (table / f"runs/fake/slow_s{seed}/calls.txt").read_text()
        assert f"--model /bases/tiny-geneval-metric-{seed} --seed {seed}" in called


def test_table_is_the_mean_and_range_over_seeds(table):
    with pytest.raises(SystemExit):
        reproduce.main(["fake", "--seeds", "2", "--root", str(table)])
    reproduce.main(["fake", "--seeds", "2", "--root", str(table)])
    runs = {"slow": [table / f"fake/slow_s{s}" for s in (0, 1)]}
    runs["fast"] = [table / f"fake/fast-ours_s{s}" for s in (0, 1)]
    head, _, slow, fast = markdown(runs).splitlines()
    # the mean over the last 6 iterations, at 30, of slope * i / 50 is slope * 27.5 / 50
    assert "| reward at 10 | reward at 20 | reward at 30 |" in head and head.endswith("to reward 0.825 |")
    assert "| 0.225 (0.150-0.300) | 0.525 (0.350-0.700) | 0.825 (0.550-1.100) |" in slow
    assert slow.endswith("| 0.000 (0.000-0.000) -> 45.000 (30.000-60.000) | 1.500 | 30 |")
    assert fast.endswith("| 2.500 | 19 |")  # 2.5 (19 - 2.5) / 50 is 0.825
    assert markdown(runs, target=9.0).splitlines()[2].endswith("| not reached |")
    for metrics in table.rglob("metrics.jsonl"):  # udm_grpo.py logs both kinds
        metrics.write_text(metrics.read_text().replace('"kl"', '"kl_mean": 0.25, "kl"'))
    head, _, slow, _ = markdown(runs).splitlines()
    assert "| KL at the end | of means |" in head and "| 1.500 | 0.250 | 30 |" in slow


@pytest.mark.parametrize("flag", ["--seeds", "--workers"])
def test_no_seeds_or_workers_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["rebrl", flag, "0"])
    assert f"{flag} 0: must be a number, at least 1" in capsys.readouterr().err


def test_smooth_averages_what_there_is_at_the_start():
    values = np.arange(1.0, 9.0)[None]
    assert smooth(values)[0].tolist() == [1, 1.5, 2, 2.5, 3, 3.5, 4.5, 5.5]


@pytest.mark.parametrize("name", reproduce.TABLES)
def test_every_row_is_accepted_by_its_script(name):
    table = reproduce.TABLES[name]
    script = {"rebrl.py": rebrl, "maskgrpo.py": maskgrpo, "udm_grpo.py": udm_grpo}[table.script]
    parsed = [vars(script.flags([*table.flags.split(), *flags.split()])) for flags in table.rows.values()]
    assert len({json.dumps({k: str(v) for k, v in p.items() if k != "source"}) for p in parsed}) == len(
        parsed
    )
