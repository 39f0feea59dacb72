"""The diagnostics of UDM-GRPO: entropy, distance from the training states, figure and table."""

import json
import math

import pytest
import torch

from common import World, uniform_path
from eval import report, udm_diagnostics
from eval.udm_diagnostics import TRAJECTORIES, diagnose, entropy, pair_counts, total_variation
from models import tiny

K, L = 49 * tiny.VARIANTS, 16


@pytest.fixture(scope="module")
def policy():
    return tiny.build("tiny-geneval", path="metric")


@pytest.fixture(scope="module")
def training(policy):
    return udm_diagnostics.TrainingStates(policy, uniform_path(policy)[0])


def test_entropy_is_that_of_the_scored_distribution(policy):
    prompt, null = policy.encode(["a square", "two squares"]), policy.encode(["", ""])
    x_t = torch.randint(K, (2, L), generator=torch.Generator().manual_seed(0))
    for w in (0.0, 2.0):
        p = policy(prompt, x_t, null=null, cfg=w).detach().softmax(-1).view(2, L, K)
        expected = torch.distributions.Categorical(p).entropy().mean(-1)
        torch.testing.assert_close(entropy(policy, prompt, x_t, null, w), expected)
        assert (expected < math.log(K)).all()


def test_pairs_are_neighbours_in_rows_and_columns():
    counts = pair_counts(torch.tensor([[0, 1, 2, 3]]), 2, 4)
    assert {(a, b) for a, b in counts.nonzero().tolist()} == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert counts.sum() == 4


def test_share_is_what_corrupted_pictures_hold(training):
    """The exact share against the frequency in many drawn states, at each end and between."""
    for t in (0.0, 0.15, 0.4, 0.9):
        share = training.share(t)
        assert share.sum() == pytest.approx(1)
        assert total_variation(training.counts(training.drawn(4000, t)), share) < 0.01
    codes = torch.tensor([1] + 4 * [12], dtype=torch.float64) / 49  # at t = 0 every code alike
    torch.testing.assert_close(training.share(0.0), codes.outer(codes).flatten(), atol=1e-6, rtol=0)


def test_noise_never_takes_clean_samples_farther_away(training):
    """Forward states are within the distance of the clean samples: pictures all of one colour, noised."""
    other, p = torch.full((2000, L), 9), training.path
    far = []
    for t in (0.1, 0.3, 0.6, 0.99):
        u = torch.rand(other.shape, generator=torch.Generator().manual_seed(1))
        far.append(total_variation(training.counts(p.corrupt(other, t, u)), training.share(t)))
    assert all(a < b + 0.01 for a, b in zip(far, far[1:], strict=False)) and far[0] < 0.6 < far[-1]


def test_measures_are_of_each_state_at_its_time_and_without_padding(policy, training):
    texts, times, w = ["a square", "two squares", "three squares"], [0.2, 0.6], [2.0, 0.0]
    prompt, null, world = policy.encode(texts), policy.encode([""] * 3), World(0, 1, torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    states = {
        (name, k, t): torch.randint(K, (3, L), generator=g)
        for name in TRAJECTORIES
        for k, t in enumerate(times)
    }
    state_at, real = lambda *key: states[key], torch.tensor([1.0, 1.0, 0.0])  # noqa: E731
    batches = [slice(0, 1), slice(1, 3)]
    found = diagnose(policy, prompt, null, w, batches, state_at, times, training, real, world)
    expected = {}
    for (name, k, t), x_t in states.items():
        h = entropy(policy, prompt[:2], x_t[:2], null[:2], w[k])
        expected[f"entropy/{name}/{t:.3f}"] = h.mean().item()
        far = total_variation(training.counts(x_t[:2]), training.share(t))
        expected[f"distance/{name}/{t:.3f}"] = far
        chance = training.counts(training.drawn(2, t))
        expected[f"distance/training/{t:.3f}"] = total_variation(chance, training.share(t))
    assert found == pytest.approx(expected, abs=1e-6)


def write_run(path, seed, trajectory, kl):
    """A run of two measurements whose values are known."""
    path.mkdir()
    config = {"name": "udm_grpo", "seed": seed, "trajectory": trajectory}
    (path / "config.json").write_text(json.dumps(config))
    rows = []
    for step in (1, 2):
        row = {"step": step, "kl": kl, "kl_token": kl * step, "kl_mean": 0.1 * kl, "clip_fraction": 0.25}
        for t in ("0.000", "0.100"):
            row |= {f"entropy/{name}/{t}": 3.0 / step for name in ("forward", "backward")}
            row |= {f"distance/{name}/{t}": 0.1 * step for name in ("forward", "backward", "training")}
        rows.append(json.dumps(row))
    (path / "metrics.jsonl").write_text("\n".join(rows))
    scores = [{"step": s, "mode": "sampled", "score": v} for s, v in ((0, 0.2), (1, 0.6), (2, 0.4))]
    (path / "eval.jsonl").write_text("\n".join(map(json.dumps, scores)))
    return path


def test_report_draws_and_tells_a_collapse(tmp_path, monkeypatch, capsys):
    """Seeds are one line; base, best and end of the score, KL at the end, clip share."""
    runs = [write_run(tmp_path / f"{t}{s}", s, t, 0.5 + s) for t in ("forward", "backward") for s in (0, 1)]
    out = tmp_path / "udm.png"
    monkeypatch.setattr("sys.argv", ["report", "udm", *map(str, runs), "--out", str(out)])
    report.main()
    said = capsys.readouterr().out
    assert out.stat().st_size > 1000
    cells = "| 2 | 0.200 (0.200-0.200) | 0.600 (0.600-0.600) | 0.400 (0.400-0.400) | 2.0000 | 0.1000 | 0.250 "
    for name in ("trajectory forward", "trajectory backward"):
        assert f"| {name} {cells}| 0.200 | 0.200 | 0.200 |" in said


def test_report_refuses_the_run_of_another_script(tmp_path):
    run = write_run(tmp_path / "run", 0, "forward", 0.1)
    (run / "config.json").write_text('{"name": "rebrl", "seed": 0}')
    with pytest.raises(SystemExit, match="no run of udm_grpo.py"):
        udm_diagnostics.main([str(run)])
