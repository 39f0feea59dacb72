"""UDM-GRPO: group-relative policy optimisation of uniform discrete diffusion (arXiv 2604.18518), and its
ablations.

    python udm_grpo.py                                   # tiny-geneval, minutes on a laptop
    torchrun --nproc_per_node 8 udm_grpo.py --model BAAI/URSA-1.7B-IBQ512 --task geneval --data prompts/

Rows of the paper's ablation (Table 3); each works with --cfg and without, and scores what was sampled:

    naive, as Flow-GRPO     --trajectory backward --action intermediate --cfg 6 --cfg-until 0.9
    clean action            --trajectory backward --action clean --cfg 6 --cfg-until 0.9
    forward trajectory      --trajectory forward --action clean --cfg 6 --cfg-until 0.9
    CFG-Free                --trajectory forward --action clean --cfg 0             (UDM-GRPO, the default)

Time runs from noise, x_0 ~ Uniform(K), to the clean sample x_1; the policy is p(x_1 | x_t, c).
"""

import argparse
import math
import sys
import time
from collections import Counter
from functools import partial

import torch
from torch import Tensor

from common import generator, group_advantage, k3, prompt_indices, start_processes
from flags import (
    Recipe,
    one_sentence,
    parse,
    path_flags,
    path_of,
    rollout_flags,
    run_flags,
    scale_flags,
    script_parser,
    update_flags,
)
from run import Run
from samplers import euler_times, sample, settings_of, uniform

PAPER = dict(lr=1e-6, betas=(0.9, 0.95), weight_decay=0.01, grad_clip=1.0, beta=0.05, eps=1e-4, adv_clip=5.0)
PAPER |= dict(prompts=16, group_size=8, steps=10, eval_steps=25, train_steps=3, starts=3, cfg=0.0)
PAPER |= dict(update="accumulate", rate="instantaneous")
OURS = dict(iterations=2000, micro_batch=8, eval_every=50, save_every=50)
TINY = dict(path="metric", prompts=8, mu=2, update="each", eps=0.2, lr=3e-4, iterations=120, eval_every=20)
RECIPES = [
    Recipe("", ("tiny-geneval", "tiny-math"), {}, TINY),  # of which tiny-math has no uniform base
    Recipe("(?i)ursa|fudoki", ("geneval",), PAPER, OURS),
    Recipe("(?i)ursa|fudoki", ("ocr", "captions"), PAPER | dict(group_size=16), OURS),  # captions: PickScore
]


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = script_parser("udm_grpo.py", __doc__)
    run_flags(parser)
    rollout_flags(parser)
    path_flags(parser, ("mixture", "metric"))
    g = parser.add_argument_group("sampler")
    g.add_argument(
        "--rate", choices=("integrated", "instantaneous"), default="integrated",
        help="rate of a jump over a step: its integral | that at its start, as the public code",
    )  # fmt: skip
    update_flags(parser)
    g = parser.add_argument_group("states and actions")
    g.add_argument(
        "--trajectory", choices=("forward", "backward"), default="forward",
        help="states x_t: from p_t(x | x_1) | those of the sampler",
    )  # fmt: skip
    g.add_argument(
        "--action", choices=("clean", "intermediate"), default="clean",
        help="what is scored in x_t: the final sample x_1 | the x_1 drawn there",
    )  # fmt: skip
    g.add_argument("--train-steps", type=int, default=3, help="consecutive steps trained (Reduced-Step)")
    g.add_argument("--starts", type=int, default=3, help="the first of them is drawn from 0..starts-1")
    g.add_argument(
        "--update", choices=("accumulate", "each"), default="accumulate",
        help="one optimizer step over all states | one at each",
    )  # fmt: skip
    g.add_argument(
        "--kl",
        choices=("token", "mean"),
        default="token",
        help="k3 of each token | of their mean (public code)",
    )
    g.add_argument("--adv-clip", type=float, default=5.0, help="bound of the advantage")
    g.add_argument(
        "--score", choices=("guided", "conditional"), default="guided", help="distribution that r compares"
    )
    scale_flags(parser)
    shared = PAPER | dict(task="tiny-geneval", mu=1, eval_steps=None, rate="integrated", sampler="euler")
    parser.set_defaults(**shared)
    args = parse(parser, RECIPES, argv)
    if args.train_steps < 1 or args.starts < 1 or args.starts - 1 + args.train_steps > args.steps:
        parser.error(
            f"--steps {args.steps}: too few for --train-steps {args.train_steps} from one of "
            f"--starts {args.starts} (both at least 1)"
        )
    if args.action == "intermediate" and args.trajectory == "forward":
        parser.error(
            "--action intermediate: was drawn in the sampler's states, so give --trajectory backward"
        )
    if not args.adv_clip > 0:
        parser.error(f"--adv-clip {args.adv_clip}: must be a number above 0")
    return args


def trained_steps(args, iteration: int) -> range:
    """Reduced-Step: the consecutive steps of the rollout, in its noisy half, that an iteration trains."""
    start = torch.randint(args.starts, (), generator=generator("start", args.seed, iteration)).item()
    return range(start, start + args.train_steps)


def state_at(
    args, trajectory: str, k: int, t: float, drawn: list, path, iteration: int, samples: list[int]
) -> Tensor:
    """x_t [B, L] at step k. backward: as the sampler fed it to the model; forward: x_t ~ p_t(x | x_1), the
    clean sample noised again, each with uniforms of its own."""
    if trajectory == "backward":
        return torch.cat([s.trajectory[k][0] for s in drawn])
    x_1 = torch.cat([s.x_0 for s in drawn])
    g = [generator("forward", args.seed, iteration, k, n) for n in samples]
    return path.corrupt(x_1, t, uniform(g, x_1.shape[-1], device=x_1.device))


def log_prob(model, prompt, state: tuple, b: slice, null) -> Tensor:
    """log pi(a | s) = log p(a^k | x_t, c) [B, L] of rows b of a state (x_t, action a, guidance w)."""
    x_t, a, w = state
    null = None if null is None else null[b]
    return model(prompt[b], x_t[b], target=a[b], null=null, cfg=w).view(a[b].shape)


def objective(
    log_p: Tensor, log_old: Tensor, log_ref: Tensor | None, A: Tensor, weight: Tensor, args
) -> tuple[Tensor, dict]:
    """Minus a micro-batch's share of the clipped surrogate in one state, and sums for the log.

    log_p, log_old, log_ref [B, L]: log p(a^k | x_t, c); A [B]; weight [B], 0 for what is not trained.
    """
    r = torch.exp(log_p.mean(-1) - log_old.mean(-1))  # r_t^i: of token means, so that L does not matter
    surrogate = torch.minimum(r * A, r.clamp(1 - args.eps, 1 + args.eps) * A)
    kl_token = kl_mean = torch.zeros_like(r)
    if log_ref is not None:
        kl_token, kl_mean = k3(log_p, log_ref).mean(-1), k3(log_p.mean(-1), log_ref.mean(-1))
    kl = kl_token if args.kl == "token" else kl_mean
    S = surrogate - args.beta * kl
    real = weight > 0
    sums = {"kl": kl, "kl_token": kl_token, "kl_mean": kl_mean, "clip_fraction": surrogate < r * A}
    sums = {name: value[real].sum().item() for name, value in sums.items()} | {"n": real.sum().item()}
    return -(S * weight).sum(), sums


def main(argv: list[str] | None = None) -> None:
    args = flags(argv)
    from eval.evaluate import evaluate_run
    from eval.rewards import Rewards
    from eval.task import load_task
    from eval.udm_diagnostics import diagnose, training_states
    from scale import load_policy

    with one_sentence():
        world = start_processes()
        task = load_task(args.task, args.protocol, args.unsafe_exec)
        rewards = Rewards(task, args.reward, strict=args.strict, device=str(world.device))
        rows_train, rows_test = task.rows("train", args.data), task.rows("test", args.data)
        policy, reference = load_policy(args, world, task)
        if policy.mask_id is not None:
            raise ValueError(f"--model {args.model}: a model of masked diffusion, which maskgrpo.py trains")
        path, shift = path_of(args, policy)
        settings = settings_of(args, policy.length, path, shift)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.lr, tuple(args.betas), weight_decay=args.weight_decay)
        run = Run(args, world)
        run.restore(policy, reference, optimizer)
        # a prompt that the model refuses ends it now, not in the middle
        policy.encode([row["prompt"] for row in (*rows_train, *rows_test)])
        training = training_states(policy, task, path)
    if args.update == "accumulate" and args.mu == 1 and world.rank == 0:
        print("one optimizer step a rollout: the ratio is 1 by construction, and --eps never acts")
    elif args.dtype == "bfloat16" and args.eps < 1e-2 and world.rank == 0:
        print(
            f"--dtype bfloat16 rounds log-probabilities by up to 2e-3: with --eps {args.eps} that alone clips"
        )

    G = args.group_size
    times = euler_times(args.steps, shift)[:-1]  # of the sampler's and of the forward states alike
    # scored as sampled: guided until the same time
    w = [args.cfg if args.score == "guided" and t < args.cfg_until else 0.0 for t in times]
    updates = args.mu * (args.train_steps if args.update == "each" else 1)  # optimizer steps an iteration
    mine, real = world.share(args.prompts * G)  # sample n belongs to group n // G, whichever process has it
    batches = [slice(i, i + args.micro_batch) for i in range(0, len(mine), args.micro_batch)]
    real = torch.tensor(real, device=world.device)
    started = run.step  # 0, or where a resumed run goes on
    evaluate_run(run, 0, policy, task, rewards, rows_test, settings, args)

    for iteration in run.iterations():
        # Rollout: x_1 of G samples for each prompt c
        clock = [time.time()]
        groups = [rows_train[i] for i in prompt_indices(len(rows_train), args.prompts, iteration, args.seed)]
        rows = [groups[n // G] for n in mine]
        prompt = policy.encode([row["prompt"] for row in groups]).repeat_interleave(G)[mine]
        null = policy.unconditional(prompt) if any(w) else None
        noise = [generator("rollout", args.seed, iteration, n) for n in mine]
        drawn = [sample(policy, prompt[b], noise[b], settings, keep_trajectory=True) for b in batches]
        x_1 = torch.cat([s.x_0 for s in drawn])  # [B, L]; a sampler calls its result x_0
        clock.append(time.time())

        # Reward, then advantage in the groups of all processes
        completions = list(policy.decode(x_1))
        components = run.gather_rewards(rewards, rows, completions, args.prompts * G)
        r = torch.from_numpy(rewards.total(components, G, args.reward_normalize)).view(-1, G)
        A = group_advantage(r, args.adv_std, ddof=0, eps=1e-4, clip=args.adv_clip)
        A = A.flatten()[mine].float().to(world.device)
        equal = r.amax(-1) == r.amin(-1)  # groups without a signal
        clock.append(time.time())

        # Diagnostics, now and then
        measured = {}
        if iteration in (0, args.iterations - 1) or (args.eval_every and iteration % args.eval_every == 0):
            states_of = partial(state_at, args, drawn=drawn, path=path, iteration=iteration, samples=mine)
            measured = diagnose(policy, prompt, null, w, batches, states_of, times, training, real, world)
        clock.append(time.time())

        # States x_t and actions of the steps trained; then their log-probabilities, before the first update
        states = []
        for k in trained_steps(args, iteration):
            x_t = state_at(args, args.trajectory, k, times[k], drawn, path, iteration, mine)
            a = x_1 if args.action == "clean" else torch.cat([s.x_1[k] for s in drawn])
            states.append((x_t, a, w[k]))
        with torch.no_grad():
            log_old = [[log_prob(policy, prompt, s, b, null) for b in batches] for s in states]
            log_ref = [
                [log_prob(reference, prompt, s, b, null) if reference else None for b in batches]
                for s in states
            ]

        # Update: one optimizer step over all states (accumulate), or one at each
        kept = real
        if args.drop_equal:
            kept = real * ~equal.to(world.device).repeat_interleave(G)[mine]
        weight = kept / max(world.sum(kept.sum())[0], 1)
        steps = (
            [range(args.train_steps)]
            if args.update == "accumulate"
            else [[k] for k in range(args.train_steps)]
        )
        sums, first, grad_norm = Counter(), 0.0, 0.0
        for u, of_step in enumerate(steps * args.mu):
            for k in of_step:
                for i, b in enumerate(batches):
                    log_p = log_prob(policy, prompt, states[k], b, null)
                    loss, s = objective(
                        log_p, log_old[k][i], log_ref[k][i], A[b], weight[b] / len(of_step), args
                    )
                    loss.backward()
                    sums.update(s)
                    if u == 0:
                        first = max([first, *(log_p - log_old[k][i]).mean(-1).abs().tolist()])
            if u == 0 and iteration == started and math.exp(world.max(first)) > 1 + 1e-3:
                sys.exit("the first ratio is not 1: old and new log-probabilities are not of one model")
            world.sum_gradients(parameters)
            grad_norm += run.optimizer_step(parameters, run.warmed_up(iteration * updates + u)) / updates
        run.refresh(reference, policy, (iteration + 1) * updates, updates)
        clock.append(time.time())

        names = ("kl", "kl_token", "kl_mean", "clip_fraction")
        *means, n = world.sum(*(sums[name] for name in names), sums["n"])
        metrics = {
            "reward/mean": r.mean().item(),
            **{f"reward/{name}": float(v.mean()) for name, v in components.items()},
            "reward/errors": world.sum(rewards.errors)[0],
            **{name: value / max(n, 1) for name, value in zip(names, means, strict=True)},
            "ratio_max_first": math.exp(world.max(first)),
            "grad_norm": grad_norm,
            "zero_spread": equal.double().mean().item(),
            **{
                f"time/{k}": clock[i + 1] - clock[i]
                for i, k in enumerate(("rollout", "reward", "diagnose", "update"))
            },
            "lr": optimizer.param_groups[0]["lr"],
        }
        run.log(iteration + 1, metrics | measured)
        evaluate_run(run, iteration + 1, policy, task, rewards, rows_test, settings, args)
    run.finish(policy)


if __name__ == "__main__":
    main()
