"""common.py: masks, ELBO, end of text, advantage and KL against the recorded numbers and by enumeration."""

import itertools
import json
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import shared
from safetensors.torch import load_file
from toys import Pairwise, all_masks, any_order_bound, golden_llada, whole

from common import (
    World,
    elbo,
    end_of_text,
    fading_keep,
    generator,
    group_advantage,
    import_file,
    k3,
    log_likelihood,
    prompt_indices,
    remask,
    times,
)

GOLDEN = Path(__file__).parent / "golden"
RECORDED = json.loads((GOLDEN / "maskgrpo_formulas.json").read_text())
TENSORS = load_file(GOLDEN / "maskgrpo_formulas.safetensors")
CAP = 0.999  # the public code never masks everything; ours does at j = mu


def named(case):
    return case["name"]


# ---- A file of the user's

OWN = """
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Item:
    names: list[str] = field(default_factory=list)


def make():
    return Item(["a"])
"""


def test_a_users_file_can_hold_what_needs_a_module_of_its_own(tmp_path):
    """A dataclass with postponed annotations, and pickle; named twice, it is one module; its name, here that
    of a module of Python's, stays free."""
    (tmp_path / "json.py").write_text(OWN)
    module = import_file(f"{tmp_path}/json.py", "--task", "make")
    assert pickle.loads(pickle.dumps(module.make())) == module.make()
    assert import_file(f"{tmp_path}/../{tmp_path.name}/json.py", "--reward", "Item") is module
    assert sys.modules["json"] is json
    (tmp_path / "json.py").write_text(OWN.replace('"a"', '"b"'))
    assert import_file(f"{tmp_path}/json.py", "--task", "make").make().names == ["b"]


@pytest.mark.parametrize("wrong", ["import nowhere_at_all", "1 / 0", "def f(:", "raise ValueError", "f = 1"])
def test_a_users_file_that_fails_is_named_with_its_line(tmp_path, wrong):
    file = tmp_path / "own.py"
    file.write_text(f"x = 1\n{wrong}\n")
    known = set(sys.modules)
    with pytest.raises(ValueError, match="--task .*own.py(, line 2: |: defines no function 'f')"):
        import_file(str(file), "--task", "f")
    assert "=" in wrong or set(sys.modules) == known


# ---- Masks


@pytest.mark.parametrize("case", RECORDED["ratio_table"], ids=lambda c: f"{c['gamma']}-{c['mu']}")
def test_times_are_the_public_ratios_without_their_cap(case):
    """Golden ratio_table. The public code stops at 0.999; our last t is 1."""
    t = times(case["mu"], case["gamma"])
    assert [min(v, CAP) for v in t] == pytest.approx(case["ratios"], abs=1e-12)
    assert t[-1] == 1.0


@pytest.mark.parametrize("case", RECORDED["remask_ar_2d_prompt_index"], ids=named)
def test_fading_remask_equals_the_public_one_told_the_prompt_length(case):
    """Golden remask2d: curve and mask, where the public function is given a 2-D prompt index."""
    prompt, L = case["L_prompt"], case["L_o"]
    t = min(times(case["mu"], case["gamma"])[case["j"]], CAP)
    u = TENSORS[f"{case['name']}.random_matrix"][:, prompt:]
    keep = TENSORS[f"{case['name']}.keep_prob"][prompt:]
    torch.testing.assert_close(fading_keep(t, L).float(), keep, rtol=0, atol=1e-6)
    to_mask = TENSORS[f"{case['name']}.to_mask"].bool()
    assert torch.equal(remask("fading", t, u), to_mask[:, prompt:]) and not to_mask[:, :prompt].any()


@pytest.mark.parametrize("case", [c for c in RECORDED["remask"] if c["method"] == "random"], ids=named)
def test_random_remask_equals_the_public_one(case):
    """Golden remask.*, random kinds."""
    t = min(times(case["mu"], case["gamma"])[case["j"]], CAP)
    u, to_mask = (
        TENSORS[f"{case['name']}.{name}"][:, case["L_prompt"] :] for name in ("random_matrix", "to_mask")
    )
    assert torch.equal(remask("random", t, u), to_mask.bool())


def test_random_remask_equals_the_public_one_for_images():
    """Golden remask_t2i: the image is positions -9..-2, after it comes <|eoi|>."""
    u, to_mask = (TENSORS[f"remask_t2i.{name}"][:, -9:-1] for name in ("random_matrix", "to_mask"))
    assert torch.equal(remask("random", RECORDED["remask_t2i"]["ratio"], u), to_mask.bool())


@pytest.mark.parametrize(
    "case",
    [c for c in RECORDED["remask"] if c["method"] == "arlike" and c["L_prompt"] and c["ratio"] < CAP],
    ids=named,
)
def test_fading_remask_is_not_stretched_over_the_prompt_as_in_the_public_trainer(case):
    """A fault, golden remask.* arlike: the trainer passes a 1-D prompt index, whose length it reads as 1. The
    curve then runs over prompt and completion, so the completion is masked more than asked for."""
    prompt, L, t = case["L_prompt"], case["L_o"], case["ratio"]
    public = TENSORS[f"{case['name']}.keep_prob"][prompt:]
    stretched = fading_keep(t, prompt + L - 1)[-L:].float()
    torch.testing.assert_close(public, stretched, rtol=0, atol=1e-6)
    right = torch.linspace(1, 0, L) * (1 - t) * L / torch.linspace(1, 0, L).sum()
    torch.testing.assert_close(fading_keep(t, L).float(), right.clamp(max=1), rtol=0, atol=1e-6)
    assert case["mean_mask_prob_over_completion"] > 1 - fading_keep(t, L).mean() + 0.03


def test_the_public_trainer_masks_other_tokens_than_fading_does():
    """A fault: remask.0 and remask2d.0 are the same call but for the shape of the prompt index."""
    u = TENSORS["remask.0.random_matrix"]
    assert torch.equal(u, TENSORS["remask2d.0.random_matrix"])
    ours = remask("fading", 0.125, u[:, 5:])
    assert torch.equal(ours, TENSORS["remask2d.0.to_mask"][:, 5:].bool())
    assert not torch.equal(ours, TENSORS["remask.0.to_mask"][:, 5:].bool())


@pytest.mark.parametrize("L", [1, 2, 7, 24, 256])
@pytest.mark.parametrize("t", [0.5, 0.6, 0.85, 1.0])
def test_fading_has_mean_rate_t_where_nothing_is_clipped(t, L):
    if L == 1 and t < 1:  # linspace(1, 0, 1) is 1: one token keeps with probability 1 - t
        assert fading_keep(t, 1).tolist() == pytest.approx([1 - t])
        return
    keep = fading_keep(t, L)
    assert 1 - keep.mean().item() == pytest.approx(t, abs=1e-12)
    assert (keep.diff() <= 0).all() and keep[-1] == 0
    n = 2000  # at u = 0.5/n, 1.5/n, ... each token is masked in its share of the rows, up to one row
    u = ((torch.arange(n, dtype=torch.float64) + 0.5) / n)[:, None].expand(n, L)
    torch.testing.assert_close(remask("fading", t, u).double().mean(0), 1 - keep, rtol=0, atol=1 / n)


def test_fading_below_one_half_is_clipped_and_never_masks_the_first_token():
    keep = fading_keep(0.125, 16)
    assert keep.max() == 1 and 1 - keep.mean() > 0.125
    assert not remask("fading", 0.125, torch.full((1, 16), 1 - 2**-53, dtype=torch.float64))[:, 0].any()


@pytest.mark.parametrize("kind", ["fading", "random", "full", "trace"])
def test_everything_is_masked_at_t_one(kind):
    u = torch.stack([torch.zeros(8), torch.full((8,), 1 - 2**-24)]).double()
    assert remask(kind, 1.0, u, torch.arange(8).expand(2, 8)).all()


def test_trace_masks_what_was_revealed_last():
    """The ceil(t L) latest tokens, those of one step together."""
    u = torch.zeros(1, 6)
    revealed = torch.tensor([[0, 0, 2, 1, 1, 3]])
    masked = {t: remask("trace", t, u, revealed)[0].int().tolist() for t in (0.1, 1 / 3, 0.34, 0.5, 0.7, 1.0)}
    assert masked[0.1] == [0, 0, 0, 0, 0, 1]
    assert masked[1 / 3] == [0, 0, 1, 0, 0, 1]  # 2 tokens: 1/3 * 6 is not rounded up to 3
    assert masked[0.34] == masked[0.5] == [0, 0, 1, 1, 1, 1]  # the third and the fourth came in one step
    assert masked[0.7] == masked[1.0] == [1] * 6


def test_an_unknown_remask_is_an_error_that_names_the_accepted_ones():
    with pytest.raises(ValueError, match="--remask ar: accepted are fading, random, trace, full"):
        remask("ar", 0.5, torch.zeros(1, 2))


# ---- ELBO

X_0 = torch.tensor([[0, 2, 1]])


@pytest.fixture(scope="module")
def toy():
    policy = Pairwise(K=3, L=3)
    return policy, policy.encode(["1 2"]), any_order_bound(policy, policy.encode(["1 2"]), X_0)


def test_elbo_over_k_masked_tokens_averages_to_the_bound(toy):
    """k ~ U{1..L}, any k tokens, t = k/L: the exact expectation is the mean over all orders of decoding."""
    policy, prompt, bound = toy
    masks = all_masks(3)
    k = masks.sum(-1)
    terms = elbo(policy, prompt[[0] * 7], X_0.expand(7, 3), masks, k / 3).detach().double()
    chance = torch.tensor([1 / (3 * math.comb(3, n)) for n in k.tolist()], dtype=torch.float64)
    assert chance.sum().item() == pytest.approx(1)
    assert (chance * terms).sum().item() == pytest.approx(bound, abs=1e-5)


def test_elbo_over_t_averages_to_the_bound(toy):
    """t ~ U(0, 1], each token masked with probability t: a polynomial in t, so Gauss-Legendre is exact."""
    policy, prompt, bound = toy
    masks = all_masks(3)
    k = masks.sum(-1)
    expected = 0.0
    for node, weight in zip(*np.polynomial.legendre.leggauss(4), strict=True):
        t = (node + 1) / 2
        terms = elbo(policy, prompt[[0] * 7], X_0.expand(7, 3), masks, torch.full((7,), t))
        expected += weight / 2 * (t**k * (1 - t) ** (3 - k) * terms).sum().item()
    assert expected == pytest.approx(bound, abs=1e-5)


def test_the_t_grid_of_the_rl_script_does_not_average_to_the_bound(toy):
    """And does not claim to: t_j = j/mu leaves out t < 1/mu, where 1/t is largest."""
    policy, prompt, bound = toy
    masks, on_grid = all_masks(3), 0.0
    k = masks.sum(-1)
    for t in times(4):
        terms = elbo(policy, prompt[[0] * 7], X_0.expand(7, 3), masks, torch.full((7,), t))
        on_grid += (t**k * (1 - t) ** (3 - k) * terms).sum().item() / 4
    assert abs(on_grid - bound) > 0.05


def test_log_likelihood_of_128_draws_lies_within_three_standard_errors_of_the_bound(toy):
    """J3, J1: the estimate named log-likelihood is the bound's own, with its draws said."""
    policy, prompt, bound = toy
    estimates = log_likelihood(policy, prompt[[0] * 200], X_0.expand(200, 3), 128, generator("test"))
    se = estimates.std().item()  # of one row's 128 draws
    assert abs(estimates[0].item() - bound) < 3 * se
    assert abs(estimates.mean().item() - bound) < 3 * se / math.sqrt(200)
    assert se < 0.2 * abs(bound)


@pytest.mark.parametrize("i", range(4))
def test_elbo_of_the_recorded_masks_is_the_official_log_likelihood(tmp_path, i):
    """Golden ll.*: LLaDA's get_log_likelihood on its recorded draws, guided (case 2) too."""
    policy = golden_llada(tmp_path, 10)
    ref = load_file(shared("golden/maskgrpo_estimator.safetensors"))
    case = json.loads(shared("golden/maskgrpo_estimator.json").read_text())["log_likelihood"][i]
    noisy, t = ref[f"ll.{i}.noisy"].view(-1, 16), ref[f"ll.{i}.mask_ratio"].flatten()
    prompt, x_0 = whole(ref["ll.prompt"].expand(len(t), 6)), ref["ll.answer"].expand(len(t), 10)
    mask = noisy[:, 6:] == policy.mask_id
    assert torch.equal(torch.where(mask, policy.mask_id, x_0), noisy[:, 6:])
    terms = elbo(policy, prompt, x_0, mask, t, policy.unconditional(prompt), case["cfg_scale"])
    assert terms.mean().item() == pytest.approx(case["estimate"], rel=1e-5)


# ---- End of text


def test_a_response_ends_with_its_first_end_id_of_any_kind():
    """A2, B3, B4: the first of all end ids counts, itself included, whatever the padding id is; 254 and 253
    are LLaDA's two."""
    x = torch.tensor([[1, 254, 2, 253], [1, 2, 3, 3], [253, 253, 253, 253], [5, 253, 253, 3]])
    assert end_of_text(x, (253, 254)).tolist() == [2, 4, 1, 2]
    assert end_of_text(torch.tensor([[1, 2, 9, 3, 9]]), (9,)).tolist() == [3]


def test_images_have_no_end():
    assert end_of_text(torch.tensor([[0, 1], [1, 0]]), ()).tolist() == [2, 2]


# ---- Advantage, KL


def test_group_advantage_equals_the_public_one():
    """Golden loss_group: two groups of four, the second of equal rewards."""
    case = RECORDED["loss_group"]
    rewards = torch.tensor(case["rewards"], dtype=torch.float64).view(-1, case["G"])
    A = group_advantage(rewards)
    torch.testing.assert_close(A.flatten().float(), torch.tensor(case["advantages"]), rtol=0, atol=1e-6)
    assert A[1].tolist() == [0.0] * 4


def test_advantages_by_group_batch_and_not_at_all():
    """G1: the reported numbers for each choice of the standard deviation and of its degrees of freedom."""
    r = torch.tensor([[1, 0], [0.6, 0.5]], dtype=torch.float64)
    assert group_advantage(r)[:, 0].tolist() == pytest.approx([0.707, 0.707], abs=2e-3)
    assert group_advantage(r, "batch").flatten().tolist() == pytest.approx(
        [1.215, -1.215, 0.122, -0.122], abs=1e-3
    )
    assert group_advantage(r, "none").flatten().tolist() == pytest.approx([0.5, -0.5, 0.05, -0.05])
    one = torch.tensor([[1, 0, 0, 0]], dtype=torch.float64)
    assert group_advantage(one, eps=1e-4)[0, 0].item() == pytest.approx(1.4997, abs=1e-4)
    assert group_advantage(one, eps=1e-4, ddof=0)[0, 0].item() == pytest.approx(1.7317, abs=1e-4)
    assert group_advantage(100 * one, "none", clip=5.0).tolist() == [[5.0, -5.0, -5.0, -5.0]]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_no_advantage(std):
    """G3: seven times 0.1 has a rounding error for a spread, which a division would blow up."""
    r = torch.full((2, 7), 0.1, dtype=torch.float32)
    assert group_advantage(r, std).abs().max() == 0
    assert r.sub(r.mean(-1, keepdim=True)).abs().max() > 0  # the error that is not let through


def test_small_groups_of_a_rare_reward_have_no_signal():
    """G5: at a success rate of 0.182, .702, .449, .201 of the groups of 2, 4, 8 have advantages of 0."""
    for G, share in ((2, 0.702), (4, 0.449), (8, 0.201)):
        r = torch.tensor(list(itertools.product((0.0, 1.0), repeat=G)))
        chance = (0.182 ** r.sum(-1)) * (0.818 ** (G - r.sum(-1)))
        silent = (group_advantage(r) == 0).all(-1)
        assert chance[silent].sum().item() == pytest.approx(share, abs=2e-3)


def test_a_group_of_one_is_an_error():
    """G3."""
    with pytest.raises(ValueError, match="--group-size must be at least 2"):
        group_advantage(torch.ones(3, 1))


def test_k3_has_the_value_of_the_kl_and_its_own_gradient():
    """H1: 0.3679 and 0.7183 at d = -1 and 1; its mean is KL(p || ref). The gradient of that KL is the mean
    gradient of ratio * k3; plain k3, which the loss has as all GRPO code, gives KL(ref || p)'s instead."""
    zero = torch.tensor(0.0)
    assert [k3(zero, torch.tensor(d)).item() for d in (-1.0, 1.0, 0.0)] == pytest.approx(
        [0.3679, 0.7183, 0], abs=5e-5
    )
    z = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    log_ref = torch.tensor([-3.0, 0.5], dtype=torch.float64).log_softmax(0)
    log_p = z.log_softmax(0)
    p = log_p.exp().detach()
    kl = (log_p.exp() * (log_p - log_ref)).sum()
    assert (p * k3(log_p, log_ref)).sum().item() == pytest.approx(kl.item())

    def gradient(value):
        return torch.autograd.grad(value, z, retain_graph=True)[0]

    ratio = (log_p - log_p.detach()).exp()
    torch.testing.assert_close(gradient((p * ratio * k3(log_p, log_ref)).sum()), gradient(kl))
    reverse = (log_ref.exp() * (log_ref - log_p)).sum()
    plain = gradient((p * k3(log_p, log_ref)).sum())
    torch.testing.assert_close(plain, gradient(reverse))
    assert (plain - gradient(kl)).abs().max() > 1e-2


# ---- Randomness, shares


def test_generators_of_unlike_keys_are_unlike_and_of_like_keys_alike():
    """I1: each sample, iteration, seed and purpose has a stream of its own; no key is another's prefix."""
    keys = [
        (kind, seed, iteration, n)
        for kind in ("rollout", "mask", "eval")
        for seed, iteration, n in itertools.product(range(3), repeat=3)
    ]
    drawn = [
        torch.rand(4, generator=generator(*key))
        for key in [*keys, ("rollout", 0, 0), ("rollout", 0, 0, 0, 0)]
    ]
    assert len({tuple(row.tolist()) for row in drawn}) == len(keys) + 2
    assert torch.equal(drawn[0], torch.rand(4, generator=generator(*keys[0])))


def test_prompt_order_depends_on_seed_and_iteration_alone():
    """I2: what other generators drew, and where the run was resumed, leave the prompts as they are."""
    first = [prompt_indices(10, 4, i, seed=3) for i in range(5)]
    torch.rand(100)
    torch.rand(100, generator=generator("rollout", 3, 0, 0))
    assert [prompt_indices(10, 4, i, seed=3) for i in (4, 1)] == [first[4], first[1]]
    assert [prompt_indices(10, 4, i, seed=4) for i in range(5)] != first
    both_epochs = sum(first, [])
    assert sorted(both_epochs[:10]) == sorted(both_epochs[10:]) == list(range(10))
    assert both_epochs[:10] != both_epochs[10:]


@pytest.mark.parametrize("n, size", [(8, 1), (8, 2), (7, 3), (5, 4), (1, 3)])
def test_every_index_has_weight_one_on_one_rank_and_all_ranks_work_alike(n, size):
    shares = [World(rank, size, torch.device("cpu")).share(n) for rank in range(size)]
    assert len({len(indices) for indices, _ in shares}) == 1
    counted = [i for indices, weights in shares for i, w in zip(indices, weights, strict=True) if w]
    assert counted == list(range(n))
