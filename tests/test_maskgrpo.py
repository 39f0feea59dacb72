"""maskgrpo.py: its loss against the recorded one and by enumeration, and what one iteration feeds the model.
Processes and resume are in test_run.py, flags in test_flags.py."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import shared
from safetensors.torch import load_file
from toys import Pairwise, all_masks, golden_llada, whole

import maskgrpo
import models
import samplers
from common import World, end_of_text, fading_keep, generator, times
from maskgrpo import flags, loss_weight, masked_at, objective, prompt_at
from models import tiny
from models.policy import Policy

GOLDEN = Path(__file__).parent / "golden"
RECORDED = json.loads((GOLDEN / "maskgrpo_formulas.json").read_text())
TENSORS = load_file(GOLDEN / "maskgrpo_formulas.safetensors")
ALONE = World(0, 1, torch.device("cpu"))


def loss_of(log_p, log_old, log_ref, mask, A, args, t=0.5, length=None):
    """The script's loss of one update [B, L] in one micro-batch, and its sums for the log."""
    length = torch.full(A.shape, mask.shape[1]) if length is None else length
    log_p, log_old, log_ref = (None if x is None else x[mask] for x in (log_p, log_old, log_ref))
    return objective(log_p, log_old, log_ref, mask, A, t, loss_weight(args, mask, length, ALONE), args)


def flags_of(case):
    return flags(["--eps", str(case["epsilon"]), "--beta", str(case["beta"])])


def recorded_loss(case, mask):
    """(loss, gradient on the log-probabilities, sums) of ours on the recorded inputs."""
    log_p = TENSORS["loss.logps"].clone().requires_grad_(True)
    old = log_p.detach() if case["name"] == "grpo_onpolicy" else TENSORS["loss.old_logps"]
    ref = TENSORS["loss.ref_logps"] if case["beta"] else None
    A = TENSORS["loss.advantages_all"][slice(4, 8) if case["advantages"] == "all[4:8]" else slice(0, 4)]
    loss, sums = loss_of(log_p, old, ref, mask, A, flags_of(case))
    (gradient,) = torch.autograd.grad(loss, log_p)
    return loss, gradient, sums


CASES = {c["name"]: c for c in RECORDED["loss"]}
PER_STEP = [c for name, c in CASES.items() if name not in ("grpo_mu_mask", "grpo_all_zero_mask")]


# ---- The loss


@pytest.mark.parametrize("case", PER_STEP, ids=lambda c: c["name"])
def test_loss_and_gradient_equal_the_public_ones(case):
    """Golden loss.grpo_*: value, gradient and mean KL, with rows of no masked token and of no advantage."""
    loss, gradient, sums = recorded_loss(case, TENSORS[case["mask"]].bool())
    assert loss.item() == pytest.approx(case["loss"], abs=1e-6)
    torch.testing.assert_close(gradient, TENSORS[f"loss.{case['name']}.grad"], rtol=0, atol=1e-6)
    if case["kl"] is not None:
        assert sums["kl"] / sums["n"] == pytest.approx(case["kl"], abs=1e-6)


def test_a_token_is_not_weighed_by_the_number_of_iterations_that_mask_it():
    """A fault, golden loss.grpo_mu_mask: the public loss broadcasts the masks of all iterations. Ours at
    iteration 1 is the sum over the tokens of mask 1, over their number."""
    case, masks = CASES["grpo_mu_mask"], TENSORS["loss.mask_mu"].bool()
    log_p, old, ref = (TENSORS[f"loss.{name}"] for name in ("logps", "old_logps", "ref_logps"))
    A = TENSORS["loss.advantages_all"][:4, None]
    rho, d = (log_p - old).exp(), ref - log_p
    token = -torch.minimum(rho * A, rho.clamp(0.8, 1.2) * A) + 0.01 * (d.exp() - d - 1)
    assert (token * masks).sum().item() / masks.sum().item() == pytest.approx(case["loss"], abs=1e-6)
    right = token[masks[1]].mean().item()
    ours, _, _ = recorded_loss(case, masks[1])
    assert ours.item() == pytest.approx(right, abs=1e-6) and abs(right - case["loss"]) > 0.01


@pytest.mark.parametrize("ratio", ["token", "sequence", "mean"])
def test_an_update_without_any_masked_token_has_loss_zero(ratio):
    """B6, golden loss.grpo_all_zero_mask: 0/0 in the public code."""
    log_p = torch.zeros(4, 6, requires_grad=True)
    mask = TENSORS["loss.grpo_all_zero_mask.mask"].bool()
    loss, sums = loss_of(
        log_p, log_p.detach(), log_p.detach(), mask, torch.ones(4), flags(["--ratio", ratio])
    )
    loss.backward()
    assert loss.item() == 0 and log_p.grad.abs().max() == 0 and sums == dict(kl=0, clip_fraction=0, n=0)


def test_clip_fraction_counts_the_tokens_that_the_clip_acts_on():
    """A fault, golden clip_ratio: the public count is of the other side, where the clip does not act. Ours
    are the tokens that get no gradient."""
    case = CASES["grpo_b"]  # beta 0
    mask = TENSORS["loss.mask"].bool()
    _, gradient, sums = recorded_loss(case, mask)
    rho = (TENSORS["loss.logps"] - TENSORS["loss.old_logps"]).exp()
    A = TENSORS["loss.advantages_all"][:4, None].expand(4, 6)
    right = ((A > 0) & (rho > 1.2) | (A < 0) & (rho < 0.8)) & mask
    other = ((A > 0) & (rho < 0.8) | (A < 0) & (rho > 1.2)) & mask
    assert sums["clip_fraction"] == right.sum() and torch.equal(right, (gradient == 0) & mask)
    assert other.sum() / mask.sum() == pytest.approx(case["clip_ratio"]) and right.sum() != other.sum()


def test_the_first_loss_is_zero_by_centring_and_its_gradient_is_not():
    """F3."""
    log_p = torch.full((2, 3), -1.0, requires_grad=True)
    A, mask = torch.tensor([0.7, -0.7]), torch.ones(2, 3).bool()
    loss, _ = loss_of(log_p, log_p.detach(), None, mask, A, flags(["--beta", "0"]))
    loss.backward()
    assert loss.item() == 0 and log_p.grad.norm() > 0.1


def test_the_advantage_does_not_multiply_the_kl():
    """Eq. 11 prints it so; then a bad completion would be pushed away from the reference."""
    log_p = torch.full((1, 2), -1.0, requires_grad=True)
    args = flags(["--beta", "0.5"])
    for A in (-2.0, 0.0, 2.0):
        loss, _ = loss_of(
            log_p, log_p.detach(), log_p.detach() + 1, torch.ones(1, 2).bool(), torch.tensor([A]), args
        )
        assert loss.item() == pytest.approx(-A + 0.5 * (math.e - 2), abs=1e-6)


def test_loss_norms_are_the_global_token_mean_and_the_mean_over_completions():
    """F2: 2 tokens of loss 1 and 8 of loss 0: 0.2 over all tokens; 0.5 where each completion counts alike."""
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 8]).bool()
    length, A, zeros = mask.sum(-1), torch.tensor([-1.0, 0.0]), torch.zeros(2, 8)
    losses = [
        loss_of(
            zeros,
            zeros,
            None,
            mask,
            A,
            flags(f"--beta 0 --prompts 1 --group-size 2 --loss-norm {n}".split()),
            1,
            length,
        )
        for n in ("tokens", "length")
    ]
    assert [loss.item() for loss, _ in losses] == pytest.approx([0.2, 0.5])


@pytest.mark.parametrize("norm", ["tokens", "length"])
def test_one_normaliser_counts_the_tokens_that_the_loss_sums(norm):
    """B6: two completions of 4, the second left out: over 4 tokens, not 8; with length still over B G."""
    mask = torch.tensor([[True] * 4, [False] * 4])
    args = flags(f"--prompts 1 --group-size 2 --loss-norm {norm}".split())
    weight = loss_weight(args, mask, torch.tensor([4, 4]), ALONE)
    assert weight[0].item() == pytest.approx({"tokens": 1 / 4, "length": 1 / 8}[norm])


def test_the_sequence_ratio_is_of_the_elbo_and_the_mean_ratio_of_its_tokens():
    """Eq. 9, 10 by hand: t 0.5, one completion of two masked tokens, one of none, one of three."""
    new = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0], [-0.5, -1.5, -0.1]])
    old, ref = new - torch.tensor([[0.02, 0.03, 9.0], [9.0] * 3, [-0.01, 0.02, 0.05]]), new + 0.01
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]]).bool()
    A = torch.tensor([1.0, 5.0, -2.0])
    for ratio, scale in (("sequence", (2.0, 2.0)), ("mean", (1 / 2, 1 / 3))):
        args = flags(["--ratio", ratio, "--beta", "0.1"])
        expected = 0.0
        for a, change, n, s in ((1.0, 0.05, 2, scale[0]), (-2.0, 0.06, 3, scale[1])):
            d = 0.01 * n * s
            expected -= (a * math.exp(change * s) - 0.1 * (math.exp(d) - d - 1)) / 2
        loss, sums = loss_of(new, old, ref, mask, A, args, t=0.5)
        assert loss.item() == pytest.approx(expected, abs=1e-6) and sums["n"] == 2
    with pytest.raises(SystemExit):  # l has 1/t already
        flags("--ratio sequence --time-weight inverse".split())


# ---- The whole update on the recorded LLaDA


def scaled(policy, factor):
    for block in policy.backbone.model.layers:
        block.mlp.up_proj.weight.data.mul_(factor)
    return policy


@pytest.mark.parametrize("kind", ["arlike", "random"])
def test_an_update_of_llada_equals_the_public_one(tmp_path, kind):
    """Golden e2e.*.mask_of_iteration_only.*: old, reference and new log-probabilities, loss, KL, and the
    gradients on a projection and the final norm. (e2e.official has the masks of all iterations broadcast.)"""
    ref = load_file(shared("golden/maskgrpo_estimator.safetensors"))
    case = json.loads(shared("golden/maskgrpo_estimator.json").read_text())["e2e"][kind]
    ref = {k.removeprefix(f"e2e.{kind}."): v for k, v in ref.items() if k.startswith(f"e2e.{kind}.")}
    prompt, x_0 = whole(ref["prompt_ids"]), ref["completion_ids"]
    old, new, frozen = (scaled(golden_llada(tmp_path / str(f), 8), f) for f in (1.1, 1.15, 1.0))
    args = flags(["--eps", str(case["epsilon"]), "--beta", str(case["beta"])])
    A, everyone = ref["advantages"], slice(0, 4)
    torch.testing.assert_close(
        maskgrpo.group_advantage(torch.tensor([case["rewards"]]))[0], A, rtol=0, atol=1e-6
    )
    for j, t in enumerate(times(case["mu"], case["min_mask_rate"])):
        mask = ref["completion_mask_all_iterations"][j].bool()  # no end of text in it
        state = (prompt, torch.where(mask, new.mask_id, x_0), mask)
        with torch.no_grad():
            log_old, log_ref = (maskgrpo.log_prob(p, state, everyone, x_0, None, 0.0) for p in (old, frozen))
        log_p = maskgrpo.log_prob(new, state, everyone, x_0, None, 0.0)
        recorded = (ref["old_logps"][j], ref["ref_logps"][j], ref[f"new_logps.{j}"])
        for ours, theirs in zip((log_old, log_ref, log_p), recorded, strict=True):
            torch.testing.assert_close(ours, theirs[mask], rtol=0, atol=2e-5)
        weight = loss_weight(args, mask, torch.full((4,), 8), ALONE)
        loss, sums = objective(log_p, log_old, log_ref, mask, A, t, weight, args)
        new.zero_grad()
        loss.backward()
        theirs = {
            k.rpartition(".")[2]: v for k, v in ref.items() if k.startswith(f"mask_of_iteration_only.{j}.")
        }
        assert loss.item() == pytest.approx(theirs["loss"].item(), abs=1e-5)
        step = case["steps"][2 * j + 1]
        assert step["variant"] == "mask_of_iteration_only"
        assert sums["kl"] / sums["n"] == pytest.approx(step["kl"], abs=1e-5)
        trunk = new.backbone.model
        for name, p in (("blocks0_q_proj", trunk.layers[0].self_attn.q_proj), ("ln_f", trunk.norm)):
            torch.testing.assert_close(p.weight.grad, theirs[f"grad_{name}"], rtol=0, atol=2e-5)


# ---- Truth by enumeration


def chance_of(kind, t, mask):
    """Exact probability [N] of masks [N, L] under Rev(o, t)."""
    L = mask.shape[-1]
    shown = fading_keep(t, L) if kind == "fading" else torch.full((L,), 1 - t, dtype=torch.float64)
    return torch.where(mask, 1 - shown, shown).prod(-1)


@pytest.mark.parametrize("kind", ["fading", "random"])
@pytest.mark.parametrize("norm", ["tokens", "length"])
def test_the_mean_gradient_over_all_masks_is_the_sum_written_out(kind, norm):
    """Two completions, three tokens, all 8 x 8 pairs of masks with their exact probabilities: the script's
    loss at theta = old, against the sum over masks with the gradients of the logits by hand. Each pair has
    the normaliser that its draw has; the reference is another model."""
    L, K, t = 3, 3, 0.6
    policy, reference = Pairwise(K, L), Pairwise(K, L, seed=1)
    prompt = policy.encode(["1 2", "3"])
    x_0, A = torch.tensor([[0, 2, 1], [1, 1, 0]]), torch.tensor([1.5, -0.5])
    length = torch.tensor([3, 2])  # the last token of the second comes after its end
    inside = torch.arange(L) < length[:, None]
    args = flags(f"--beta 0.3 --prompts 1 --group-size 2 --loss-norm {norm}".split())
    masks = torch.cat([torch.zeros(1, L).bool(), all_masks(L)])
    policy.zero_grad()
    by_hand, total = torch.zeros_like(policy.table), 0.0
    for pair in itertools.product(masks, repeat=2):
        mask = torch.stack(pair)
        chance = chance_of(kind, t, mask).prod().item()
        total += chance
        x_t, loss_mask = torch.where(mask, policy.mask_id, x_0), mask & inside
        state = (prompt, x_t, loss_mask)
        log_p = maskgrpo.log_prob(policy, state, slice(0, 2), x_0, None, 0.0)
        log_ref = maskgrpo.log_prob(reference, state, slice(0, 2), x_0, None, 0.0).detach()
        weight = loss_weight(args, loss_mask, length, ALONE)
        loss, _ = objective(log_p, log_p.detach(), log_ref, loss_mask, A, t, weight, args)
        (chance * loss).backward()

        with torch.no_grad():
            p = policy(prompt, x_t).softmax(-1).view(2, L, K)
            q = reference(prompt, x_t).softmax(-1).view(2, L, K)
            for i, k in loss_mask.nonzero().tolist():
                v = x_0[i, k]
                each = 1 / loss_mask.sum().item() if norm == "tokens" else 1 / (2 * length[i].item())
                # d(rho A)/d log p = A and d k3/d log p = 1 - q/p at rho = 1
                factor = -each * (A[i] - 0.3 * (1 - q[i, k, v] / p[i, k, v]))
                d_logits = factor * (torch.nn.functional.one_hot(v, K) - p[i, k])
                for position in range(L):
                    by_hand[position, k, x_t[i, position]] += chance * d_logits
    assert total == pytest.approx(1)
    torch.testing.assert_close(policy.table.grad, by_hand, rtol=0, atol=1e-5)
    assert by_hand.abs().max() > 0.01


def expected_return(policy, prompt, reward, steps):
    """E[reward] of the emerge sampler by enumeration of every state and every step; reward [K] * L."""
    K, L = policy.vocab_size, policy.length
    states = list(itertools.product(range(K + 1), repeat=L))
    p = policy(prompt[[0] * len(states)], torch.tensor(states)).softmax(-1).view(-1, L, K)
    value = {s: reward[s] for s in states if K not in s}
    for step in reversed(range(steps)):
        appear, before = samplers.emerge_probability(step, steps), {}
        for s, p_s in zip(states, p, strict=True):
            options = [
                [(v, 1.0)]
                if v < K
                else [(w, appear * p_s[k, w]) for w in range(K)] + [(K, 1 - appear)] * (appear < 1)
                for k, v in enumerate(s)
            ]
            ways = [tuple(zip(*way, strict=True)) for way in itertools.product(*options)]
            before[s] = sum(math.prod(chances) * value[after] for after, chances in ways)
        value = before
    return value[(K,) * L]


def test_the_mean_update_points_along_the_policy_gradient_of_the_sampler(capsys):
    """It is not that gradient, which nobody can have for a real model. On three tokens of two codes, random
    masks at t_j = j/3 and emerge over three steps, its cosine to it is 0.94 to 0.97. (The baseline is the
    exact mean reward, as for G to infinity.)"""
    K, L, mu, cosines = 2, 3, 3, []
    for seed in range(3):
        policy = Pairwise(K, L, seed)
        prompt = policy.encode(["1"])
        reward = torch.rand([K] * L, generator=generator("reward", seed), requires_grad=True)
        J = expected_return(policy, prompt, reward, mu)
        truth, chance_of_completion = torch.autograd.grad(J, [policy.table, reward])
        assert chance_of_completion.sum().item() == pytest.approx(1, abs=1e-5)
        args = flags("--beta 0 --prompts 1 --group-size 2 --gamma 0 --loss-norm length".split())
        policy.zero_grad()
        for o in itertools.product(range(K), repeat=L):
            x_0, A = torch.tensor([o]), (reward[o] - J).detach()[None]
            for t, mask in itertools.product(times(mu, args.gamma), all_masks(L)):
                state = (prompt, torch.where(mask, policy.mask_id, x_0), mask[None])
                log_p = maskgrpo.log_prob(policy, state, slice(0, 1), x_0, None, 0.0)
                weight = loss_weight(args, mask[None], torch.tensor([L]), ALONE)
                loss, _ = objective(log_p, log_p.detach(), None, mask[None], A, t, weight, args)
                (chance_of_completion[o] * chance_of("random", t, mask).item() * loss).backward()
        cosines.append(torch.cosine_similarity(-policy.table.grad.flatten(), truth.flatten(), dim=0).item())
    with capsys.disabled():
        print(
            f"\ncosine of the mean update to the sampler's policy gradient: {[round(c, 3) for c in cosines]}"
        )
    assert all(0.9 < c < 0.999 for c in cosines)


# ---- What an iteration feeds the model

TASK = """
import numpy as np
from eval.task import Task

PROMPTS = ("1 2 3", "4", "2 2", "3 1 4 2")

def rows(split, data=None):
    return [{"prompt": prompt} for prompt in PROMPTS]

def reward(rows, completions):
    return {"ones": np.array([c.split().count("1") for c in completions], dtype=float)}

def task(protocol=None):
    return Task("toy", "text", rows, reward, {"ones": 1.0}, "ones")
"""
PROMPTS, G, MU, L, K = 2, 4, 3, 6, 5  # groups, completions of a group, updates, tokens, codes (0 ends a text)
SOFT = 0.3  # logits that leave room for unlike completions
SMALL = f"--prompts {PROMPTS} --group-size {G} --mu {MU} --iterations 1 --steps 6 --block 3 --seed 1".split()


class Watched(Pairwise):
    """Writes each call into ``log``: what the rollout, the old policy, the reference and the updates saw."""

    def __init__(self, log, drift=0.0):
        super().__init__(K, L, end_ids=(0,), scale=SOFT)
        self.table.data.mul_(1 - drift)
        self.log = log

    def forward(self, prompt, x_t, where=None, target=None, null=None, cfg=0.0):
        trained = self.table.requires_grad
        kind = ("new" if torch.is_grad_enabled() else "old") if trained else "reference"
        out = super().forward(prompt, x_t, where, target, null, cfg)
        call = dict(
            kind="rollout" if target is None else kind, prompt=prompt, x_t=x_t, where=where, x_0=target
        )
        self.log.append(call | {"out": out.detach()})
        return out


class Iterated:
    """``maskgrpo.main`` for one iteration: calls of the model, gradients, the line of the log. The toy, whose
    reference differs by ``drift``, or the built-in policy saved in ``model``, with tiny-math."""

    def __init__(self, path, monkeypatch, *argv, task=TASK, drift=0.0, model=None):
        path.mkdir(exist_ok=True)
        (path / "task.py").write_text(task)
        self.log, self.gradients = [], []
        toy, reference = Watched(self.log), Watched(self.log, drift).requires_grad_(False)
        optimizer_step = maskgrpo.Run.optimizer_step

        def step(run, parameters, update):
            self.gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
            return optimizer_step(run, parameters, update)

        with monkeypatch.context() as patch:
            if model is None:
                patch.setattr("scale.load_policy", lambda *_: (toy, reference))
            patch.setattr("eval.evaluate.evaluate_run", lambda *_: None)
            patch.setattr(maskgrpo.Run, "optimizer_step", step)
            patch.setattr(maskgrpo.Run, "save", lambda run: None)
            patch.setattr(maskgrpo.Run, "finish", lambda run, policy: None)
            what = ["--model", str(model or "toy"), *([] if model else ["--task", str(path / "task.py")])]
            maskgrpo.main([*what, "--out", str(path / "out"), *SMALL, *argv])
        self.metrics = json.loads((path / "out/metrics.jsonl").read_text().splitlines()[0])

    def calls(self, kind):
        return [call for call in self.log if call["kind"] == kind]

    def rows(self, kind, key):
        """[mu, B, ...] of all micro-batches: old and reference score state by state, so do the updates."""
        parts = [call[key].ids if key == "prompt" else call[key] for call in self.calls(kind)]
        return torch.cat(parts).view(MU, PROMPTS * G, -1)


@pytest.fixture
def iterate(tmp_path, monkeypatch):
    runs = itertools.count()
    return lambda *argv, **options: Iterated(tmp_path / str(next(runs)), monkeypatch, *argv, **options)


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--ratio sequence",
        "--ratio mean",
        "--temperature 0.5",
        "--micro-batch 3",
        "--remask full",
        "--masks nested",
    ]
    + [f"--cfg 3 --score {score}" for score in ("conditional", "guided")]
    + [f"--sampler {name}" for name in ("maskgit", "emerge")],
)
def test_the_first_ratio_is_exactly_one(iterate, argv):
    """E1, D2: same function, masks, micro-batch and temperature 1 in old and new, guided or not."""
    assert iterate(*argv.split()).metrics["ratio_max_first"] == 1.0


@pytest.fixture(scope="module")
def tiny_math(tmp_path_factory):
    """The built-in text policy, untrained, with dropout in its attention."""
    path = tmp_path_factory.mktemp("tiny") / "model"
    policy = tiny.build("tiny-math")
    policy.backbone.config.attention_dropout = 0.5
    policy.save(path)
    return path


def test_the_first_ratio_is_exactly_one_with_dropout_in_the_model(iterate, tiny_math):
    """E7: dropout is off whenever the policy scores."""
    run = iterate("--block", "8", model=tiny_math)
    assert run.metrics["ratio_max_first"] == 1.0 and run.metrics["grad_norm"] > 0


def test_a_broken_mask_seed_is_found_on_the_first_step(iterate, monkeypatch):
    """E1, on purpose: the updates see another mask than the old log-probabilities did."""
    honest = maskgrpo.log_prob

    def broken(model, state, b, *rest, **options):
        prompt, x_t, loss_mask = state
        if torch.is_grad_enabled():
            x_t = torch.where(torch.rand(x_t.shape, generator=generator("other")) < 0.5, model.mask_id, x_t)
        return honest(model, (prompt, x_t, loss_mask), b, *rest, **options)

    monkeypatch.setattr(maskgrpo, "log_prob", broken)
    with pytest.raises(SystemExit, match="the first ratio is"):
        iterate()


def test_scores_are_of_the_model_at_temperature_one_and_never_the_samplers(iterate, monkeypatch):
    """E5, E2: rollout at 0.5, yet old, reference and first new scores are those of the raw logits (-0.1269
    for [2, 0], not -0.0181), recomputed: the sampler's own confidences are poisoned here."""
    monkeypatch.setattr(samplers, "confidence_of", lambda logits, tokens: torch.full(tokens.shape, 0.5))
    run, base = iterate("--temperature", "0.5"), Pairwise(K, L, scale=SOFT)
    scored = run.calls("old") + run.calls("reference") + run.calls("new")[:1]
    assert len(scored) == 2 * MU + 1
    for call in scored:
        plain = base(call["prompt"], call["x_t"], call["where"]).log_softmax(-1)
        right = plain.gather(1, call["x_0"][call["where"]][:, None])[:, 0]
        torch.testing.assert_close(call["out"], right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "argv", ["", "--ratio mean", "--loss-norm length", "--remask trace --time-weight inverse"]
)
def test_gradients_do_not_depend_on_the_micro_batch(iterate, argv):
    """F1, F2: 1x8, 2x4, 8x1 and an uneven 3+3+2 give each update the same gradient to 1e-6. (The same on two
    processes: test_run.py.)"""
    whole_batch, *split = (
        iterate("--micro-batch", size, *argv.split()).gradients for size in "8 4 1 3".split()
    )
    for gradients in split:
        for one, many in zip(whole_batch, gradients, strict=True):
            torch.testing.assert_close(many, one, rtol=0, atol=1e-6)
    assert all(g.abs().max() > 1e-2 for g in whole_batch)


def test_old_reference_and_new_policy_see_the_same_states(iterate):
    """E1, A3: the tail after the end of the text is attended as generated, in all three alike."""
    run = iterate("--micro-batch", "3")
    for key in ("prompt", "x_t", "where", "x_0"):
        old, new = run.rows("old", key), run.rows("new", key)
        assert torch.equal(old, new) and torch.equal(old, run.rows("reference", key))
    x_t, x_0 = run.rows("new", "x_t"), run.rows("new", "x_0")
    assert torch.equal(x_t[x_t != K], x_0[x_t != K])


@pytest.mark.parametrize("remask", ["fading", "random", "trace", "full"])
def test_loss_tokens_are_masked_and_not_after_the_end_of_the_text(iterate, remask):
    """A6, B4, and a fault: the public MaskGRPO trains what follows the end. Masks are drawn over the whole
    canvas all the same."""
    run = iterate("--remask", remask)
    x_0, x_t, where = (run.rows("new", key) for key in ("x_0", "x_t", "where"))
    length = end_of_text(x_0[0], (0,))
    inside = torch.arange(L) < length[:, None]
    assert torch.equal(where, (x_t == K) & inside)
    assert not inside.all() and (x_t == K)[:, ~inside].any()
    last = where[torch.arange(MU)[:, None], torch.arange(PROMPTS * G), length - 1]
    assert last[-1].all()  # t = 1 masks all: the end itself is trained
    assert run.metrics["length"] == length.double().mean().item()


@pytest.mark.parametrize("remask", ["fading", "random", "trace"])
def test_the_prompt_is_never_touched(iterate, remask):
    run = iterate("--remask", remask)
    asked = run.calls("rollout")[0]["prompt"].ids
    for kind in ("old", "reference", "new"):
        assert torch.equal(run.rows(kind, "prompt"), asked.expand(MU, -1, -1))


def test_diffu_grpo_masks_all_of_the_completion_and_a_share_of_the_prompt(iterate):
    """J1: prompt 3, completion 6: with share 1 the model sees 9 masks and scores 6 tokens, with share 0 the
    prompt is whole; in between each prompt token is masked with its probability, anew at each t_j."""
    masked = {}
    for share in ("0", "0.5", "1"):
        run = iterate("--remask", "full", "--prompt-mask", share)
        asked = run.calls("rollout")[0]["prompt"]
        assert (run.rows("new", "x_t") == K).all()
        ids = run.rows("new", "prompt")
        assert torch.equal(ids[:, ~asked.mask], asked.ids[~asked.mask].expand(MU, -1))
        masked[share] = (ids == 0)[:, asked.mask]
    assert not masked["0"].any() and masked["1"].all()
    assert 0.3 < masked["0.5"].double().mean() < 0.7
    assert len({tuple(m) for m in masked["0.5"].tolist()}) == MU


def test_every_completion_is_trained_at_every_t_j(iterate):
    """A fault, golden iteration_index: with two accumulation steps the public update of a rollout reads the
    masks of every other iteration only. Ours, in two micro-batches, sees all mu states of each completion."""
    case = next(
        c
        for c in RECORDED["iteration_index"]
        if (c["num_iterations"], c["gradient_accumulation_steps"]) == (12, 2)
    )
    used = {index for _, _, rollout, index in case["rows"] if rollout == 1}
    assert used == {0, 2, 4, 6, 8, 10}
    run = iterate("--micro-batch", "4", "--remask", "random", "--gamma", "0", "--masks", "nested")
    n_masked = (run.rows("new", "x_t") == K).sum(-1)  # [mu, B]
    assert len(run.calls("new")) == 2 * MU and (n_masked.diff(dim=0) >= 0).all()
    args = flags([*SMALL, "--gamma", "0", "--remask", "random", "--masks", "nested"])
    revealed = torch.zeros(PROMPTS * G, L)
    expected = [masked_at(args, j, 0, list(range(PROMPTS * G)), revealed).sum(-1) for j in range(MU)]
    assert torch.equal(n_masked, torch.stack(expected))


def test_beta_zero_neither_loads_nor_calls_a_reference(iterate, tiny_math, monkeypatch):
    """H3: calls of a frozen policy, and loads of a checkpoint, are counted."""
    forward, load = Policy.forward, models.load
    frozen_calls, loads = [], []

    def counted(self, *args, **kwargs):
        if not any(p.requires_grad for p in self.parameters()):
            frozen_calls.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Policy, "forward", counted)
    monkeypatch.setattr(models, "load", lambda *args, **kwargs: loads.append(1) or load(*args, **kwargs))
    run = iterate("--beta", "0", "--block", "8", model=tiny_math)
    assert (len(loads), len(frozen_calls), run.metrics["kl"]) == (1, 0, 0.0)
    iterate("--block", "8", model=tiny_math)
    assert len(frozen_calls) == MU


FIXED = "np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])"  # of a first and a second group
ALL_EQUAL = "np.ones(len(completions))"


def with_reward(scores):
    return TASK.replace('np.array([c.split().count("1") for c in completions], dtype=float)', scores)


def test_groups_of_equal_rewards_are_counted(iterate, capsys):
    """G5: the share in the log, and a word where more than 70 % of the groups teach nothing."""
    assert iterate(task=with_reward(FIXED)).metrics["zero_spread"] == 0.5
    assert "unequal rewards" not in capsys.readouterr().out
    assert iterate(task=with_reward(ALL_EQUAL)).metrics["zero_spread"] == 1.0
    assert "only 0% of the groups have unequal rewards" in capsys.readouterr().out


def test_a_group_of_equal_rewards_pulls_to_the_reference_unless_dropped(iterate):
    """G4, B6: with beta > 0 and a policy that is not the reference its gradient is not 0; with --drop-equal
    it is, and such a group counts neither in the loss nor in its normaliser, but in the logged length."""
    kept, dropped = (
        iterate(*argv, task=with_reward(ALL_EQUAL), drift=0.3) for argv in ([], ["--drop-equal"])
    )
    assert kept.gradients[0].abs().max() > 1e-4 and all(g.abs().max() == 0 for g in dropped.gradients)
    assert kept.metrics["length"] == dropped.metrics["length"] > 0
    half = iterate("--drop-equal", task=with_reward(FIXED))
    where = half.rows("new", "where")
    assert not where[:, G:].any() and where[:, :G].any()
    base, call = Pairwise(K, L, scale=SOFT), half.calls("new")[0]
    log_p = base(call["prompt"], call["x_t"], call["where"], call["x_0"])
    A = torch.tensor([-0.5, 1.5, -0.5, -0.5])  # r - 1/4 over a standard deviation of 1/2
    loss = -(A[where[0].nonzero()[:, 0]] * log_p).sum() / where[0].sum()
    by_hand = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(base.parameters()))])
    torch.testing.assert_close(half.gradients[0], by_hand, rtol=0, atol=1e-4)


def test_completions_of_a_group_differ_and_do_not_depend_on_the_micro_batch(iterate):
    """I1: each sample has a stream of its own, keyed by its place in the whole batch."""
    x_0 = iterate("--micro-batch", "8").rows("new", "x_0")[0]
    for group in x_0.view(PROMPTS, G, L).tolist():
        assert len({tuple(row) for row in group}) > 1
    for size in ("1", "3"):
        assert torch.equal(iterate("--micro-batch", size).rows("new", "x_0")[0], x_0)


def test_the_global_generator_is_neither_read_nor_moved(iterate):
    """A fault: the public code resets it at each call for log-probabilities, so that whatever else draws
    from it repeats."""
    drawn = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            drawn.append(torch.cat([*iterate("--remask", "random").gradients]))
            assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*drawn)


# ---- Who shares a mask


@pytest.mark.parametrize(
    "remask, masks", [("random", "independent"), ("full", "independent"), ("fading", "nested")]
)
def test_the_mask_seed_says_who_shares_a_mask(remask, masks):
    """One mask for each completion, for each group, or for all; of the prompt too in diffu-GRPO, where the
    completion is masked whole: else its two rows of the ablation would be one and the same run."""
    argv = f"--prompts 3 --group-size 4 --gamma 0 --remask {remask} --masks {masks} --prompt-mask 0.5".split()
    everyone, revealed = list(range(12)), torch.zeros(12, 64)
    prompt = whole(torch.ones(12, 64, dtype=torch.long))
    patterns = {}
    for who in ("sample", "group", "batch"):
        args = flags([*argv, "--mask-seed", who])
        if remask == "full":
            masked = prompt_at(args, 0, 0, everyone, prompt, 0).ids
            assert torch.equal(masked[5:6], prompt_at(args, 0, 0, [5], prompt[5:6], 0).ids)
        else:
            masked = masked_at(args, 0, 0, everyone, revealed)
            assert torch.equal(masked[5:6], masked_at(args, 0, 0, [5], revealed[:1]))  # whichever process
        patterns[who] = [tuple(row) for row in masked.tolist()]
    assert len(set(patterns["sample"])) == 12 and len(set(patterns["batch"])) == 1
    assert [len(set(patterns["group"][4 * n : 4 * n + 4])) for n in range(3)] == [1, 1, 1]
    assert len(set(patterns["group"])) == 3


def test_nested_masks_grow_with_t_and_independent_ones_do_not():
    revealed = torch.zeros(2, 64)
    for masks, nested in (("nested", True), ("independent", False)):
        args = flags(f"--remask random --gamma 0 --mu 4 --masks {masks}".split())
        at = [masked_at(args, j, 0, [0, 1], revealed) for j in range(3)]
        assert all((a <= b).all() for a, b in itertools.pairwise(at)) is nested


def test_masks_change_with_the_iteration_and_the_seed_alone():
    args, other = flags(["--seed", "1"]), flags(["--seed", "2"])
    revealed = torch.zeros(1, 64)
    first = masked_at(args, 0, 0, [0], revealed)
    torch.rand(3)
    assert torch.equal(first, masked_at(args, 0, 0, [0], revealed))
    assert not torch.equal(first, masked_at(args, 0, 1, [0], revealed))
    assert not torch.equal(first, masked_at(other, 0, 0, [0], revealed))
