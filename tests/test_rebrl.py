"""RebRL: the credit of timesteps as its own loss gives it, and the script around it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

import maskgrpo
import rebrl
from common import end_of_text, generator, times
from eval import credit, tiny_geneval
from models import load, tiny
from models.policy import Policy
from samplers import sample

SMALL = "--prompts 2 --group-size 4 --mu 3 --iterations 2 --steps 4 --eval-prompts 8 --eval-every 0"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An untrained tiny-geneval policy."""
    path = tmp_path_factory.mktemp("base") / "model"
    tiny.build("tiny-geneval").save(path)
    return path


def train(script, base: Path, out: Path, *more: str) -> tuple[list[dict], dict]:
    """(metrics, weights) of a small run on a picture statistic, which a random policy earns unevenly."""
    fixed = f"--task tiny-geneval --model {base} --reward edges {SMALL} --lr 1e-3 --cfg 0 --out {out}"
    script.main([*fixed.split(), *more])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, load(str(out / "model")).state_dict()


def one_group(*more: str):
    return rebrl.flags(["--group-size", "4", *more])


# ---- The weight of a token, d(sum_j J_j) / d log p_k

HARMONIC = {  # by hand, for t_j = j/mu, of a token that is revealed at t_j
    "none": lambda j, mu: mu * sum(1 / i for i in range(j, mu + 1)),
    "first": lambda j, mu: mu - j + 1.0,
    "second": lambda j, mu: sum(range(j, mu + 1)) / mu,
    "token": lambda j, mu: 1.0,
}


@pytest.mark.parametrize("mu", [4, 8, 12])
@pytest.mark.parametrize("rebalance", HARMONIC)
def test_weight_of_a_token_has_the_closed_form(rebalance, mu):
    j, weight = credit.measured(one_group("--rebalance", rebalance, "--mu", str(mu)), L=512)
    expected = torch.tensor([HARMONIC[rebalance](i, mu) for i in range(1, mu + 1)])
    assert set(j.unique().tolist()) == set(range(mu))
    torch.testing.assert_close(weight, expected[j], rtol=1e-4, atol=0)
    np.testing.assert_allclose(credit.closed_form(rebalance, times(mu)), expected, rtol=1e-6)


def test_weights_without_rebalancing_are_those_counted_by_a_study():
    weight = credit.by_time(one_group("--rebalance", "none", "--mu", "8"))
    np.testing.assert_allclose(weight, [21.74, 13.74, 9.74, 7.08, 5.08, 3.48, 2.14, 1.00], atol=6e-3)


@pytest.mark.parametrize("remask", ["random", "fading", "trace"])
def test_truncation_weighs_by_one_over_t_and_token_stays_flat(remask):
    flags = ["--gamma", "0.6", "--mu", "8", "--remask", remask]
    j, weight = credit.measured(one_group("--rebalance", "none", *flags), L=512)
    t = [0.6 + 0.4 * i / 8 for i in range(1, 9)]
    expected = torch.tensor([sum(1 / v for v in t[i:]) for i in range(8)])
    torch.testing.assert_close(weight, expected[j], rtol=1e-4, atol=0)
    _, weight = credit.measured(one_group("--rebalance", "token", *flags), L=512)
    torch.testing.assert_close(weight, torch.ones_like(weight), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "n_masked", [lambda mask: 1 / mask.sum(), lambda mask: 1 / mask.sum(-1).float().mean()]
)
def test_division_by_the_number_of_masked_tokens_destroys_flatness(n_masked):
    """Why --loss-norm tokens and --ratio mean are refused."""
    _, flat = credit.measured(one_group("--mu", "8"), L=512)
    _, divided = credit.measured(one_group("--mu", "8"), L=512, factor=n_masked)
    assert flat.max() / flat.min() < 1 + 1e-5
    assert divided.max() / divided.min() > 2.5  # (mu / mu) sum_j' 1/j' / (mu - j + 1) at j = 1, over 1 at mu


def test_independent_masks_have_no_closed_form_without_rebalancing():
    """As in the public code: tokens first masked at the same t_j then differ by chance."""
    flags = ["--masks", "independent", "--mu", "8"]
    j, weight = credit.measured(one_group("--rebalance", "none", *flags), L=512)
    assert min(weight[j == n].std() for n in range(4)) > 0.5
    _, weight = credit.measured(one_group("--rebalance", "token", *flags), L=512)
    torch.testing.assert_close(weight, torch.ones_like(weight), rtol=1e-5, atol=0)


def test_nested_masks_only_grow_and_the_last_is_whole():
    args = one_group("--mu", "6")
    revealed = torch.zeros(4, 64)
    masked = [rebrl.masked_at(args, j, 0, [0, 1, 2, 3], revealed) for j in range(6)]
    assert all((later | ~earlier).all() for earlier, later in zip(masked, masked[1:], strict=False))
    assert masked[-1].all() and not masked[0].all()


# ---- The loss


def test_objective_is_the_clipped_surrogate_weighted_token_by_token():
    """J_j = (1/BG) sum_i (1/|o_i|) sum_k weight_k (min(rho A, clip(rho) A) - beta KL), by hand."""
    args = one_group("--eps", "0.2", "--beta", "0.5")
    mask = torch.tensor([[True, False, True], [False, True, False]])
    rho, ref = torch.tensor([1.5, 0.9, 0.5]), torch.tensor([0.1, -0.2, 0.3])
    A, weight = torch.tensor([2.0, -1.0]), torch.tensor([[1.0, 9.0, 2.0], [9.0, 3.0, 9.0]])
    log_p = rho.log()
    loss, sums = rebrl.objective(log_p, torch.zeros(3), log_p + ref, mask, A, weight, args)
    surrogate = torch.tensor([1.2 * 2, 0.9 * 2, 0.8 * -1])
    kl = ref.exp() - ref - 1
    assert loss.item() == pytest.approx(
        -(torch.tensor([1.0, 2.0, 3.0]) * (surrogate - 0.5 * kl)).sum().item()
    )
    assert sums["clip_fraction"] == 2 and sums["n"] == 3


@pytest.mark.parametrize("rebalance", HARMONIC)
def test_kl_carries_the_same_factors(rebalance):
    args = one_group("--beta", "0.3", "--mu", "4", "--rebalance", rebalance)
    masked = torch.stack([rebrl.masked_at(args, j, 0, [0, 1], torch.zeros(2, 64)) for j in range(4)])
    weight = rebrl.credit(rebalance, masked, times(4))
    log_p = torch.zeros(2, 64, requires_grad=True)
    for j, mask in enumerate(masked):
        now = log_p[mask]
        rebrl.objective(now, now.detach(), now.detach() + 0.5, mask, torch.zeros(2), weight[j], args)[
            0
        ].backward()
    slope = 0.3 * (1 - np.exp(0.5))  # of beta k3 with log_ref - log_p = 0.5
    j = masked.int().argmax(0)
    expected = torch.tensor([HARMONIC[rebalance](i, 4) * slope for i in range(1, 5)], dtype=torch.float32)
    torch.testing.assert_close(log_p.grad, expected[j])


def test_each_completion_weighs_alike_and_its_tokens_by_its_own_length(base, tmp_path, monkeypatch):
    """1/L of the paper is 1/|o_i|: L for images; a text is divided by its length to the end of text."""
    seen = []
    plain = rebrl.objective
    monkeypatch.setattr(rebrl, "objective", lambda *a: seen.append(a) or plain(*a))
    train(rebrl, base, tmp_path / "run", "--iterations", "1", "--rebalance", "first")
    weights = torch.stack([a[5] for a in seen])
    assert weights.unique().tolist() == [pytest.approx(1 / (load(str(base)).length * 2 * 4))]
    seen.clear()
    tiny.build("tiny-math").save(tmp_path / "text")
    text = load(str(tmp_path / "text"))
    lengths = []
    monkeypatch.setattr(
        rebrl, "end_of_text", lambda x, ids: lengths.append(end_of_text(x, ids)) or lengths[-1]
    )
    flags = f"--task tiny-math --model {tmp_path}/text --steps {text.length} --out {tmp_path}/run_text"
    rebrl.main([*SMALL.split(), *flags.split(), "--rebalance", "first", "--iterations", "1"])
    assert text.end_ids and len(lengths[0].unique()) > 1
    torch.testing.assert_close(seen[0][5], (1 / (lengths[0] * 8.0))[:, None].expand(8, text.length))
    inside = torch.arange(text.length) < lengths[0][:, None]
    assert not any((a[3] & ~inside).any() for a in seen)  # nothing after the end of text is trained


# ---- The script


@pytest.fixture(scope="module")
def rows(base, tmp_path_factory) -> dict:
    """name -> (trained weights, forward passes) of rows of the ablation, and of two of maskgrpo.py."""
    calls, forward = [], Policy.forward
    common = ("--remask", "random", "--gamma", "0", "--masks", "nested", "--sampler", "emerge")
    length = (*common, "--loss-norm", "length", "--time-weight")
    runs = {name: (rebrl, "--rebalance", name) for name in ("none", "first", "token")}
    runs |= {"inverse": (maskgrpo, *length, "inverse"), "constant": (maskgrpo, *length, "none")}
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "forward", lambda self, *a, **k: calls.append(1) or forward(self, *a, **k))
        for name, (script, *flags) in runs.items():
            calls.clear()
            _, weights = train(script, base, tmp_path_factory.mktemp("rows") / name, *flags)
            found[name] = weights, len(calls)
    return found


def test_two_rows_are_rows_of_maskgrpo(rows):
    """lambda = 1 and lambda = t are its --time-weight inverse and none, up to rounding: one loop, told
    twice."""

    def apart(a, b):
        return max((rows[a][0][k] - rows[b][0][k]).abs().max().item() for k in rows[a][0])

    assert apart("none", "inverse") < 3e-5 and apart("first", "constant") < 3e-5
    assert min(apart("none", "first"), apart("none", "token"), apart("first", "token")) > 1e-3


def test_rebalancing_costs_no_forward_pass(rows):
    assert rows["token"][1] == rows["first"][1] == rows["none"][1] == rows["inverse"][1] > 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--loss-norm tokens", "--loss-norm tokens: accepted is length; to divide by the number of masked"),
        ("--ratio mean", "--ratio mean: accepted is token; to divide by the number of masked"),
        ("--gamma 1", "--gamma 1.0: must be a number in [0, 1)"),
        ("--rebalance third", "invalid choice: 'third'"),
    ],
)
def test_what_undoes_the_rebalancing_is_refused(capsys, wrong, says):
    with pytest.raises(SystemExit):
        rebrl.flags(wrong.split())
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("script", [rebrl, maskgrpo])
def test_mmada_gets_the_recipe_of_the_paper(script):
    args = script.flags("--model Gen-Verse/MMaDA-8B-Base --task geneval".split())
    fixed = dict(lr=3e-6, group_size=9, mu=8, steps=12, cfg=3.5, eval_steps=32, sampler="emerge", eps=0.2)
    assert {k: getattr(args, k) for k in fixed} == fixed
    assert args.prompts * args.group_size == 72 and args.iterations == 1800
    assert args.gamma == {rebrl: 0.0, maskgrpo: 0.8}[script] and args.remask == "random"
    assert args.source["lr"] == "paper" and args.source["eps"] == "ours"
    assert script.flags("--model Gen-Verse/MMaDA-8B-Base --task geneval --lr 1e-6".split()).lr == 1e-6


# ---- Guidance: rollout and score are one policy, or declared two


@pytest.mark.parametrize("sampler", ["emerge", "maskgit"])
@pytest.mark.parametrize("score", ["guided", "conditional"])
def test_first_ratio_is_one_guided_or_not(base, tmp_path, monkeypatch, sampler, score):
    """Report D2: old and new are scored alike, of the distribution that --score names."""
    scored, forward = set(), Policy.forward

    def spy(self, *a, target=None, cfg=0.0, **k):
        if target is not None:
            scored.add(cfg)
        return forward(self, *a, target=target, cfg=cfg, **k)

    monkeypatch.setattr(Policy, "forward", spy)
    flags = ["--cfg", "3", "--score", score, "--sampler", sampler]
    metrics, _ = train(rebrl, base, tmp_path / "run", *flags)
    assert all(m["ratio_max_first"] == 1.0 for m in metrics)
    assert scored == {3.0 if score == "guided" else 0.0}


def test_gradient_of_a_guided_score_reaches_both_rows(base):
    """Report D2: logits (1 + w) cond - w uncond, and neither is held fixed."""
    policy = load(str(base))
    prompt = policy.encode(["a red square"])
    null, x_t = policy.unconditional(prompt), torch.full((1, policy.length), policy.mask_id)
    words = policy.backbone.get_input_embeddings().weight
    rows = {}
    for name, w in (("conditional", 0.0), ("guided", 3.0)):
        log_p = policy(prompt, x_t, target=torch.zeros_like(x_t), null=null, cfg=w)
        rows[name] = torch.autograd.grad(log_p.sum(), words)[0]
    red = prompt.ids[0, -2]
    assert rows["guided"][red].abs().sum() > 0
    # begin and end stand in both rows; with the conditional row alone their gradient is another
    assert not torch.allclose(rows["guided"][policy.begin_id], 4 * rows["conditional"][policy.begin_id])


@pytest.mark.parametrize("sampler", ["emerge", "maskgit"])
def test_unconditional_row_keeps_the_text_length_and_the_current_image(base, sampler):
    """Report D1: at every step the rows differ in the words alone; an empty prompt makes guidance idle."""
    policy = load(str(base))
    prompt = policy.encode(["a red square", "two crosses"])
    settings = dict(sampler=sampler, steps=4, temperature=1.0, cfg=3.0, cfg_until=1.0, schedule_name="cosine")
    pairs, hidden = [], policy.hidden
    policy.hidden = lambda p, x: pairs.append((p, x)) or hidden(p, x)
    noise = [generator("test", n) for n in range(2)]
    out = sample(policy, prompt, noise, settings, keep_trajectory=True)
    assert len(pairs) == 4
    for (both, x_t), (shown, _) in zip(pairs, out.trajectory, strict=True):
        assert torch.equal(both.ids[:2], prompt.ids) and both.ids.shape == (4, prompt.ids.shape[1])
        assert torch.equal(x_t[:2], shown) and torch.equal(x_t[2:], shown)
        assert (both.ids[2:] == policy.encode([""]).ids).all()
    empty = policy.encode(["", ""])
    pictures = []
    for w in (0.0, 3.0):
        noise = [generator("test", n) for n in range(2)]
        pictures.append(sample(policy, empty, noise, settings | {"cfg": w}).x_0)
    assert torch.equal(*pictures)


# ---- The figure


def test_exploration_potential_starts_all_masked_and_ends_in_the_picture(base):
    policy, task = load(str(base)), tiny_geneval.task()
    args = rebrl.flags(["--steps", "4", "--cfg", "1", "--micro-batch", "3"])
    seen = []

    def edges(rows, images):
        seen.append(images)
        return {"correct": np.array([image.float().mean().item() for image in images])}

    rows = task.rows("test", None)[:4]
    t, reward = credit.potential(policy, replace(task, reward=edges), rows, args)
    assert t[0] == 1 and t[-1] == 0 and (np.diff(t) < 0).all() and len(t) == len(reward) == 5
    last = [*seen[4], *seen[9]]  # two batches, five states each
    noise = [generator("potential", args.seed, n) for n in range(4)]
    settings = dict(
        sampler="emerge", steps=4, temperature=1.0, cfg=1.0, cfg_until=1.0, schedule_name="cosine"
    )
    x_0 = sample(policy, policy.encode([row["prompt"] for row in rows]), noise, settings).x_0
    assert torch.equal(torch.stack(last), policy.decode(x_0))
    assert reward[-1] == pytest.approx(np.mean([image.float().mean().item() for image in last]))


def test_report_draws_the_credit(tmp_path):
    command = [sys.executable, "-m", "eval.report", "credit", "--no-rollouts", "--mu", "4"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "credit.png"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "| none | 8.333 (8.333) | 4.333 (4.333) | 2.333 (2.333) | 1.000 (1.000) |" in done.stdout
    assert (tmp_path / "credit.png").read_bytes()[1:4] == b"PNG"
