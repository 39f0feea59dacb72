"""The uniform paths: numbers of the public code, and the theory of continuous-time Markov chains."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common import MetricPath, MixturePath, path_times, uniform_path

GOLDEN = Path(__file__).parent / "golden"
K = 6


@pytest.fixture(scope="module")
def dfm():
    return load_file(GOLDEN / "dfm.safetensors"), json.loads((GOLDEN / "dfm.json").read_text())


@pytest.fixture
def paths():
    codebook = torch.randn(K, 3, generator=torch.Generator().manual_seed(0))
    return [MixturePath(K), MetricPath(codebook, 0.9, 3.0), MetricPath(codebook, 0.9, 3.0, power=2)]


def pairs():
    """Every (x_t, x_1) of the small vocabulary, [K, K] each."""
    x = torch.arange(K)
    return x[:, None].expand(K, K).contiguous(), x[None].expand(K, K).contiguous()


def transition(path, t, s, integrated=True, n=100):
    """P(x_s | x_t, x_1) [K, K, K]: frequencies of ``jump`` over a grid of n x n uniforms."""
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    u = torch.cartesian_prod(grid, grid).T[:, None].expand(2, K * K, n * n)
    x_t, x_1 = (x.reshape(-1, 1).expand(-1, n * n) for x in pairs())
    x_s = path.jump(x_t, x_1, t, s, u, integrated)
    return torch.stack([torch.bincount(row, minlength=K) for row in x_s]).view(K, K, K) / n**2


@pytest.mark.parametrize("name", ["A", "B", "C"])
def test_metric_path_equals_the_public_one(dfm, name):
    g, info = dfm
    path = MetricPath(g["codebook"], **info["settings"][name])
    x_1, x_t = g["x_1"], g["x_t"]
    torch.testing.assert_close(path.distance(x_1), g["dist_x1_to_all"], atol=1e-6, rtol=0)
    torch.testing.assert_close(path.distance(x_1, x_t), g["dist_xt_to_x1"].squeeze(-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        path.probability(x_1, g["t_per_sample"]), g[f"metric.{name}.prob_per_sample_t"], atol=1e-5, rtol=0
    )
    for i, t in enumerate(info["t_list"]):
        rate = path.rate(x_t, x_1, t)
        torch.testing.assert_close(rate.sum(-1), g[f"metric.{name}.jump_rate"][i], atol=1e-5, rtol=1e-3)
        if name == "A":
            torch.testing.assert_close(path.probability(x_1, t), g["metric.A.prob"][i], atol=1e-5, rtol=0)
            expected = g["metric.A.velocity"][i].scatter(-1, x_t[..., None], 0)
            torch.testing.assert_close(rate, expected, atol=1e-5, rtol=1e-3)


def test_fudoki_path_equals_the_public_one():
    g = load_file(GOLDEN / "fudoki_path.safetensors")
    path = MetricPath(g["path.codebook"], 0.9, 3.0, power=2)
    x_1, x_t = g["path.x_1"], g["path.x_t"]
    torch.testing.assert_close(path.distance(x_1), g["path.metric_x1_to_all"], atol=1e-5, rtol=0)
    torch.testing.assert_close(path.distance(x_1, x_t), g["path.dist_xt_x1"], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        path.probability(x_1, g["path.t_per_sample"]), g["path.prob_per_sample_t"], atol=1e-5, rtol=0
    )
    for i, t in enumerate([0.0, 0.02, 0.25, 0.5, 0.75, 0.9, 0.98]):
        torch.testing.assert_close(path.probability(x_1, t), g["path.prob"][i], atol=1e-5, rtol=0)
        torch.testing.assert_close(
            path.rate(x_t, x_1, t), g["path.velocity_own_zeroed"][i], atol=1e-5, rtol=1e-3
        )


def test_corrupt_draws_what_the_public_code_drew(dfm):
    g, info = dfm
    path = MetricPath(g["codebook"], 0.9, 3.0)
    for i, t in enumerate(info["metric.sample.t"]):
        assert torch.equal(path.corrupt(g["x_1"], t, g["metric.sample.r"][i]), g["metric.sample.x_t"][i])
    t, u, x_0 = g["mixture.sample.t"], g["mixture.sample.u_draw"], g["mixture.sample.x_0_draw"]
    size = 64
    noise = 1 - t.double()[:, None]
    u = torch.where(u < noise, noise * (x_0 + 0.5) / size, u.double())  # their two draws as our one
    assert torch.equal(MixturePath(size).corrupt(g["mixture.sample.x_1"], t, u), g["mixture.sample.x_t"])


def test_corrupt_follows_probability(paths):
    n = 20_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5).expand(K, n) / n
    x_1 = torch.arange(K)[:, None].expand(K, n)
    t = torch.linspace(0, 0.9, K)
    for path in paths:
        x_t = path.corrupt(x_1, t, u)
        frequency = torch.stack([torch.bincount(row, minlength=K) for row in x_t]) / n
        torch.testing.assert_close(frequency, path.probability(x_1[:, 0], t), atol=2e-4, rtol=0)


@pytest.mark.parametrize("t", [0.05, 0.3, 0.6, 0.9])
def test_rates_satisfy_the_kolmogorov_forward_equation(paths, t):
    x_t, x_1 = pairs()
    h = 1e-3
    for path in paths:
        u = path.rate(x_t, x_1, t).double()  # [x_t, x_1, x]
        p = path.probability(torch.arange(K), t).double()  # [x_1, x]
        inflow = torch.einsum("by,ybx->bx", p, u) - p * u.sum(-1).T
        after, before = (path.probability(x_1[0], t + d).double() for d in (h, -h))
        slope = (after - before) / (2 * h)
        assert (u >= 0).all()
        torch.testing.assert_close(inflow, slope, atol=2e-3, rtol=5e-3)


@pytest.mark.parametrize("integrated", [True, False])
@pytest.mark.parametrize("t", [0.0, 0.05, 0.3, 0.6, 0.9, 0.99])
def test_jumps_are_a_distribution_that_only_comes_closer(paths, t, integrated):
    """C12: by the frequencies of ``jump``, for any step each token stays with probability exp(-total rate) or
    jumps in proportion to the rates, always strictly closer to x_1."""
    x_t, x_1 = pairs()
    own = torch.eye(K, dtype=torch.bool)[:, None].expand(K, K, K)  # x_s = x_t
    for path in paths:
        d = path.distance(x_1[0]) if isinstance(path, MetricPath) else 1 - torch.eye(K)  # [x_1, x]
        closer = d[None] < d.T[:, :, None] - 1e-6  # [x_t, x_1, x_s]
        for s in (t + (1 - t) * part for part in (0.01, 0.3, 0.7, 0.99)):
            rate = path.rate(x_t, x_1, t, s) if integrated else path.rate(x_t, x_1, t) * (s - t)
            assert (rate >= 0).all() and rate.isfinite().all() and (rate[own] == 0).all()
            row = transition(path, t, s, integrated, n=40)
            torch.testing.assert_close(row.sum(-1), torch.ones(K, K))
            assert (row[~own & ~closer] == 0).all()
            total = rate.sum(-1, keepdim=True)
            expected = torch.where(total > 0, -torch.expm1(-total) * rate / total, 0) + own * torch.exp(
                -total
            )
            torch.testing.assert_close(row, expected, atol=0.05, rtol=0)


def test_a_mixture_token_jumps_with_the_exact_probability():
    """C12: at t = 0.75 a step of 0.25 must jump surely; 1 - exp(-h rate) alone gives 0.632."""
    path = MixturePath(K)
    table = transition(path, 0.75, 0.875)
    assert table[0, 1, 1] == pytest.approx(0.5, abs=0.01)
    assert transition(path, 0.75, 1 - 1e-9)[0, 1, 1] == 1
    assert transition(path, 0.75, 1.0, integrated=False)[0, 1, 1] == pytest.approx(0.632, abs=0.01)


def test_large_vocabularies_are_drawn_in_chunks(monkeypatch, paths):
    """No more than CHUNK probabilities are alive, and the draws are the same."""
    g = torch.Generator().manual_seed(1)
    x_t, x_1 = torch.randint(K, (2, 4, 9), generator=g)
    u = torch.rand(2, 4, 9, generator=g, dtype=torch.float64)
    t = torch.tensor([0.1, 0.3, 0.5, 0.7])
    whole = [(p.corrupt(x_1, t, u[0]), p.jump(x_t, x_1, 0.3, 0.5, u)) for p in paths]
    monkeypatch.setattr("common.CHUNK", 3 * K)
    sizes = {}

    def record(name):
        whole = getattr(MetricPath, name)

        def recorded(self, x, *more):
            sizes.setdefault(name, []).append(x.numel())
            return whole(self, x, *more)

        monkeypatch.setattr(MetricPath, name, recorded)

    record("probability")
    record("rate")
    for path, (x, y) in zip(paths, whole, strict=True):
        assert torch.equal(path.corrupt(x_1, t, u[0]), x)
        assert torch.equal(path.jump(x_t, x_1, 0.3, 0.5, u), y)
    assert sizes == dict.fromkeys(("probability", "rate"), [3] * 24)  # 36 tokens, on two paths


def test_training_times_equal_the_public_ones():
    g = load_file(GOLDEN / "dfm.safetensors")
    for shift in (1, 3):
        t = path_times(g["sample_timesteps.u"], float(shift))
        torch.testing.assert_close(t, g[f"sample_timesteps.shift{shift}"], atol=1e-6, rtol=0)


class Model(torch.nn.Linear):
    """Just enough of a policy to ask for its path."""

    def __init__(self, **path_settings):
        super().__init__(1, 1)
        self.vocab_size, self.codebook, self.path_settings = K, torch.eye(K), path_settings


def test_the_checkpoint_names_its_path_and_flags_win():
    model = Model(path="metric", alpha=0.9, c=3.0, power=2, shift=1.5)
    path, shift = uniform_path(model)
    assert (path.alpha, path.c, path.power, shift) == (0.9, 3.0, 2, 1.5)
    path, shift = uniform_path(model, alpha=0.5, power=1, shift=1.0)
    assert (path.alpha, path.c, path.power, shift) == (0.5, 3.0, 1, 1.0)
    assert isinstance(uniform_path(model, "mixture")[0], MixturePath)


def test_path_settings_are_never_guessed():
    for flags in ({}, {"path": "metric"}, {"path": "metric", "alpha": 0.9, "shift": 1.0}):
        with pytest.raises(ValueError, match="--shift.*--path-alpha and --path-c"):
            uniform_path(Model(), **flags)
    with pytest.raises(ValueError, match="--path linear"):
        uniform_path(Model(), "linear", shift=1.0)
    model = Model()
    model.codebook = None
    with pytest.raises(ValueError, match="no codebook"):
        uniform_path(model, "metric", alpha=0.9, c=3.0, shift=1.0)
    model.codebook = torch.eye(K + 1)
    with pytest.raises(ValueError, match=f"the head has {K} codes, the codebook {K + 1}"):
        uniform_path(model, "metric", alpha=0.9, c=3.0, shift=1.0)
