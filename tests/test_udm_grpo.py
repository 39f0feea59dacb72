"""udm_grpo.py: its loss against the recorded public pipeline, its states, and whole runs of it."""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, shared
from safetensors.torch import load_file

import eval.udm_diagnostics
import scale
import udm_grpo
from common import MetricPath, MixturePath, World, generator, group_advantage, uniform_path
from models import load, tiny
from models.policy import Prompt
from models.ursa import URSA, load_qwen3
from samplers import euler_times, sample, uniform

GOLDEN = Path(__file__).parent / "golden"
REWARD = '''
import numpy as np

def red(rows, images):
    """Mean red: a random policy earns it unevenly, so that there is something to learn."""
    return {"red": np.array([image[0].float().mean().item() / 255 for image in images])}
'''


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr("eval.udm_diagnostics.PICTURES", 100)


def given(**flags) -> argparse.Namespace:
    return argparse.Namespace(**dict(eps=1e-4, beta=0.0, kl="token") | flags)


# ---- The loss


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "udm_grpo.safetensors"), json.loads((GOLDEN / "udm_grpo.json").read_text())


def scores(g) -> tuple[torch.Tensor, torch.Tensor]:
    """The recorded logits, a leaf, and log p of the actions [4, 12]: row l - 1 predicts token l."""
    logits = g["loss.logits"].clone().requires_grad_()
    log_p = logits[:, -13:-1].log_softmax(-1).gather(-1, g["loss.response"][..., None]).squeeze(-1)
    return logits, log_p


def loss_of(g, log_p, log_old, log_ref=None, **flags):
    A = g["loss.advantages"]
    return udm_grpo.objective(log_p, log_old, log_ref, A, torch.full_like(A, 1 / len(A)), given(**flags))


@pytest.mark.parametrize("eps", [1e-4, 0.2])
def test_clipped_loss_and_gradient_equal_the_intended_ones(golden, eps):
    g, info = golden
    name = f"intended.clip{eps}"
    logits, log_p = scores(g)
    torch.testing.assert_close(log_p, g["loss.logps_token"], atol=1e-5, rtol=0)
    loss, sums = loss_of(g, log_p, g["loss.old_logps"], eps=eps)
    loss.backward()
    ratio = (log_p.mean(-1) - g["loss.old_logps"].mean(-1)).exp()
    torch.testing.assert_close(ratio.detach(), g[f"{name}.ratio"])
    assert loss.item() == pytest.approx(info["cases"][name]["loss"], abs=1e-6)
    torch.testing.assert_close(logits.grad, g[f"{name}.grad_logits"], atol=1e-7, rtol=1e-4)
    acts = g[f"{name}.surrogate"] < g[f"{name}.ratio"] * g["loss.advantages"] - 1e-7
    assert sums["clip_fraction"] == acts.sum() and sums["n"] == 4


@pytest.mark.parametrize("case", ["onpolicy_nokl", "onpolicy_kl0.05", "onpolicy_kl1"])
def test_loss_on_policy_equals_the_public_one_with_kl_of_means(golden, case):
    g, info = golden
    logits, log_p = scores(g)
    beta = info["cases"][case]["kl_beta"]
    loss, sums = loss_of(g, log_p, log_p.detach(), g["loss.ref_logps"], beta=beta, kl="mean")
    loss.backward()
    assert loss.item() == pytest.approx(info["cases"][case]["loss"], abs=1e-6)
    torch.testing.assert_close(logits.grad, g[f"loss.{case}.grad_logits"], atol=1e-7, rtol=1e-4)
    kl_mean, kl_token = g["loss.approx_kl_on_token_mean"].sum(), g["loss.approx_kl_per_token"].mean(-1).sum()
    assert sums["kl_mean"] == pytest.approx(kl_mean.item(), abs=1e-6)
    assert sums["kl_token"] == pytest.approx(kl_token.item(), abs=1e-6)


def test_public_ratio_is_one_or_without_a_gradient(golden):
    """Difference 5. The public pipeline never holds old log-probabilities, so its ratio is 1 and its clip
    idle; given them, it takes exp(log_p - log_p) of the old policy's mean alone. Ours moves."""
    g, info = golden
    steps = json.loads((GOLDEN / "ursa_grpo_step.json").read_text())
    assert all(steps[f"{name}.old_logps_is_none"] == [True] * 3 for name in VARIANTS)
    assert not info["cases"]["old_given_official_nokl"]["loss_depends_on_logits"]
    A, public = g["loss.advantages"], g["loss.old_logps"].mean(-1).exp()
    slip = -torch.minimum(public * A, public.clamp(1 - 1e-4, 1 + 1e-4) * A).mean()
    assert slip.item() == pytest.approx(info["cases"]["old_given_official_nokl"]["loss"], abs=1e-6)
    logits, log_p = scores(g)
    loss_of(g, log_p, g["loss.old_logps"], eps=0.2)[0].backward()
    assert logits.grad.abs().max() > 1e-3


def test_scores_of_bfloat16_logits_are_too_coarse_for_the_clip(golden):
    """Why old log-probabilities are recomputed in float32: E2. Those of bfloat16 clip an untrained policy."""
    g, _ = golden
    new, eps = g["loss.logps_token"], udm_grpo.PAPER["eps"]
    clipped = [loss_of(g, new, g[f"loss.logps_token{kind}"], eps=eps)[1] for kind in ("", "_bf16_logits")]
    assert clipped[0]["clip_fraction"] == 0 < clipped[1]["clip_fraction"]


def test_kl_of_tokens_sees_a_drift_that_the_kl_of_means_misses():
    """Half of the tokens likelier by 1 nat and half less so: the mean has not moved."""
    log_p = torch.full((2, 8), -2.0, requires_grad=True)
    drift = torch.tensor([1.0, -1.0]).repeat(4).expand(2, 8)
    penalty = {}
    for kl in ("token", "mean"):
        loss, _ = udm_grpo.objective(
            log_p, log_p.detach(), log_p.detach() + drift, torch.zeros(2), torch.full((2,), 0.5),
            given(beta=1.0, kl=kl),
        )  # fmt: skip
        penalty[kl] = loss.item(), torch.autograd.grad(loss, log_p)[0].abs().max().item()
    assert penalty["token"][0] == pytest.approx(np.cosh(1) - 1, abs=1e-6) and penalty["token"][1] > 0.05
    assert penalty["mean"] == pytest.approx((0, 0), abs=1e-7)


# ---- The recorded optimizer step

VARIANTS = {"forward_clean": "clean", "backward_clean": "clean", "backward_x1t": "intermediate"}


@pytest.fixture(scope="module")
def ursa():
    backbone = load_qwen3(shared("golden/ursa_tiny"), torch.float32, "cpu")
    return URSA(backbone, None, None, grid=(1, 4, 6), bov_id=290, pad_id=280, text_length=12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_accumulated_step_equals_the_public_pipeline(ursa, variant):
    """Three micro-steps of each row of the ablation, from token states to the gradient of the weights."""
    g = load_file(GOLDEN / "ursa_grpo_step.safetensors")
    info = json.loads((GOLDEN / "ursa_grpo_step.json").read_text())
    parameters = dict(ursa.backbone.named_parameters())
    ursa.zero_grad()
    r = torch.tensor(info["scores"], dtype=torch.float64).view(2, 3).T  # listed image by image
    A = group_advantage(r, ddof=0, eps=1e-4, clip=5.0).T.flatten().float()
    for k in range(3):
        torch.testing.assert_close(A, g[f"{variant}.advantages"][k])
        prompt = Prompt(g[f"{variant}.txt_ids"][k], g[f"{variant}.txt_ids"][k] != 280)
        state = g[f"{variant}.states"][k].flatten(1), g[f"{variant}.responses"][k], 0.0
        log_p = udm_grpo.log_prob(ursa, prompt, state, slice(None), None)
        log_ref = g[f"{variant}.ref_logps.{k}"]
        weight = torch.full_like(A, 1 / len(A) / 3)
        loss, _ = udm_grpo.objective(log_p, log_p.detach(), log_ref, A, weight, given(beta=0.05, kl="mean"))
        loss.backward()
        assert 3 * loss.item() == pytest.approx(info[f"{variant}.losses"][k], abs=1e-6)
    norm = torch.stack([p.grad.norm() for p in parameters.values() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(info[f"{variant}.grad_norm_all"], rel=1e-4)
    for name, gradient in g.items():
        if name.startswith(f"{variant}.grad."):
            name = name.removeprefix(f"{variant}.grad.")
            torch.testing.assert_close(parameters[name].grad, gradient, atol=1e-6, rtol=1e-4)


# ---- States and actions


@pytest.fixture(scope="module")
def small():
    return tiny.build("tiny-geneval", path="metric")


def rollout(small, samples):
    """(drawn, at): what the loop has when it makes its states. at(trajectory, k, t) -> x_t."""
    args = udm_grpo.flags([])
    path, shift = uniform_path(small)
    settings = dict(sampler="euler", steps=args.steps, temperature=1.0, cfg=0.0, cfg_until=1.0)
    settings |= dict(path=path, shift=shift, rate=args.rate)
    prompt = small.encode(["a red square"])[[0] * len(samples)]
    drawn = sample(small, prompt, [generator("rollout", 0, 0, n) for n in samples], settings, True)
    return drawn, partial(udm_grpo.state_at, args, drawn=[drawn], path=path, iteration=0, samples=samples)


def test_states_are_those_of_the_sampler_or_of_the_path_at_the_same_times(small):
    """Report C10: nothing is replayed at another time. Forward states keep x_1 as often as p_t says."""
    drawn, at = rollout(small, list(range(200)))
    path, shift = uniform_path(small)
    for k, t in enumerate(euler_times(10, shift)[:-1]):
        assert drawn.trajectory[k][1] == t
        assert torch.equal(at("backward", k, t), drawn.trajectory[k][0])
        kept = (at("forward", k, t) == drawn.x_0).double().mean()
        expected = path.probability(drawn.x_0, t).gather(-1, drawn.x_0[..., None]).double().mean()
        assert kept == pytest.approx(expected.item(), abs=0.02)


def test_forward_states_belong_to_the_sample_not_to_its_batch(small):
    _, at = rollout(small, [0, 1, 2])
    _, alone = rollout(small, [2])
    assert torch.equal(at("forward", 2, 0.2)[2:], alone("forward", 2, 0.2))
    first, second = (at("forward", k, 0.0) for k in (0, 1))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], second[0])


def test_trained_steps_are_consecutive_from_one_of_three_starts():
    args = udm_grpo.flags([])
    chosen = [udm_grpo.trained_steps(args, i) for i in range(60)]
    assert {s.start for s in chosen} == {0, 1, 2} and all(len(s) == 3 for s in chosen)
    assert chosen == [udm_grpo.trained_steps(args, i) for i in range(60)]


# ---- Whole runs


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """An untrained uniform-diffusion policy."""
    path = tmp_path_factory.mktemp("base") / "model"
    tiny.build("tiny-geneval", path="metric").save(path)
    (path / "reward.py").write_text(REWARD)
    return path


def arguments(base: Path, out: Path, *more: str) -> list[str]:
    fixed = f"--model {base} --reward {base}/reward.py:red --prompts 2 --group-size 3 --steps 5"
    every = "--lr 1e-3 --update accumulate --mu 1 --eps 1e-4 --iterations 3 --save-every 2"
    every += " --eval-prompts 2 --eval-every 0 --eval-steps 2"
    return [*fixed.split(), *every.split(), "--out", str(out), *more]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load(str(out / "model")).state_dict()


def difference(a: dict, b: dict) -> float:
    return max((a[k] - b[k]).abs().max().item() for k in a)


@pytest.fixture(scope="module")
def straight(base, tmp_path_factory) -> Path:
    """Three iterations without a break."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    udm_grpo.main(arguments(base, out))
    return out


def test_a_run_logs_its_metrics_and_moves_the_policy(base, straight):
    metrics = lines(straight / "metrics.jsonl")
    names = "reward/mean reward/red kl kl_token kl_mean clip_fraction grad_norm zero_spread time/update lr"
    assert all(name in m for name in names.split() for m in metrics)
    for name in ("entropy/forward", "entropy/backward", "distance/forward", "distance/training"):
        assert f"{name}/0.200" in metrics[0] and f"{name}/0.200" in metrics[-1]
    assert (straight / "samples/step_000003.png").exists()
    assert difference(weights(straight), load(str(base)).state_dict()) > 1e-4


def test_first_ratio_is_one_and_a_single_step_never_clips(straight):
    """Report E1. With --update accumulate the ratio is 1 by construction."""
    metrics = lines(straight / "metrics.jsonl")
    assert all(m["ratio_max_first"] == 1 and m["clip_fraction"] == 0 for m in metrics)
    assert metrics[0]["kl"] == 0 < metrics[-1]["kl"] == metrics[-1]["kl_token"]


def test_resumed_run_gives_the_weights_of_the_unbroken_one(base, straight, tmp_path):
    """Reports M1, M2."""
    out = tmp_path / "run"
    udm_grpo.main(arguments(base, out, "--iterations", "2"))
    udm_grpo.main(arguments(base, out, "--resume"))
    assert difference(weights(out), weights(straight)) == 0


def test_two_processes_give_the_weights_of_one(base, tmp_path, monkeypatch):
    """Report F1: 9 samples over 2 processes: a group on both, a padded last shard."""
    monkeypatch.undo()  # the pictures
    sizes = "--prompts 3 --micro-batch 5 --iterations 2".split()
    udm_grpo.main(arguments(base, tmp_path / "one", *sizes))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, "udm_grpo.py", *arguments(base, tmp_path / "two", *sizes)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = lines(tmp_path / "one/metrics.jsonl"), lines(tmp_path / "two/metrics.jsonl")
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        same = [k for k in a if k.startswith(("reward", "kl", "entropy", "distance"))]
        assert {k: a[k] for k in same} == pytest.approx({k: b[k] for k in same}, abs=1e-6)
    assert difference(weights(tmp_path / "one"), weights(tmp_path / "two")) < 1e-6


def test_equal_groups_can_be_left_out(base, tmp_path):
    """Report G4: no gradient at all where every group is equal, though the second step has a KL."""
    (base / "flat.py").write_text("def flat(rows, images):\n    return {'flat': [1.0] * len(rows)}\n")
    more = ["--reward", f"{base}/flat.py:flat", "--drop-equal", "--mu", "2"]
    udm_grpo.main(arguments(base, tmp_path / "run", "--iterations", "1", "--beta", "1", *more))
    (metrics,) = lines(tmp_path / "run/metrics.jsonl")
    assert metrics["grad_norm"] == 0 and metrics["zero_spread"] == 1


# ---- What the loop hands from part to part

ROWS = {  # of the ablation, each with an update, a KL or a path of its own; 3 of 5 steps are trained
    "naive": "--trajectory backward --action intermediate --cfg 2 --cfg-until 0.3",
    "clean action": "--trajectory backward --cfg 2 --cfg-until 0.3 --update each --mu 2 --ref-every 4",
    "forward": "--trajectory forward --cfg 2 --cfg-until 0.3 --mu 2 --beta 0",
    "CFG-Free": "--trajectory forward --update each --path mixture",
}
BATCHES = [slice(0, 4), slice(4, 8)]  # of 2 prompts x G 3


def spy(patch, owner, name, note):
    """note(result, *args, **kwargs) hears of each call of owner.name."""
    called = getattr(owner, name)

    def heard(*args, **kwargs):
        result = called(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    patch.setattr(owner, name, heard)


@pytest.fixture(scope="module", params=ROWS)
def seen(request, base, tmp_path_factory):
    """Two iterations of a row. Of each: prompts and samples drawn, (x_t, w) that the model was fed at each
    step, calls of log_prob, and (weights, gradient) at each optimizer step."""
    seen, fed, its = SimpleNamespace(iterations=[]), [], lambda: seen.iterations[-1]

    def loaded(result, *_):
        seen.policy, seen.reference = result
        note = lambda _, args, kwargs: fed.append((args[1].clone(), kwargs.get("cfg")))  # noqa: E731
        seen.policy.register_forward_pre_hook(note, with_kwargs=True)

    def begun(*_):
        seen.iterations.append(SimpleNamespace(drawn=[], prompts=[], fed=[], scored=[], steps=[]))

    def sampled(out, policy, prompt, *_, **__):
        its().drawn.append(out)
        its().prompts.append(prompt)
        its().fed.append(fed[-5:])

    def scored(log_p, model, prompt, state, b, null):
        its().scored.append((model, torch.is_grad_enabled(), state, b))

    def summed(_, world, parameters):
        named = dict(seen.policy.named_parameters())
        assert [*map(id, named.values())] == [*map(id, parameters)]
        kept = {name: p.detach().clone() for name, p in named.items()}
        its().steps.append((kept, [p.grad.clone() for p in parameters]))

    out = tmp_path_factory.mktemp("rows") / "run"
    more = "--iterations 2 --micro-batch 4 --beta 1 --eps 0.01 --seed 9 --save-every 0"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(eval.udm_diagnostics, "PICTURES", 100)
        spy(patch, udm_grpo, "flags", lambda args, _: vars(seen).update(args=args))
        spy(patch, scale, "load_policy", loaded)
        spy(patch, udm_grpo, "prompt_indices", begun)
        spy(patch, udm_grpo, "sample", sampled)
        spy(patch, udm_grpo, "group_advantage", lambda _, r, *a, **kw: vars(its()).update(advantage=(a, kw)))
        spy(patch, udm_grpo, "log_prob", scored)
        spy(patch, World, "sum_gradients", summed)
        spy(patch, eval.udm_diagnostics, "diagnose", lambda _, *args: vars(its()).update(diagnosed=args))
        udm_grpo.main(arguments(base, out, *more.split(), *ROWS[request.param].split()))
    seen.said, seen.metrics = said.getvalue(), lines(out / "metrics.jsonl")
    each = [[0], [1], [2]] if seen.args.update == "each" else [[0, 1, 2]]
    seen.updates = each * seen.args.mu  # the states of each optimizer step
    return seen


def state_of(seen, i: int, trajectory: str, k: int) -> torch.Tensor:
    """x_t [6, 16] at step k of iteration i."""
    it = seen.iterations[i]
    if trajectory == "backward":
        return torch.cat([fed[k][0] for fed in it.fed])
    mixture = seen.args.path == "mixture"
    path = MixturePath(49) if mixture else MetricPath(seen.policy.codebook, alpha=0.9, c=3.0)
    u = uniform([generator("forward", seen.args.seed, i, k, n) for n in range(6)], 16)
    return path.corrupt(torch.cat([out.x_0 for out in it.drawn]), euler_times(5)[k], u)


def trained_states(seen, i: int) -> list[tuple]:
    """(x_t, a, w) that iteration i must train."""
    it, args = seen.iterations[i], seen.args
    states = []
    for k in udm_grpo.trained_steps(args, i):
        a = [out.x_1[k] if args.action == "intermediate" else out.x_0 for out in it.drawn]
        states.append((state_of(seen, i, args.trajectory, k), torch.cat(a), it.fed[0][k][1]))
    return states


def scored(it, model, gradient: bool, states: list[tuple]) -> list[tuple]:
    """([k], batch) of each score by ``model``, with or without gradient, of what is states[k]."""

    def same(s, t):
        return torch.equal(s[0], t[0]) and torch.equal(s[1], t[1]) and s[2] == t[2]

    found = [(state, b) for m, g, state, b in it.scored if m is model and g == gradient]
    return [([k for k, s in enumerate(states) if same(s, state)], b) for state, b in found]


def test_each_row_of_the_ablation_trains_what_was_sampled(seen):
    """Reports C10, D2: each state, action and guidance, in every score, batch by batch."""
    assert (seen.reference is None) == (seen.args.beta == 0)
    guidance = set()
    for i, it in enumerate(seen.iterations):
        states = trained_states(seen, i)
        guidance |= {w for _, _, w in states}
        once = [([k], b) for k in range(3) for b in BATCHES]
        assert scored(it, seen.policy, False, states) == once
        assert scored(it, seen.reference, False, states) == (once if seen.reference else [])
        updates = [([k], b) for of in seen.updates for k in of for b in BATCHES]
        assert scored(it, seen.policy, True, states) == updates
    assert guidance == ({0.0, 2.0} if seen.args.cfg else {0.0})
    first, second = (udm_grpo.trained_steps(seen.args, i) for i in range(2))
    assert first != second


def test_diagnostics_are_of_all_states_with_the_guidance_sampled(seen):
    for i, it in enumerate(seen.iterations):
        _, _, _, w, _, state_at, times, *_ = it.diagnosed
        assert w == [w for _, w in it.fed[0]] and times == euler_times(5)[:-1]
        for name in eval.udm_diagnostics.TRAJECTORIES:
            for k, t in enumerate(times):
                assert torch.equal(state_at(name, k, t), state_of(seen, i, name, k))


def written_log_prob(policy, prompt, weights: dict, state: tuple) -> torch.Tensor:
    """log p(a^k | x_t, c) [6, 16] under ``weights``, of the guided distribution."""
    x_t, a, w = state
    both = (prompt, policy.unconditional(prompt))
    logits, logits_null = (torch.func.functional_call(policy, weights, (c, x_t)) for c in both)
    guided = (1 + w) * logits - w * logits_null
    return guided.log_softmax(-1).gather(-1, a.view(-1, 1)).view(a.shape)


def test_each_optimizer_step_follows_the_gradient_of_the_objective(seen):
    """Autograd of S = mean_i mean_k [min(r A, clip(r, 1 - eps, 1 + eps) A) - beta mean_l k3] in weights that
    ratio, clip and reference are told from: reports D2, E1. Only after the first step can the clip act."""
    args, clips = seen.args, []
    for i, it in enumerate(seen.iterations):
        prompt = Prompt(*(torch.cat([getattr(p, name) for p in it.prompts]) for name in ("ids", "mask")))
        log_prob = partial(written_log_prob, seen.policy, prompt)
        images = seen.policy.decode(torch.cat([out.x_0 for out in it.drawn]))
        r = torch.stack([image[0].double().mean() / 255 for image in images]).view(2, 3)
        A = (r - r.mean(-1, keepdim=True)) / (r.std(-1, correction=0, keepdim=True) + 1e-4)
        A, states = A.flatten().float(), trained_states(seen, i)
        old = it.steps[0][0]
        ref = old if args.ref_every else seen.iterations[0].steps[0][0]
        with torch.no_grad():
            log_old, log_ref = ([log_prob(weights, state) for state in states] for weights in (old, ref))
        clipped = []
        for (weights, gradient), of in zip(it.steps, seen.updates, strict=True):
            weights = {name: v.requires_grad_() for name, v in weights.items()}
            S = 0.0
            for k in of:
                log_p = log_prob(weights, states[k])
                ratio = (log_p.mean(-1) - log_old[k].mean(-1)).exp()
                surrogate = torch.minimum(ratio * A, ratio.clamp(0.99, 1.01) * A)
                kl = (log_ref[k] - log_p).exp() - (log_ref[k] - log_p) - 1
                S = S + (surrogate - args.beta * kl.mean(-1)).mean() / len(of)
                clipped.append((surrogate < ratio * A - 1e-5).float().mean().item())
            expected = torch.autograd.grad(-S, list(weights.values()))
            torch.testing.assert_close(gradient, list(expected), atol=1e-5, rtol=1e-3)
        assert seen.metrics[i]["clip_fraction"] == pytest.approx(np.mean(clipped))
        assert seen.metrics[i]["ratio_max_first"] == 1
        clips += clipped
    once = args.update == "accumulate" and args.mu == 1
    assert max(clips) == 0 if once else 0 < np.mean(clips) < 0.9, clips
    assert ("the ratio is 1 by construction" in seen.said) == once


def test_advantages_equal_the_public_ones(golden, seen):
    """As the loop asks for them: by the group or, with --adv-std batch, by all, and clipped to 5."""
    g, _ = golden
    (std,), asked = seen.iterations[0].advantage
    one = torch.eye(64, dtype=torch.float64)[g["adv.onehot64.raw"].argmax()][None]
    for r, kind, name in (
        (g["adv.scores"].T, std, "group_std"),  # [P, G]
        (g["adv.scores"].T, "batch", "global_std"),
        (one, std, "onehot64.raw"),
    ):
        public = g[f"adv.{name}"].T.clamp(-5, 5)
        torch.testing.assert_close(group_advantage(r, kind, **asked), public, atol=1e-9, rtol=0)


def test_old_log_probabilities_of_another_model_stop_the_run(base, tmp_path, monkeypatch):
    """One batch of one state is enough, and nothing is trained."""
    score, calls = udm_grpo.log_prob, []

    def wrong(model, prompt, state, b, null):
        calls.append(state)
        return score(model, prompt, state, b, null) + 2e-3 * (len(calls) == 6)  # the last of the old ones

    monkeypatch.setattr(udm_grpo, "log_prob", wrong)
    with pytest.raises(SystemExit, match="the first ratio is not 1: old and new log-probabilities"):
        udm_grpo.main(arguments(base, tmp_path / "run", "--micro-batch", "4"))
    assert not (tmp_path / "run/metrics.jsonl").exists()


# ---- Flags


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--steps 4", "--steps 4: too few for --train-steps 3 from one of --starts 3"),
        ("--train-steps 0", "--train-steps 0"),
        ("--action intermediate", "--action intermediate: was drawn in the sampler's states"),
        ("--adv-clip 0", "--adv-clip 0.0: must be a number above 0"),
        ("--shift 0", "--shift 0.0: must be a number above 0"),
        ("--path linear", "--path"),
        ("--model tiny --task tiny-math --reward correct", "--path metric"),
    ],
)
def test_wrong_flag_ends_in_one_sentence_that_names_it(base, tmp_path, capsys, wrong, says):
    with pytest.raises(SystemExit) as stopped:
        udm_grpo.main([*arguments(base, tmp_path / "run"), *wrong.split()])
    said = f"{stopped.value} {capsys.readouterr().err}"
    assert says in said and "Traceback" not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_masked_model_is_refused(tmp_path):
    tiny.build("tiny-geneval").save(tmp_path / "masked")
    with pytest.raises(SystemExit, match="masked diffusion, which maskgrpo.py trains"):
        udm_grpo.main(["--model", str(tmp_path / "masked"), "--out", str(tmp_path / "run")])


def test_recipe_of_the_paper_is_the_default_with_its_models():
    for model in ("BAAI/URSA-1.7B-IBQ512", "LucasJinWang/FUDOKI"):
        for task, G in (("geneval", 8), ("ocr", 16), ("captions", 16)):
            args = udm_grpo.flags(["--model", model, "--task", task])
            assert (args.lr, args.betas, args.weight_decay, args.group_size) == (1e-6, (0.9, 0.95), 0.01, G)
            assert (args.prompts, args.steps, args.eval_steps, args.cfg) == (16, 10, 25, 0)
            assert (args.beta, args.eps, args.adv_clip, args.grad_clip) == (0.05, 1e-4, 5, 1)
            assert (args.rate, args.update, args.mu) == ("instantaneous", "accumulate", 1)
            assert args.source["lr"] == "paper" and args.source["iterations"] == "ours"
    assert udm_grpo.flags([]).rate == "integrated"
