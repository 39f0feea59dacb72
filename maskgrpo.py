"""MaskGRPO: group-relative policy optimisation of masked diffusion models (arXiv 2510.02880), and its ablations.

    python maskgrpo.py                                   # tiny-math, minutes on a laptop
    python maskgrpo.py --task tiny-geneval               # images
    torchrun --nproc_per_node 8 maskgrpo.py --model GSAI-ML/LLaDA-8B-Instruct --task gsm8k --gamma 0.6

Rows of the paper's ablations and its baselines:

    text   diffu-GRPO              --remask full --adv-std none --mask-seed batch
           + managed randomness    --remask full --adv-std none
           + AR-like reversing     --remask fading --gamma 0
           + truncation            --remask fading --gamma 0.6        (MaskGRPO, the default)
           TraceRL-style           --remask trace --gamma 0
    image  UniGRPO                 --remask random --gamma 0 --sampler maskgit
           + truncation            --remask random --gamma 0.8 --sampler maskgit
           + emerge sampler        --remask random --gamma 0.8 --sampler emerge   (MaskGRPO, the default)
"""

import argparse
import time

import torch
from torch import Tensor

import samplers
from common import World, end_of_text, generator, group_advantage, k3, prompt_indices, remask, start_processes, times
from run import Recipe, Run, describe, parse, rollout_flags, run_flags, scale_flags, trainable_state, update_flags

TEXT = dict(remask="fading", gamma=0.6, sampler="semi_autoregressive")
IMAGE = dict(remask="random", gamma=0.8, sampler="emerge")
RECIPES = [
    Recipe("^tiny", ("tiny-math",), TEXT, dict(block=8, warmup=4)),
    Recipe("^tiny", ("tiny-geneval",), IMAGE, dict(prompts=8, mu=6, steps=8, cfg=1.0, lr=1e-4, iterations=44)),
]


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("maskgrpo.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    run_flags(parser)
    rollout_flags(parser)
    g = parser.add_argument_group("sampler")
    g.add_argument("--sampler", choices=("semi_autoregressive", "maskgit", "emerge"), default="semi_autoregressive")
    g.add_argument("--block", type=int, default=8, help="tokens of a block (semi_autoregressive)")
    g.add_argument("--eos-rule", choices=("none", "last"), default="none", help="last: end ids are revealed last")
    g.add_argument("--schedule", choices=("cosine", "linear", "pow2", "sigmoid"), default="cosine")
    update_flags(parser)
    g = parser.add_argument_group("importance estimate (MaskGRPO section 4)")
    g.add_argument("--remask", choices=("fading", "random", "full", "trace"), default="fading", help="Alg. 1, Alg. 2, ...")
    g.add_argument("--gamma", type=float, default=0.6, help="truncation: t_j = gamma + (1-gamma) j/mu (Eq. 11)")
    g.add_argument("--ratio", choices=("token", "sequence", "mean"), default="token", help="rho_i^t (Eq. 9)")
    g.add_argument("--time-weight", choices=("none", "inverse"), default="none", help="1 or 1/t_j (Eq. 2)")
    g.add_argument("--loss-norm", choices=("tokens", "length"), default="tokens", help="sum over all loss tokens / their number, or 1/|o_i| each (Eq. 11)")
    g.add_argument("--masks", choices=("independent", "nested"), default="independent", help="uniforms anew for each j")
    g.add_argument("--mask-seed", choices=("sample", "group", "batch"), default="sample", help="who shares a mask (S_j)")
    g.add_argument("--prompt-mask", type=float, default=0.15, help="share of prompt tokens masked (--remask full)")
    g.add_argument("--score", choices=("conditional", "guided"), default="conditional", help="distribution of the ratio")
    scale_flags(parser)
    args = parse(parser, RECIPES, argv)
    if not 0 <= args.gamma < 1:
        parser.error(f"--gamma {args.gamma}: must lie in [0, 1)")
    return args


def objective(
    log_p: Tensor, log_old: Tensor, log_ref: Tensor | None, mask: Tensor, A: Tensor, t: float, normaliser: Tensor, args
) -> tuple[Tensor, dict[str, Tensor]]:
    """Minus this micro-batch's share of the surrogate, and sums for the log.

    log_p, log_old, log_ref [N] at the loss tokens, in the row-major order of mask [B, L]; A [B]; normaliser [B]: what
    row i is divided by, fixed for the update before its first backward.
    """
    row = mask.nonzero()[:, 0]  # [N]
    if args.ratio != "token":  # one ratio and KL a completion and j (Eq. 9-10 as printed)
        n = mask.sum(-1).clamp(min=1)
        scale = 1 / t if args.ratio == "sequence" else 1 / n  # l = (1/t) sum log p (Eq. 2), or the mean over masked tokens
        rows = lambda x: torch.zeros(len(A), device=x.device).index_add(0, row, x) * scale  # noqa: E731
        log_p, log_old = rows(log_p), rows(log_old)
        log_ref = None if log_ref is None else rows(log_ref)
        row = torch.arange(len(A), device=A.device)
    rho = torch.exp(log_p - log_old)  # Eq. 9
    surrogate = torch.minimum(rho * A[row], rho.clamp(1 - args.eps, 1 + args.eps) * A[row])
    kl = torch.zeros_like(rho) if log_ref is None else k3(log_p, log_ref)  # Eq. 10
    S = surrogate - args.beta * kl  # the KL is not multiplied by A, whatever Eq. 11 prints
    weight = (1 / t if args.time_weight == "inverse" else 1.0) / normaliser[row]
    clipped = (rho * A[row] > surrogate).float()  # where the clip acts
    stats = {"kl": kl.sum(), "clip_fraction": clipped.sum(), "n": torch.tensor(float(len(rho)))}
    return -(S * weight).sum(), {k: v.detach() for k, v in stats.items()}
