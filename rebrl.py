"""RebRL: reinforcement learning of masked diffusion models with rebalanced timestep credit (CVPR 2026).

    python rebrl.py                                      # tiny-geneval, minutes on a laptop
    torchrun --nproc_per_node 6 rebrl.py --model Gen-Verse/MMaDA-8B-Base --task geneval --data prompts/ \\
        --reward hpsv3

A token that is masked at t_j is masked at every later t_j' too, so what the sampler reveals late is trained
most often: a token revealed at t_j has weight sum_{j'>=j} 1/t_j' = mu sum_{j'>=j} 1/j' in an update (from
Eq. 9). Two factors take this back. The rows of the paper's ablation, and the weight that is left:

    w/o re-balance   --rebalance none      mu sum_{j'>=j} 1/j'
    1-order          --rebalance first     mu - j + 1
    2-order          --rebalance second    sum_{j'>=j} j'/mu
    token-level      --rebalance token     1, whatever j                            (RebRL, the default)

``python -m eval.report credit`` measures these weights on the loss below and draws them.
"""

import argparse
import math
import sys
import time
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from common import end_of_text, generator, group_advantage, k3, prompt_indices, remask, start_processes, times
from flags import (
    Recipe,
    one_sentence,
    parse,
    rollout_flags,
    run_flags,
    scale_flags,
    script_parser,
    update_flags,
)
from run import Run
from samplers import sample, settings_of, uniform

RECIPES = [
    Recipe(
        "", ("tiny-geneval",), {}, dict(prompts=8, mu=8, steps=16, eps=0.05, iterations=96, eval_every=24)
    ),
    Recipe("", ("tiny-math",), {}, dict(sampler="semi_autoregressive", remask="fading", steps=8)),
    Recipe(
        "MMaDA-8B",
        ("geneval", "ocr", "captions"),
        dict(lr=3e-6, prompts=8, group_size=9, mu=8, steps=12, cfg=3.5, iterations=1800),
        dict(eps=0.2, beta=0.01, sampler="emerge", schedule="cosine", eval_steps=32, micro_batch=6)
        | dict(grad_checkpoint=True, dtype="bfloat16", shard="fsdp"),
    ),
]
ORDER = {"none": 0, "first": 1, "second": 2, "token": 1}  # lambda(t) = t^order (Eq. 11)


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = script_parser("rebrl.py", __doc__)
    run_flags(parser)
    parser.set_defaults(task="tiny-geneval")
    rollout_flags(parser)
    g = parser.add_argument_group("sampler")
    g.add_argument(
        "--sampler",
        choices=("emerge", "maskgit", "semi_autoregressive"),
        default="emerge",
        help="the reverse kernel | MaskGIT | blocks, for texts",
    )
    g.add_argument("--block", type=int, default=8, help="tokens of a block (semi_autoregressive)")
    g.add_argument(
        "--eos-rule", choices=("none", "last"), default="none", help="last: end ids are revealed last"
    )
    g.add_argument(
        "--schedule",
        choices=("cosine", "linear", "pow2", "sigmoid"),
        default="cosine",
        help="1 - alpha over the steps",
    )
    update_flags(parser)
    g = parser.add_argument_group("credit")
    g.add_argument(
        "--rebalance", choices=tuple(ORDER), default="token",
        help="lambda(t), F: 1, 1 | t, 1 | t^2, 1 | t, times at which the token is masked",
    )  # fmt: skip
    g.add_argument(
        "--masks", choices=("nested", "independent"), default="nested",
        help="nested: what is masked at t_j stays masked at all later ones | uniforms anew at each j",
    )  # fmt: skip
    g.add_argument(
        "--remask", choices=("random", "fading", "trace"), default="random",
        help="each token alike | the end of a text first | what was revealed last",
    )  # fmt: skip
    g.add_argument("--gamma", type=float, default=0.0, help="truncation: t_j = gamma + (1-gamma) j/mu")
    g.add_argument(
        "--score",
        choices=("conditional", "guided"),
        default="conditional",
        help="distribution that rho compares",
    )
    g.add_argument("--ratio", default="token", help="unit of rho: token only")
    g.add_argument("--loss-norm", default="length", help="1/|o_i| only (|o_i| = L for images)")
    scale_flags(parser)
    args = parse(parser, RECIPES, argv)
    if not 0 <= args.gamma < 1:
        parser.error(f"--gamma {args.gamma}: must be a number in [0, 1)")
    for flag, accepted in (("ratio", "token"), ("loss_norm", "length")):
        if (value := getattr(args, flag)) != accepted:
            parser.error(
                f"--{flag.replace('_', '-')} {value}: accepted is {accepted}; to divide by the number of "
                "masked tokens, on top of 1/t, would undo the rebalancing"
            )
    if args.score == "guided" and args.cfg and args.cfg_until < 1:
        parser.error("--score guided: with --cfg-until 1 only, else what is scored is not what was sampled")
    return args


def masked_at(args, j: int, iteration: int, samples: list[int], revealed: Tensor) -> Tensor:
    """Completion tokens masked at t_j: bool [B, L]."""
    draw = 0 if args.masks == "nested" else j
    g = [generator("mask", args.seed, iteration, draw, n) for n in samples]
    t = times(args.mu, args.gamma)[j]
    return remask(args.remask, t, uniform(g, revealed.shape[-1], device=revealed.device), revealed)


def credit(rebalance: str, masked: Tensor, t: list[float]) -> Tensor:
    """lambda(t_j) / t_j / F(k) [mu, B, L], the weight of token k at t_j, from all masks [mu, B, L] of an
    update."""
    weight = torch.tensor([t_j ** ORDER[rebalance] / t_j for t_j in t], device=masked.device)
    weight = weight.view(-1, 1, 1).expand(masked.shape)
    if rebalance == "token":
        weight = weight / masked.sum(0)  # F(k) (Alg. 1, line 17); not 0, since t_mu = 1 masks everything
    return weight


def log_prob(model, state: tuple, b: slice, x_0: Tensor, null, w: float) -> Tensor:
    """log p(x_0^k | x_t, c) [N] at the loss tokens of rows b of a state (prompt, x_t, loss mask)."""
    prompt, x_t, loss_mask = state
    return model(
        prompt[b], x_t[b], where=loss_mask[b], target=x_0[b], null=None if null is None else null[b], cfg=w
    )


def objective(
    log_p: Tensor, log_old: Tensor, log_ref: Tensor | None, mask: Tensor, A: Tensor, weight: Tensor, args
) -> tuple[Tensor, dict]:
    """Minus a micro-batch's share of J_j (Eq. 5, rebalanced), and sums for the log.

    log_p, log_old, log_ref [N]: log p(x_0^k | x_t, c) at the loss tokens, in the row-major order of mask [B,
    L]; A [B]; weight [B, L]: credit / (|o_i| B G).
    """
    A = A[mask.nonzero()[:, 0]]  # [N]
    rho = torch.exp(log_p - log_old)
    surrogate = torch.minimum(rho * A, rho.clamp(1 - args.eps, 1 + args.eps) * A)
    kl = torch.zeros_like(rho) if log_ref is None else k3(log_p, log_ref)
    J = (surrogate - args.beta * kl) * weight[mask]  # the KL is rebalanced with the reward
    clipped = surrogate < rho * A  # where the clip acts
    sums = dict(kl=kl.sum().item(), clip_fraction=clipped.sum().item(), n=len(rho))
    return -J.sum(), sums


def main(argv: list[str] | None = None) -> None:
    args = flags(argv)
    from eval.evaluate import evaluate_run
    from eval.rewards import Rewards
    from eval.task import load_task
    from scale import load_policy

    with one_sentence():
        world = start_processes()
        task = load_task(args.task, args.protocol, args.unsafe_exec)
        rewards = Rewards(task, args.reward, strict=args.strict, device=str(world.device))
        rows_train, rows_test = task.rows("train", args.data), task.rows("test", args.data)
        policy, reference = load_policy(args, world, task)
        if policy.mask_id is None:
            raise ValueError(f"--model {args.model}: a model of uniform diffusion, which udm_grpo.py trains")
        settings = settings_of(args, policy.length)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.lr, tuple(args.betas), weight_decay=args.weight_decay)
        run = Run(args, world)
        run.restore(policy, reference, optimizer)
        # a prompt that is too long ends it now, not in the middle
        policy.encode([row["prompt"] for row in (*rows_train, *rows_test)])

    G, w, t = args.group_size, args.cfg if args.score == "guided" else 0.0, times(args.mu, args.gamma)
    mine, real = world.share(args.prompts * G)  # sample n belongs to group n // G, whichever process has it
    batches = [slice(i, i + args.micro_batch) for i in range(0, len(mine), args.micro_batch)]
    real = torch.tensor(real, device=world.device).bool()
    started = run.step  # 0, or where a resumed run goes on
    evaluate_run(run, 0, policy, task, rewards, rows_test, settings, args)

    for iteration in run.iterations():
        # Rollout: o_1..o_G for each prompt c
        clock = [time.time()]
        groups = [rows_train[i] for i in prompt_indices(len(rows_train), args.prompts, iteration, args.seed)]
        rows = [groups[n // G] for n in mine]
        prompt = policy.encode([row["prompt"] for row in groups]).repeat_interleave(G)[mine]
        null = policy.unconditional(prompt) if w else None
        noise = [generator("rollout", args.seed, iteration, n) for n in mine]
        drawn = [sample(policy, prompt[b], noise[b], settings) for b in batches]
        x_0, revealed = torch.cat([s.x_0 for s in drawn]), torch.cat([s.revealed for s in drawn])  # [B, L]
        clock.append(time.time())

        # Reward, then advantage in the groups of all processes
        completions = list(policy.decode(x_0))
        components = run.gather_rewards(rewards, rows, completions, args.prompts * G)
        r = torch.from_numpy(rewards.total(components, G, args.reward_normalize)).view(-1, G)
        A = group_advantage(r, args.adv_std).flatten()[mine].float().to(world.device)
        equal = r.amax(-1) == r.amin(-1)  # groups without a signal
        clock.append(time.time())

        # The masks of all t_j, the credit that follows from them, and the log-probabilities before the update
        masked = torch.stack([masked_at(args, j, iteration, mine, revealed) for j in range(args.mu)])
        length = end_of_text(x_0, policy.end_ids)  # |o_i|
        weight = credit(args.rebalance, masked, t) / (length[:, None] * args.prompts * G)  # [mu, B, L]
        inside = (torch.arange(x_0.shape[1], device=world.device) < length[:, None]) & real[:, None]
        if args.drop_equal:
            inside &= ~equal.to(world.device).repeat_interleave(G)[mine][:, None]
        states = [(prompt, torch.where(m, policy.mask_id, x_0), m & inside) for m in masked]
        score = partial(log_prob, x_0=x_0, null=null, w=w)
        with torch.no_grad():
            log_old = [[score(policy, state, b) for b in batches] for state in states]
            log_ref = [
                [score(reference, state, b) if reference else None for b in batches] for state in states
            ]

        # Update: one optimizer step at each t_j
        sums, first, grad_norm = Counter(), 0.0, 0.0
        for j, state in enumerate(states):
            for i, b in enumerate(batches):
                log_p = score(policy, state, b)
                loss, s = objective(
                    log_p, log_old[j][i], log_ref[j][i], state[-1][b], A[b], weight[j][b], args
                )
                loss.backward()
                sums.update(s)
                if j == 0:
                    first = max([first, *(log_p - log_old[j][i]).abs().tolist()])
            if j == 0 and iteration == started and math.exp(world.max(first)) > 1 + 1e-3:
                sys.exit("the first ratio is not 1: old and new log-probabilities are not of one model")
            world.sum_gradients(parameters)
            grad_norm += run.optimizer_step(parameters, run.warmed_up(iteration * args.mu + j)) / args.mu
        run.refresh(reference, policy, (iteration + 1) * args.mu)
        clock.append(time.time())

        kl, clipped, n = world.sum(sums["kl"], sums["clip_fraction"], sums["n"])
        run.log(
            iteration + 1,
            {
                "reward/mean": r.mean().item(),
                **{f"reward/{name}": float(v.mean()) for name, v in components.items()},
                "reward/errors": world.sum(rewards.errors)[0],
                "kl": kl / max(n, 1),
                "clip_fraction": clipped / max(n, 1),
                "ratio_max_first": math.exp(world.max(first)),
                "grad_norm": grad_norm,
                "zero_spread": equal.double().mean().item(),
                "length": world.gather(length, args.prompts * G).double().mean().item(),
                **{
                    f"time/{k}": clock[i + 1] - clock[i]
                    for i, k in enumerate(("rollout", "reward", "update"))
                },
                "lr": optimizer.param_groups[0]["lr"],
            },
        )
        evaluate_run(run, iteration + 1, policy, task, rewards, rows_test, settings, args)
    run.finish(policy)


if __name__ == "__main__":
    main()
