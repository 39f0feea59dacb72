"""Supervised training on the ELBO (MaskGRPO Eq. 2): makes the built-in base models, and the "SFT +" stage.

    python sft.py --task tiny-math                       # a base from scratch, stored under runs/base/
    torchrun --nproc_per_node 8 sft.py --model GSAI-ML/LLaDA-8B-Base --data pairs.jsonl

The loss of a response x_0 is -(1/t) sum over masked k of log p(x_0^k | x_t, c), t ~ U(0, 1], each token masked with
probability t. The whole canvas is trained, ends of text after the answer included: they teach where to stop.
"""

import argparse
import hashlib
import inspect
import json
import math
import shutil
import time
from pathlib import Path

import torch

from common import World, elbo, generator, start_processes

BASES = Path("runs/base")


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="tiny-math", help="tiny-math or tiny-geneval: a world with base data")
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak; cosine to 0 after 5 percent of warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def train(policy, rows: list[dict], args: argparse.Namespace, world: World) -> None:
    """AdamW on the ELBO of (prompt, completion) pairs; a row's t and mask depend on (seed, iteration, row of the batch)."""
    from tqdm import tqdm

    prompts = policy.encode([r["prompt"] for r in rows])
    x_0 = policy.respond([r["completion"] for r in rows])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=args.weight_decay)
    bar = tqdm(range(args.iterations), desc=f"base {args.task}", disable=world.rank > 0)
    for step in bar:
        g = generator("sft", args.seed, step)
        index = torch.randint(len(rows), (args.batch,), generator=g)
        t = 1 - (torch.rand(1, generator=g) + torch.arange(args.batch) / args.batch) % 1  # stratified U(0, 1]
        mask = torch.rand(args.batch, policy.length, generator=g) < t.unsqueeze(-1)
        loss = -elbo(policy, prompts[index], x_0[index], mask, t).mean() / policy.length
        optimizer.param_groups[0]["lr"] = args.lr * schedule(step / args.iterations)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            bar.set_postfix(bound=f"{loss.item():.3f}")


def schedule(r: float) -> float:
    """Linear warm-up over the first 5 percent, then cosine to 0."""
    return min(r / 0.05, 0.5 * (1 + math.cos(math.pi * r)))


def main():
    args = flags()
    import importlib
    from models import tiny
    policy = tiny.build(args.task, args.seed)
    world_module = importlib.import_module("eval." + args.task.replace("-", "_"))
    rows = world_module.base_rows(20000, args.seed)
    t=time.time()
    train(policy, rows, args, start_processes())
    print("time", time.time()-t)
    from eval.evaluate import evaluate
    task = world_module.task()
    for T in (0., 1.):
        s = dict(sampler="semi_autoregressive", block=8, steps=12, temperature=T, cfg=0., cfg_until=1., eos_rule="none", schedule_name="cosine")
        if task.modality == "image": s |= dict(sampler="emerge", steps=8, cfg=1.)
        r,c = evaluate(policy, task, task.rows("test", None)[:256], s, seed=0, world=World(0,1,torch.device("cpu")), micro_batch=128)
        print(T, r, c[:5] if task.modality=="text" else "")
    policy.save(f"/tmp/base_{args.task}")


if __name__ == "__main__":
    main()
