"""udm_grpo.py: its loss against the recorded public pipeline, its states, and whole runs of it."""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, shared
from safetensors.torch import load_file

import udm_grpo
from common import generator, group_advantage, uniform_path
from models import load, tiny
from models.policy import Prompt
from models.ursa import URSA, load_qwen3
from samplers import euler_times, sample

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
    steps = json.loads(shared("golden/ursa_tiny/grpo_step.json").read_text())
    assert all(steps[f"{name}.old_logps_is_none"] == [True] * 3 for name in VARIANTS)
    assert not info["cases"]["old_given_official_nokl"]["loss_depends_on_logits"]
    A, public = g["loss.advantages"], g["loss.old_logps"].mean(-1).exp()
    slip = -torch.minimum(public * A, public.clamp(1 - 1e-4, 1 + 1e-4) * A).mean()
    assert slip.item() == pytest.approx(info["cases"]["old_given_official_nokl"]["loss"], abs=1e-6)
    logits, log_p = scores(g)
    loss_of(g, log_p, g["loss.old_logps"], eps=0.2)[0].backward()
    assert logits.grad.abs().max() > 1e-3


def test_scores_of_bfloat16_logits_are_too_coarse_for_the_clip(golden):
    """Why old log-probabilities are recomputed in float32: E2."""
    g, _ = golden
    error = (g["loss.logps_token_bf16_logits"].mean(-1) - g["loss.logps_token"].mean(-1)).abs()
    assert error.max() > 10 * udm_grpo.PAPER["eps"]


def test_advantages_equal_the_public_ones(golden):
    g, _ = golden
    r = g["adv.scores"].T  # [P, G]
    public = dict(ddof=0, eps=1e-4)
    torch.testing.assert_close(group_advantage(r, **public), g["adv.group_std"].T, atol=1e-9, rtol=0)
    torch.testing.assert_close(
        group_advantage(r, "batch", **public), g["adv.global_std"].T, atol=1e-9, rtol=0
    )
    one = torch.eye(64, dtype=torch.float64)[g["adv.onehot64.raw"].argmax()][None]
    torch.testing.assert_close(group_advantage(one, **public), g["adv.onehot64.raw"].T, atol=1e-9, rtol=0)
    assert group_advantage(one, **public, clip=5.0).max() == g["adv.onehot64.clipped"].max() == 5


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
    g = load_file(shared("golden/ursa_tiny/grpo_step.safetensors"))
    info = json.loads(shared("golden/ursa_tiny/grpo_step.json").read_text())
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


def rollout(small, samples, cfg=0.0, **flags):
    """(args, drawn, at): what the loop has when it makes its states. at(trajectory, k, t) -> x_t."""
    args = udm_grpo.flags(["--cfg", str(cfg), *(f"--{k}={v}" for k, v in flags.items())])
    path, shift = uniform_path(small)
    settings = dict(sampler="euler", steps=args.steps, temperature=1.0, cfg=cfg, cfg_until=args.cfg_until)
    settings |= dict(path=path, shift=shift, rate=args.rate)
    prompt = small.encode(["a red square"])[[0] * len(samples)]
    drawn = sample(small, prompt, [generator("rollout", 0, 0, n) for n in samples], settings, True)
    at = partial(udm_grpo.state_at, args, drawn=[drawn], path=path, iteration=0, samples=samples)
    return prompt, drawn, at


def test_states_are_those_of_the_sampler_or_of_the_path_at_the_same_times(small):
    """Report C10: nothing is replayed at another time. Forward states keep x_1 as often as p_t says."""
    _, drawn, at = rollout(small, list(range(200)))
    path, shift = uniform_path(small)
    for k, t in enumerate(euler_times(10, shift)[:-1]):
        assert drawn.trajectory[k][1] == t
        assert torch.equal(at("backward", k, t), drawn.trajectory[k][0])
        kept = (at("forward", k, t) == drawn.x_0).double().mean()
        expected = path.probability(drawn.x_0, t).gather(-1, drawn.x_0[..., None]).double().mean()
        assert kept == pytest.approx(expected.item(), abs=0.02)


def test_forward_states_belong_to_the_sample_not_to_its_batch(small):
    _, _, at = rollout(small, [0, 1, 2])
    _, _, alone = rollout(small, [2])
    assert torch.equal(at("forward", 2, 0.2)[2:], alone("forward", 2, 0.2))
    first, second = (at("forward", k, 0.0) for k in (0, 1))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], second[0])


def test_trained_steps_are_consecutive_from_one_of_three_starts():
    args = udm_grpo.flags([])
    chosen = [udm_grpo.trained_steps(args, i) for i in range(60)]
    assert {s.start for s in chosen} == {0, 1, 2} and all(len(s) == 3 for s in chosen)
    assert chosen == [udm_grpo.trained_steps(args, i) for i in range(60)]


def test_guided_scores_are_of_the_distribution_sampled(small):
    """Report D2: an intermediate action, scored, has the log-probability of its draw under guided logits,
    and both branches get a gradient."""
    prompt, drawn, _ = rollout(small, [0, 1], cfg=3.0)
    null = small.unconditional(prompt)
    x_t, a = drawn.trajectory[1][0], drawn.x_1[1]
    log_p = udm_grpo.log_prob(small, prompt, (x_t, a, 3.0), slice(None), null)
    guided = (4 * small(prompt, x_t) - 3 * small(null, x_t)).log_softmax(-1).view(*a.shape, -1)
    torch.testing.assert_close(log_p, guided.gather(-1, a[..., None]).squeeze(-1), atol=1e-5, rtol=0)
    weight = small.backbone.get_input_embeddings().weight
    gradient = torch.autograd.grad(log_p.mean(), weight)[0]
    assert gradient[prompt.ids[0]].abs().max() > 0 and gradient[null.ids[0]].abs().max() > 0


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
    every = "--lr 1e-3 --mu 1 --eps 1e-4 --iterations 3 --save-every 2"
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


def test_more_steps_a_rollout_clip(base, straight, tmp_path, capsys):
    """That one step never does is said."""
    udm_grpo.main(arguments(base, tmp_path / "one", "--iterations", "1"))
    assert capsys.readouterr().out.count("the ratio is 1 by construction") == 1
    udm_grpo.main(arguments(base, tmp_path / "two", "--iterations", "1", "--mu", "2"))
    assert "by construction" not in capsys.readouterr().out
    (metrics,) = lines(tmp_path / "two/metrics.jsonl")
    assert metrics["ratio_max_first"] == 1 and 0 < metrics["clip_fraction"] <= 0.5


@pytest.mark.parametrize(
    "row",
    [
        "--trajectory backward --action intermediate",
        "--trajectory backward --action intermediate --cfg 2",
        "--trajectory backward --action clean --cfg 2 --cfg-until 0.3",
        "--trajectory forward --action clean --cfg 2",
    ],
)
def test_each_row_of_the_ablation_starts_at_ratio_one(base, tmp_path, row):
    """Reports D2, E1: and each state after the first is clipped."""
    udm_grpo.main(arguments(base, tmp_path / "run", "--iterations", "1", "--update", "each", *row.split()))
    (metrics,) = lines(tmp_path / "run/metrics.jsonl")
    assert metrics["ratio_max_first"] == 1 and metrics["grad_norm"] > 0 and metrics["clip_fraction"] > 0


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
