"""Supervised training on the ELBO (MaskGRPO Eq. 2): makes the built-in base models, and the "SFT +" stage.

    python sft.py --task tiny-math                       # a base from scratch, under runs/base/
    torchrun --nproc_per_node 8 sft.py --model GSAI-ML/LLaDA-8B-Base --data pairs.jsonl --shard fsdp

The loss of a response x_0 is -(1/t) sum over masked k of log p(x_0^k | x_t, c), t ~ U(0, 1], each token
masked with probability t. The whole canvas is trained, the ends of text that pad it too: they teach where to
stop.
"""

import argparse
import hashlib
import importlib
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from common import World, elbo, generator, log_likelihood, start_processes
from run import Run, one_sentence, parse, run_flags, scale_flags

DRAWS = 32  # Monte-Carlo draws of the held-out bound


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sft.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    run_flags(parser)
    parser.set_defaults(iterations=1500, save_every=500)
    g = parser.add_argument_group("training")
    g.add_argument("--batch", type=int, default=64, help="responses an iteration, over all processes")
    g.add_argument(
        "--lr", type=float, default=3e-3, help="peak: 5 percent of linear warm-up, then cosine to 0"
    )
    g.add_argument("--weight-decay", type=float, default=0.01)
    g.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.99), metavar=("B1", "B2"))
    g.add_argument("--grad-clip", type=float, default=1.0)
    g.add_argument("--examples", type=int, default=20000, help="pairs that a built-in world makes")
    g.add_argument("--length", type=int, help="tokens of a response (default: the model's)")
    g.add_argument("--max-prompt", type=int, help="longest prompt in tokens (default: the model's)")
    scale_flags(parser)
    return parse(parser, [], argv)


def forward_process(batch: int, L: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """t [B] ~ U(0, 1], stratified over the batch, and masks [B, L] of rate t."""
    t = 1 - (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    return t, torch.rand(batch, L, generator=g) < t[:, None]


def main(argv: list[str] | None = None) -> None:
    args = flags(argv)
    from eval.task import load_task

    with one_sentence():
        world = start_processes()
        task = load_task(args.task, args.protocol)
        policy, pairs = load(args, world, task)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.lr, tuple(args.betas), weight_decay=args.weight_decay)
        run = Run(args, world)
        run.restore(policy, None, optimizer)
        prompts = policy.encode([pair["prompt"] for pair in pairs])
        x_0 = policy.respond([pair["completion"] for pair in pairs])  # [n, L]

    n_held_out = min(256, len(pairs) // 10)
    mine, real = world.share(args.batch)
    real = torch.tensor(real, device=world.device)
    for iteration in run.iterations():
        g = generator("sft", args.seed, iteration)
        chosen = torch.randint(n_held_out, len(pairs), (args.batch,), generator=g)[mine]
        t, mask = (x[mine].to(world.device) for x in forward_process(args.batch, policy.length, g))
        r = iteration / args.iterations
        total = 0.0
        for i in range(0, len(mine), args.micro_batch):
            b = slice(i, i + args.micro_batch)
            bound = elbo(policy, prompts[chosen[b]], x_0[chosen[b]], mask[b], t[b])  # [B], Eq. 2
            loss = -(bound * real[b]).sum() / (args.batch * policy.length)
            loss.backward()
            total += loss.item()
        world.sum_gradients(parameters)
        lr = args.lr * min(r / 0.05, 0.5 * (1 + math.cos(math.pi * r)))
        run.optimizer_step(parameters, lr)
        if (iteration + 1) % 20 == 0:
            run.log(iteration + 1, {"loss": world.sum(total)[0], "lr": lr})

    g = generator("bound", args.seed)
    held_out = log_likelihood(policy, prompts[:n_held_out], x_0[:n_held_out], DRAWS, g)
    if world.rank == 0:
        bound = held_out.mean().item() / policy.length
        print(f"bound on log p, held out: {bound:.4f} nats a token ({n_held_out} pairs)")
    score(policy, task, args, world)
    run.finish(policy)


def load(args: argparse.Namespace, world: World, task) -> tuple:
    """(policy, pairs): an untrained built-in model with the pairs of its world, or --model and --data."""
    from eval.jsonl import read_jsonl
    from scale import load_policy

    if args.data and not args.model.startswith("tiny"):
        args.beta = 0.0  # no reference
        return load_policy(args, world, task)[0], read_jsonl(args.data, ("prompt", "completion"))
    from models import tiny

    pairs = world_of(args.task).base_rows(args.examples, args.seed)
    return tiny.build(args.task, args.seed, variants_of(args.model)), pairs


def score(policy, task, args: argparse.Namespace, world: World) -> None:
    """Print the held-out score, with the sampler settings that maskgrpo.py has for the task."""
    import maskgrpo
    from eval.evaluate import evaluate
    from samplers import settings_of

    settings = settings_of(maskgrpo.flags(["--task", args.task]), policy.length)
    rows = task.rows("test", None)[: args.eval_prompts or None]
    for mode, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        chosen = settings | {"temperature": temperature}
        how = dict(seed=args.seed, world=world, micro_batch=args.micro_batch)
        result = evaluate(policy, task, rows, chosen, **how).summary
        if world.rank == 0:
            print(f"{args.task} {mode}: {result['score']:.3f} +-{result['se']:.3f} ({result['n']} prompts)")


# ---- The built-in bases


def world_of(task: str):
    """The module of a built-in world; ValueError for another task."""
    if task not in ("tiny-math", "tiny-geneval"):
        raise ValueError(
            f"--model tiny: no built-in model for --task {task}, only for tiny-math and tiny-geneval"
        )
    return importlib.import_module("eval." + task.replace("-", "_"))


def variants_of(model: str) -> int:
    """Patches of a colour in ``tiny:<variants>`` (tiny-geneval), 8 in ``tiny``."""
    name, _, variants = model.partition(":")
    if name != "tiny" or not (variants or "8").isdigit():
        raise ValueError(
            f"--model {model}: accepted are tiny, tiny:<variants of a patch>, a hub id, a directory"
        )
    return int(variants or 8)


def base(task: str, model: str, world: World) -> Path:
    """The directory of a built-in base, trained now where there is none.

    It is keyed by a hash of all that it depends on: flags, size, and the pairs of its world.
    """
    from models import tiny

    args = flags(["--task", task, "--model", model, "--shard", "ddp" if world.size > 1 else "none"])
    pairs = world_of(task).base_rows(200, args.seed)
    kept = ("task", "model", "iterations", "batch", "lr", "weight_decay", "betas", "examples", "seed")
    config = {k: getattr(args, k) for k in kept} | tiny.SIZE | {"variants": variants_of(model)}
    data = [(p["prompt"], p["completion"]) for p in pairs]
    data = [(c, x if isinstance(x, str) else x.sum().item()) for c, x in data]
    digest = hashlib.sha256(json.dumps([config, data], sort_keys=True).encode()).hexdigest()[:10]
    out = Path("runs/base") / f"{task}-{digest}"
    if not (out / "model" / "policy.json").exists():
        if world.rank == 0:
            print(f"no base model yet: training one, about 2 min ({out})", flush=True)
        resume = ["--resume"] if (out / "config.json").exists() else []
        main(["--task", task, "--model", model, "--out", str(out), *resume])
    world.barrier()
    return out / "model"


if __name__ == "__main__":
    main()
