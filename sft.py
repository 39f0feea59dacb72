"""Supervised training on the ELBO (MaskGRPO Eq. 2): makes the built-in base models, and the "SFT +" stage.

    python sft.py --task tiny-math                       # a base from scratch, stored under runs/base/
    python sft.py --model PATH --data pairs.jsonl        # prompt and completion in each line

The loss of a response x_0 is -(1/t) sum over masked k of log p(x_0^k | x_t, c), t ~ U(0, 1], each token
masked with probability t. The whole canvas is trained, the ends of text that pad it too: they teach where to
stop.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import math
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from common import World, elbo, generator, start_processes

BASES = Path("runs/base")


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sft.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--task", default="tiny-math", help="tiny-math or tiny-geneval: a world with base data"
    )
    parser.add_argument(
        "--model", default="tiny", help="tiny, tiny:<variants>, or a checkpoint to go on from"
    )
    parser.add_argument(
        "--data", help="jsonl with prompt and completion in each line, in place of the world's data"
    )
    parser.add_argument(
        "--out", type=Path, help="where to store the model (default: runs/base/<task>-<hash>)"
    )
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--lr", type=float, default=3e-3, help="peak: 5 percent linear warm-up, then cosine to 0"
    )
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--examples", type=int, default=20000, help="base pairs that the world makes")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def forward_process(batch: int, L: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """t [B] ~ U(0, 1], stratified over the batch, and a mask [B, L] of rate t."""
    t = 1 - (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    return t, torch.rand(batch, L, generator=g) < t[:, None]


def train(policy, rows: list[dict], args: argparse.Namespace, world: World) -> None:
    """AdamW on -ELBO / L; what an iteration sees is a function of (seed, iteration)."""
    from tqdm import tqdm

    prompts = policy.encode([r["prompt"] for r in rows])
    x_0 = policy.respond([r["completion"] for r in rows])
    optimizer = torch.optim.AdamW(policy.parameters(), args.lr, (0.9, 0.99), weight_decay=args.weight_decay)
    mine, real = world.share(args.batch)
    real = torch.tensor(real, device=world.device)
    bar = tqdm(range(args.iterations), desc=f"base {args.task}", disable=world.rank > 0, mininterval=2)
    for step in bar:
        g = generator("sft", args.seed, step)
        index = torch.randint(len(rows), (args.batch,), generator=g)[mine]
        t, mask = (x[mine].to(world.device) for x in forward_process(args.batch, policy.length, g))
        loss = -(elbo(policy, prompts[index], x_0[index], mask, t) * real).sum() / (
            args.batch * policy.length
        )
        loss.backward()
        world.sum_gradients(list(policy.parameters()))
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        r = step / args.iterations
        optimizer.param_groups[0]["lr"] = args.lr * min(r / 0.05, 0.5 * (1 + math.cos(math.pi * r)))
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            bar.set_postfix(bound=f"{world.sum(loss)[0]:.3f}")


def base_config(args: argparse.Namespace) -> dict:
    """All that a built-in base depends on: flags, and the code of its world and model."""
    from models import tiny

    world = importlib.import_module("eval." + args.task.replace("-", "_"))
    code = hashlib.sha256((inspect.getsource(world) + inspect.getsource(tiny)).encode()).hexdigest()
    kept = ("task", "model", "iterations", "batch", "lr", "weight_decay", "examples", "seed")
    return {k: getattr(args, k) for k in kept} | {"code": code}


def main(argv: list[str] | None = None) -> Path:
    args = flags(argv)
    world = start_processes()
    return run(args, world)


def run(args, world) -> Path:
    from models import tiny

    world_module = importlib.import_module("eval." + args.task.replace("-", "_"))
    config = base_config(args)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]
    path = args.out or BASES / f"{args.task}-{digest}"
    if (path / "policy.json").exists():
        return path
    if world.rank == 0:
        print(f"no base model yet: training one, about 2 min ({path})")
    variants = args.model.partition(":")[2]
    policy = tiny.build(args.task, args.seed, **({"variants": int(variants)} if variants else {}))
    train(policy, world_module.base_rows(args.examples, args.seed), args, world)
    policy.eval()
    if world.rank == 0:
        tmp = path.with_name(path.name + f".tmp{os.getpid()}")
        policy.save(tmp)
        (tmp / "base.json").write_text(json.dumps(config))
        shutil.rmtree(path, ignore_errors=True)
        os.replace(tmp, path)
    world.barrier()
    return path


def base(task: str, model: str, world: World) -> Path:
    return run(flags(["--task", task, "--model", model]), world)


if __name__ == "__main__":
    main()
