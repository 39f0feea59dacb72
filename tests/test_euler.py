"""The Euler sampler of uniform diffusion: the public steps, an oracle model, and what it hands on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import MetricPath, MixturePath
from models.policy import Policy, Prompt
from models.tiny import Patches
from samplers import draw, euler, euler_times, sample

GOLDEN = Path(__file__).parent / "golden"
K = 8
CODEBOOK = torch.randn(K, 3, generator=torch.Generator().manual_seed(1))
PATHS = {"mixture": MixturePath(K), "metric": MetricPath(CODEBOOK, 0.9, 3.0)}


class Fake:
    """A policy whose logits at call n are ``logits(n, x_t)`` [B L, K]; remembers what it was fed."""

    def __init__(self, logits, length, vocab_size=K):
        self.logits, self.length, self.vocab_size, self.fed = logits, length, vocab_size, []

    def __call__(self, prompt, x_t, null=None, cfg=0.0):
        self.fed.append((x_t.clone(), cfg))
        return self.logits(len(self.fed) - 1, x_t)


def prompts(n):
    return Prompt(torch.zeros(n, 1, dtype=torch.long), torch.ones(n, 1, dtype=torch.bool))


def generators(n):
    return [torch.Generator().manual_seed(i) for i in range(n)]


def a_model(length):
    table = torch.randn(K, K, generator=torch.Generator().manual_seed(2))
    return Fake(lambda n, x_t: table[x_t.flatten()], length)


def total_variation(path, steps, rate, tokens=50_000):
    """Largest total variation, over the times of a run, between the sampler's marginal and p_t. The model is
    the true posterior p(x_1 | x_t) of a skewed p(x_1)."""
    p_1 = (2 * torch.randn(K, generator=torch.Generator().manual_seed(3))).softmax(0)
    times = euler_times(steps)

    def posterior(step, x_t):
        joint = p_1[:, None] * path.probability(torch.arange(K), times[step])  # [x_1, x_t]
        return joint.log().T[x_t.flatten()]

    options = dict(steps=steps, path=path, rate=rate, keep_trajectory=True)
    out = euler(Fake(posterior, tokens), prompts(1), generators(1), **options)
    worst = 0.0
    for t, x in [(t, x) for x, t in out.trajectory] + [(1.0, out.x_0)]:
        p_t = p_1 @ path.probability(torch.arange(K), t) if t < 1 else p_1
        frequency = torch.bincount(x.flatten(), minlength=K) / tokens
        worst = max(worst, (frequency - p_t).abs().sum().item() / 2)
    return worst


def test_steps_equal_the_public_ones():
    g, info = load_file(GOLDEN / "dfm.safetensors"), json.loads((GOLDEN / "dfm.json").read_text())
    paths = {"mixture": MixturePath(64), "metric": MetricPath(g["codebook"], 0.9, 3.0)}
    for name in info["steps"]:
        _, kind, shift, k = name.split(".")
        t, s = euler_times(10, float(shift.removeprefix("shift")))[int(k[1:]) :][:2]
        x_1 = draw(g["logits"].flatten(0, 1), g[f"{name}.r_x1"].flatten()).view(2, 12)
        assert torch.equal(x_1, g[f"{name}.x1_draw"]), name
        if k == "k9":
            assert torch.equal(x_1, g[f"{name}.x_next"]), name
            continue
        assert (t, s - t) == pytest.approx(info["step_t_dt"][name], abs=1e-12)
        u = torch.stack([g[f"{name}.u_jump"], g[f"{name}.r_jump"].clamp(min=0)])
        x_s = paths[kind].jump(g["x_t"], x_1, t, s, u, integrated=False)
        assert torch.equal(x_s, g[f"{name}.x_next"]), name
        threshold = -torch.expm1(-(s - t) * paths[kind].rate(g["x_t"], x_1, t).sum(-1))
        torch.testing.assert_close(threshold, g[f"{name}.jump_threshold"], atol=1e-5, rtol=0)


def test_times_are_shifted_once_and_end_at_one():
    """C11: one array, whose steps sum to 1."""
    public = json.loads((GOLDEN / "dfm.json").read_text())["timestep_to_t"]
    for name, times in public.items():
        n, shift = name.split("_shift")
        assert euler_times(int(n[1:]), float(shift)) == pytest.approx([*times, 1.0], abs=1e-12)


def test_integrated_rate_gains_over_the_instantaneous_one():
    """With an oracle: within 0.1 / 0.05 / 0.02 of p_t at 5 / 10 / 25 steps, at least 4 times as near."""
    for steps, bound in ((5, 0.1), (10, 0.05), (25, 0.02)):
        ours, public = (total_variation(PATHS["metric"], steps, r) for r in ("integrated", "instantaneous"))
        print(f"{steps} steps: total variation {ours:.3f} integrated, {public:.3f} instantaneous")
        assert ours <= bound
        assert public >= 4 * ours


def exact_total_variation(path, steps, integrated=True):
    """As ``total_variation``, without draws: the marginal is carried on by the matrix of each step."""
    K = path.vocab_size
    p_1 = (2 * torch.randn(K, generator=torch.Generator().manual_seed(3))).softmax(0)
    x = torch.arange(K)
    x_t, x_1 = x[:, None].expand(K, K).contiguous(), x[None].expand(K, K).contiguous()
    marginal, worst = torch.full((K,), 1 / K), 0.0
    for t, s in zip(euler_times(steps), euler_times(steps)[1:], strict=False):
        posterior = (p_1[:, None] * path.probability(x, t)).T  # [x_t, x_1]
        posterior = posterior / posterior.sum(-1, keepdim=True)
        if s == 1:
            marginal, p_s = marginal @ posterior, p_1
        else:
            rate = path.rate(x_t, x_1, t, s) if integrated else path.rate(x_t, x_1, t) * (s - t)
            total = rate.sum(-1, keepdim=True)
            row = torch.where(total > 0, -torch.expm1(-total) * rate / total, 0)
            row = row.scatter_add(-1, x_t[..., None], torch.exp(-total))  # [x_t, x_1, x_s]
            marginal = torch.einsum("i,ij,ijk->k", marginal, posterior, row)
            p_s = p_1 @ path.probability(x, s)
        worst = max(worst, (marginal - p_s).abs().sum().item() / 2)
    return worst


def codebooks():
    for size, dimensions in ((4, 3), (6, 3), (8, 3), (16, 8), (16, 256)):
        for seed in range(2):
            yield torch.randn(size, dimensions, generator=torch.Generator().manual_seed(seed))
    yield load_file(GOLDEN / "dfm.safetensors")["codebook"]  # 64 codes
    yield Patches().codebook  # those of tiny-geneval


def test_the_bounds_hold_for_every_codebook():
    """Random ones of 4 to 64 codes in 3 to 256 dimensions, and that of the built-in world."""
    for steps, bound in ((5, 0.1), (10, 0.05), (25, 0.02)):
        paths = [MetricPath(codebook, 0.9, 3.0) for codebook in codebooks()]
        ours = [exact_total_variation(path, steps) for path in paths]
        public = [exact_total_variation(path, steps, integrated=False) for path in paths]
        print(f"{steps} steps: at most {max(ours):.3f} integrated, {max(public):.3f} instantaneous")
        assert max(ours) <= bound
        assert all(p >= 4 * o for o, p in zip(ours, public, strict=True))


def test_the_mixture_path_is_exact():
    assert total_variation(PATHS["mixture"], 3, "integrated") < 0.01
    assert total_variation(PATHS["mixture"], 3, "instantaneous") > 0.04


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_no_source_token_is_left_when_the_model_is_certain(path):
    """C12"""
    five = torch.full((K,), -1e4).index_fill(0, torch.tensor([5]), 0.0)
    certain = Fake(lambda n, x_t: five.expand(x_t.numel(), K), 30)
    for rate in ("integrated", "instantaneous"):
        out = euler(certain, prompts(4), generators(4), steps=4, path=path, rate=rate)
        assert (out.x_0 == 5).all()


def test_instantaneous_metric_rate_wastes_the_first_step():
    for rate, moves in (("instantaneous", False), ("integrated", True)):
        options = dict(steps=5, path=PATHS["metric"], rate=rate, keep_trajectory=True)
        out = euler(a_model(50), prompts(2), generators(2), **options)
        assert torch.equal(out.trajectory[0][0], out.trajectory[1][0]) != moves


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_trajectory_is_exactly_what_the_model_was_fed(path, monkeypatch):
    """C10, C11: one entry a model call, the last step included, at the times that the jumps used."""
    model, jump, jumps = a_model(20), path.jump, []
    monkeypatch.setattr(path, "jump", lambda *args: jumps.append(args) or jump(*args))
    out = euler(model, prompts(3), generators(3), steps=4, shift=3.0, path=path, keep_trajectory=True)
    times = euler_times(4, 3.0)
    assert len(out.trajectory) == len(model.fed) == 4
    assert [t for _, t in out.trajectory] == times[:-1]
    assert [(t, s) for _, _, t, s, *_ in jumps] == list(zip(times[:3], times[1:4], strict=True))
    for (x_t, _), (fed, _), x_1 in zip(out.trajectory, model.fed, out.x_1, strict=True):
        assert torch.equal(x_t, fed)
        assert x_1.shape == x_t.shape
    for (x_t, _), x_1, jumped in zip(out.trajectory, out.x_1, jumps, strict=False):
        assert torch.equal(jumped[0], x_t) and torch.equal(jumped[1], x_1)
    assert torch.equal(out.x_1[-1], out.x_0)
    changed = torch.stack([x for x, _ in out.trajectory] + [out.x_0]).diff(dim=0) != 0
    last = torch.where(changed, torch.arange(4)[:, None, None], 0).amax(0)
    assert torch.equal(out.revealed, last)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_a_row_does_not_depend_on_its_batch(path):
    whole = euler(a_model(20), prompts(3), generators(3), steps=5, path=path).x_0
    alone = euler(a_model(20), prompts(1), generators(3)[2:], steps=5, path=path).x_0
    assert torch.equal(whole[2:], alone)
    assert not torch.equal(whole[0], whole[1])


class LargeTensors(TorchDispatchMode):
    """The names of the operators that made a tensor of at least ``nbytes`` of its own."""

    def __init__(self, nbytes):
        super().__init__()
        self.nbytes, self.made, self.seen = nbytes, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for x in (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            storage = x.untyped_storage()
            if storage.nbytes() >= self.nbytes and storage.data_ptr() not in {
                s.data_ptr() for s in self.seen
            }:
                self.seen.append(storage)  # kept, so that its address is not given again
                self.made.append(str(func))
        return out


class Table(Policy):
    def __init__(self, length, vocab_size):
        super().__init__()
        self.length, self.vocab_size = length, vocab_size
        self.table = torch.nn.Embedding(vocab_size, 4)
        self.out = torch.nn.Linear(4, vocab_size)

    def hidden(self, prompt, x_t):
        return self.table(x_t)

    def head(self, h):
        return self.out(h)


@pytest.mark.parametrize("cfg", [0.0, 6.0])
def test_the_logits_are_the_only_buffer_of_their_size(monkeypatch, cfg):
    """A step of Euler, guided or not, on the metric path: all else of [B, L, K] goes by in chunks."""
    B, L, K = 4, 32, 512
    for module in ("common", "samplers"):
        monkeypatch.setattr(f"{module}.CHUNK", B * L * K // 16)
    monkeypatch.setattr("models.policy.CHUNK", B * L // 16)
    path = MetricPath(torch.randn(K, 3, generator=torch.Generator().manual_seed(0)), 0.9, 3.0)
    model = Table(L, K)
    with LargeTensors(B * L * K * 4 // 2) as large:  # bytes: half of the logits
        euler(model, prompts(B), generators(B), steps=3, path=path, null=prompts(B), cfg=cfg)
    assert large.made == ["aten.new_empty.default"] * 3  # the logits of each step


def test_settings_reach_the_sampler():
    """``sample`` is what rollout and evaluation call."""
    settings = dict(sampler="euler", steps=4, temperature=1.0, cfg=0.0, cfg_until=1.0)
    settings |= dict(path=PATHS["metric"], shift=3.0, rate="instantaneous")
    model = a_model(20)
    out = sample(model, prompts(2), generators(2), settings)
    options = dict(steps=4, path=PATHS["metric"], shift=3.0, rate="instantaneous")
    assert torch.equal(out.x_0, euler(a_model(20), prompts(2), generators(2), **options).x_0)


def test_guidance_stops_at_cfg_until():
    model = a_model(5)
    euler(model, prompts(1), generators(1), steps=10, path=PATHS["mixture"], cfg=6.0, cfg_until=0.5)
    assert [w for _, w in model.fed] == [6.0] * 5 + [0.0] * 5


@pytest.mark.parametrize("wrong", [{"rate": "exact"}, {"steps": 0}, {"shift": 0.0}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match="--" + next(iter(wrong))):
        euler(a_model(5), prompts(1), generators(1), **{"steps": 2, "path": PATHS["mixture"]} | wrong)
