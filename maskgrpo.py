"""MaskGRPO: group-relative policy optimisation of masked diffusion models (arXiv 2510.02880), and its
ablations.

    python maskgrpo.py                                   # tiny-math, minutes on a laptop
    python maskgrpo.py --task tiny-geneval               # images
    torchrun --nproc_per_node 8 maskgrpo.py --model GSAI-ML/LLaDA-8B-Instruct --task gsm8k --gamma 0.6

Rows of the paper's ablations, and its baselines:

    text   diffu-GRPO              --remask full --adv-std none --mask-seed batch
           + managed randomness    --remask full --adv-std none
           + AR-like reversing     --remask fading --gamma 0
           + truncation            --remask fading --gamma 0.6                     (MaskGRPO, the default)
           TraceRL-style           --remask trace --gamma 0
    image  UniGRPO                 --remask random --gamma 0 --sampler maskgit
           + truncation            --remask random --gamma 0.8 --sampler maskgit
           + emerge sampler        --remask random --gamma 0.8 --sampler emerge    (MaskGRPO, the default)
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

TEXT = dict(remask="fading", gamma=0.6, sampler="semi_autoregressive")
IMAGE = dict(remask="random", gamma=0.8, sampler="emerge")
RECIPES = [
    Recipe("", ("tiny-math",), TEXT, dict(block=8, steps=8, iterations=48)),
    Recipe("", ("tiny-geneval",), IMAGE, dict(steps=16, eps=0.05, iterations=96, eval_every=24)),
    Recipe(
        r"LLaDA-(8B-(Instruct|Base)|1\.5)$|MMaDA-8B-(Base|MixCoT)$",
        ("gsm8k", "math500", "mbpp"),
        TEXT
        | dict(length=256, steps=128, block=16, temperature=0.9, group_size=6, mu=12, eps=0.2, beta=0.01)
        | dict(lr=3e-6, weight_decay=0.1, betas=(0.9, 0.99), grad_clip=0.2, ref_every=64)
        | dict(lora_rank=128, lora_alpha=64.0),
        dict(prompts=16, iterations=400, warmup=0, micro_batch=12, dtype="bfloat16", grad_checkpoint=True)
        | dict(eval_every=50, save_every=25),
    ),
    Recipe(
        "MMaDA-8B",
        ("geneval", "ocr", "captions"),
        IMAGE | dict(schedule="cosine", steps=12, eval_steps=32, cfg=3.5, group_size=9, mu=8, lr=3e-6),
        dict(eps=0.2, beta=0.01, prompts=8, iterations=1800, micro_batch=6, grad_checkpoint=True)
        | dict(dtype="bfloat16", shard="fsdp"),
    ),
]


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = script_parser("maskgrpo.py", __doc__)
    run_flags(parser)
    rollout_flags(parser)
    g = parser.add_argument_group("sampler")
    g.add_argument(
        "--sampler",
        choices=("semi_autoregressive", "maskgit", "emerge"),
        default="semi_autoregressive",
        help="Alg. 3 | MaskGIT | Alg. 4",
    )
    g.add_argument("--block", type=int, default=8, help="tokens of a block (semi_autoregressive, Alg. 3)")
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
    g = parser.add_argument_group("importance estimate")
    g.add_argument(
        "--remask", choices=("fading", "random", "full", "trace"), default="fading",
        help="Rev(o, t): Alg. 1 | Alg. 2 | all of o and a share of the prompt | what was revealed last",
    )  # fmt: skip
    g.add_argument(
        "--gamma", type=float, default=0.6, help="truncation: t_j = gamma + (1-gamma) j/mu (Eq. 11)"
    )
    g.add_argument(
        "--ratio", choices=("token", "sequence", "mean"), default="token", help="unit of rho (Eq. 9)"
    )
    g.add_argument("--time-weight", choices=("none", "inverse"), default="none", help="1 | 1/t_j (Eq. 2)")
    g.add_argument(
        "--loss-norm", choices=("tokens", "length"), default="tokens", help="1/all loss tokens | 1/|o_i|"
    )
    g.add_argument(
        "--masks", choices=("independent", "nested"), default="independent", help="uniforms anew at each j"
    )
    g.add_argument(
        "--mask-seed", choices=("sample", "group", "batch"), default="sample", help="S_j: who shares a mask"
    )
    g.add_argument(
        "--prompt-mask", type=float, default=0.15, help="share of the prompt masked (--remask full)"
    )
    g.add_argument(
        "--score",
        choices=("conditional", "guided"),
        default="conditional",
        help="distribution that rho compares",
    )
    scale_flags(parser)
    args = parse(parser, RECIPES, argv)
    if not 0 <= args.gamma < 1:
        parser.error(f"--gamma {args.gamma}: must be a number in [0, 1)")
    if args.ratio != "token" and args.loss_norm != "tokens":
        parser.error(f"--loss-norm {args.loss_norm}: applies to --ratio token; else completions count evenly")
    if args.ratio == "sequence" and args.time_weight != "none":
        parser.error("--time-weight inverse: --ratio sequence has 1/t in l already (Eq. 2)")
    if args.masks == "nested" and args.remask not in ("fading", "random"):
        parser.error(f"--masks nested: --remask {args.remask} draws no mask; accepted with fading and random")
    if args.score == "guided" and args.cfg and args.cfg_until < 1:
        parser.error("--score guided: with --cfg-until 1 only, else what is scored is not what was sampled")
    return args


def mask_noise(args, kind: str, draw: int, iteration: int, samples: list[int], like: Tensor) -> Tensor:
    """Uniforms [B, *] in the shape of ``like``, from the seeds S_j: of each sample, its group's, or one for
    all."""
    share = {"sample": 1, "group": args.group_size, "batch": args.prompts * args.group_size}[args.mask_seed]
    g = [generator(kind, args.seed, iteration, draw, n // share) for n in samples]
    return uniform(g, like.shape[-1], device=like.device)


def masked_at(args, j: int, iteration: int, samples: list[int], revealed: Tensor) -> Tensor:
    """Completion tokens masked at t_j by Rev(o, t_j, S_j): bool [B, L]."""
    u = mask_noise(args, "mask", 0 if args.masks == "nested" else j, iteration, samples, revealed)
    return remask(args.remask, times(args.mu, args.gamma)[j], u, revealed)


def prompt_at(args, j: int, iteration: int, samples: list[int], prompt, mask_id: int):
    """The prompt as the model sees it at t_j: whole, but for diffu-GRPO, which masks a share of it anew at
    each j."""
    if args.remask != "full":
        return prompt
    u = mask_noise(args, "prompt mask", j, iteration, samples, prompt.ids)
    return prompt.masked(args.prompt_mask, u, mask_id)


def log_prob(model, state: tuple, b: slice, x_0: Tensor, null, w: float) -> Tensor:
    """log p(x_0^k | x_t, c) [N] at the loss tokens of rows b of a state (prompt, x_t, loss mask)."""
    prompt, x_t, loss_mask = state
    return model(
        prompt[b], x_t[b], where=loss_mask[b], target=x_0[b], null=None if null is None else null[b], cfg=w
    )


def loss_weight(args, loss_mask: Tensor, length: Tensor, world) -> Tensor:
    """Weight [B] of each loss token (or, if not --ratio token, each completion) of the update at t_j: one
    normaliser, over all processes, known before the first backward. Nothing masked anywhere gives weights of
    0, not NaN."""
    n_masked = loss_mask.sum(-1)
    if args.ratio != "token":
        return (n_masked > 0) / max(world.sum((n_masked > 0).sum())[0], 1)
    if args.loss_norm == "tokens":
        return torch.ones_like(length) / max(world.sum(n_masked.sum())[0], 1)
    return 1 / (length * args.prompts * args.group_size)


def objective(
    log_p: Tensor,
    log_old: Tensor,
    log_ref: Tensor | None,
    mask: Tensor,
    A: Tensor,
    t: float,
    weight: Tensor,
    args,
) -> tuple[Tensor, dict]:
    """Minus a micro-batch's share of the surrogate at t_j (Eq. 11, clipped), and sums for the log.

    log_p, log_old, log_ref [N]: log p(x_0^k | x_t, c) at the loss tokens, in the row-major order of mask [B,
    L]; A [B]; weight [B] as of ``loss_weight``.
    """
    row = mask.nonzero()[:, 0]  # [N]
    if args.ratio != "token":  # one rho and KL a completion: of l (Eq. 2), or of the mean over masked tokens
        scale = torch.full_like(A, 1 / t) if args.ratio == "sequence" else 1 / mask.sum(-1).clamp(min=1)
        every, row = row, mask.any(-1).nonzero()[:, 0]
        log_p, log_old, log_ref = (
            None if x is None else (torch.zeros_like(A).index_add(0, every, x) * scale)[row]
            for x in (log_p, log_old, log_ref)
        )
    rho = torch.exp(log_p - log_old)  # Eq. 9
    surrogate = torch.minimum(rho * A[row], rho.clamp(1 - args.eps, 1 + args.eps) * A[row])
    kl = torch.zeros_like(rho) if log_ref is None else k3(log_p, log_ref)  # Eq. 10
    S = surrogate - args.beta * kl  # A does not multiply the KL, though Eq. 11 prints it so
    if args.time_weight == "inverse":
        S = S / t
    clipped = surrogate < rho * A[row]  # where the clip acts
    sums = dict(kl=kl.sum().item(), clip_fraction=clipped.sum().item(), n=len(rho))
    return -(S * weight[row]).sum(), sums


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
        if args.remask == "full" and policy.prompt_mask_id is None:
            raise ValueError("--remask full: the model has no prompt_mask_id to mask the prompt with")
        settings = settings_of(args, policy.length)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.lr, tuple(args.betas), weight_decay=args.weight_decay)
        run = Run(args, world)
        run.restore(policy, reference, optimizer)
        # a prompt that is too long ends it now, not in the middle
        policy.encode([row["prompt"] for row in (*rows_train, *rows_test)])

    G, w = args.group_size, args.cfg if args.score == "guided" else 0.0
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

        # Reward, then advantage in the groups of all processes (Eq. 4)
        completions = list(policy.decode(x_0))
        components = run.gather_rewards(rewards, rows, completions, args.prompts * G)
        r = torch.from_numpy(rewards.total(components, G, args.reward_normalize)).view(-1, G)
        A = group_advantage(r, args.adv_std).flatten()[mine].float().to(world.device)
        equal = r.amax(-1) == r.amin(-1)  # groups without a signal
        clock.append(time.time())

        # The masked states of all t_j; then log-probabilities of the old policy and the reference in them
        length = end_of_text(x_0, policy.end_ids)  # |o_i|
        inside = (torch.arange(x_0.shape[1], device=world.device) < length[:, None]) & real[:, None]
        if args.drop_equal:
            inside &= ~equal.to(world.device).repeat_interleave(G)[mine][:, None]
        states = []  # for each j: prompt, x_t, and the loss tokens: masked, and not after the end of the text
        for j in range(args.mu):
            masked = masked_at(args, j, iteration, mine, revealed)
            context = prompt_at(args, j, iteration, mine, prompt, policy.prompt_mask_id)
            states.append((context, torch.where(masked, policy.mask_id, x_0), masked & inside))
        score = partial(log_prob, x_0=x_0, null=null, w=w)
        with torch.no_grad():
            log_old = [[score(policy, state, b) for b in batches] for state in states]
            log_ref = [
                [score(reference, state, b) if reference else None for b in batches] for state in states
            ]

        # Update: one optimizer step at each t_j
        sums, first, grad_norm = Counter(), 0.0, 0.0
        for j, (state, t) in enumerate(zip(states, times(args.mu, args.gamma), strict=True)):
            loss_mask = state[-1]
            weight = loss_weight(args, loss_mask, length, world)
            for i, b in enumerate(batches):
                log_p = score(policy, state, b)
                loss, s = objective(
                    log_p, log_old[j][i], log_ref[j][i], loss_mask[b], A[b], t, weight[b], args
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
