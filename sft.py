r"""Supervised training on the ELBO (MaskGRPO Eq. 2): makes the built-in base models, and the "SFT +" stage.

    python sft.py --task tiny-math                       # a base from scratch, under runs/base/
    torchrun --nproc_per_node 8 sft.py --model GSAI-ML/LLaDA-8B-Base --data pairs.jsonl --shard fsdp
    torchrun --nproc_per_node 8 sft.py --model Gen-Verse/MMaDA-8B-Base --task captions --data pairs/ \
        --drop-prompt 0.1 --shard fsdp                   # webdataset tars, parquet or jsonl of pictures

The loss of a response x_0 is -(1/t) sum over masked k of log p(x_0^k | x_t, c), t ~ U(0, 1], each token
masked with probability t. The whole canvas is trained, the ends of text that pad it too: they teach where to
stop.

    python sft.py --task tiny-geneval --path metric      # a base of uniform diffusion

There the loss is the cross-entropy of all of x_1 given x_t ~ p_t(x | x_1), and the model is not told t.
"""

import argparse
import hashlib
import importlib
import json
import math
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common import World, elbo, generator, log_likelihood, path_times, start_processes
from flags import (
    Recipe,
    one_sentence,
    parse,
    path_flags,
    path_of,
    refuse,
    run_flags,
    scale_flags,
    script_parser,
)
from run import Run

RECIPES = [
    Recipe("^tiny", ("tiny-math",), ours=dict(iterations=4000)),
    Recipe("^tiny", ("tiny-geneval",), ours=dict(iterations=3000, examples=16000, drop_prompt=0.1)),
]
BIG = ("lora_rank", "lora_alpha", "dtype", "grad_checkpoint", "length", "max_prompt", "vq")  # of --model
CACHE = Path("runs/pairs")  # codes of the pictures of --data
DRAWS = 32  # Monte-Carlo draws of the held-out bound


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = script_parser("sft.py", __doc__)
    run_flags(parser)
    parser.set_defaults(iterations=3000, save_every=500)
    g = parser.add_argument_group("training")
    g.add_argument("--batch", type=int, default=64, help="responses an iteration, over all processes")
    g.add_argument(
        "--lr", type=float, default=3e-3, help="peak: 5 percent of linear warm-up, then cosine to 0"
    )
    g.add_argument("--weight-decay", type=float, default=0.01)
    g.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.99), metavar=("B1", "B2"))
    g.add_argument("--grad-clip", type=float, default=1.0)
    g.add_argument("--examples", type=int, default=20000, help="pairs that a built-in world makes")
    g.add_argument("--drop-prompt", type=float, default=0.0, help="share of unconditional rows, for guidance")
    g.add_argument("--length", type=int, help="tokens of a response (default: the model's)")
    g.add_argument("--max-prompt", type=int, help="longest prompt in tokens (default: the model's)")
    path_flags(parser, ("mask", "mixture", "metric"))
    scale_flags(parser)
    return parse(parser, RECIPES, argv)


def forward_process(batch: int, L: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """t [B] ~ U(0, 1], stratified over the batch, and masks [B, L] of rate t."""
    t = 1 - (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    return t, torch.rand(batch, L, generator=g) < t[:, None]


def uniform_process(batch: int, L: int, g: torch.Generator, shift: float) -> tuple[Tensor, Tensor]:
    """t [B] in [0, 1) as of ``path_times``, stratified over the batch, and the uniforms [B, L] of x_t."""
    u = (torch.rand(1, generator=g) + torch.arange(batch) / batch) % 1
    return path_times(u, shift), torch.rand(batch, L, generator=g)


def uniform_log_prob(policy, path, prompt, x_1: Tensor, u: Tensor, t: Tensor) -> Tensor:
    """log p(x_1 | x_t) [B], summed over all tokens, with x_t ~ p_t(x | x_1) drawn at u [B, L]."""
    return policy(prompt, path.corrupt(x_1, t, u), target=x_1).view(x_1.shape).sum(-1)


def objective(args: argparse.Namespace, policy) -> tuple[Callable, Callable]:
    """(process, bound): what draws t and the noise of a batch, and minus the loss [B] of responses at them.

    Raises ValueError where --path is not what the model is made for.
    """
    if policy.mask_id is not None and args.path in (None, "mask"):
        refuse(args, ("path_alpha", "path_c", "distance_power", "shift"), "on masked diffusion")
        return forward_process, partial(elbo, policy)
    if policy.mask_id is not None or args.path == "mask":
        kind = "uniform" if policy.mask_id is None else "masked"
        raise ValueError(f"--path {args.path}: --model {args.model} is a model of {kind} diffusion")
    path, shift = path_of(args, policy)
    return partial(uniform_process, shift=shift), partial(uniform_log_prob, policy, path)


def main(argv: list[str] | None = None) -> None:
    args = flags(argv)
    from eval.task import load_task

    with one_sentence():
        world = start_processes()
        task = load_task(args.task, args.protocol, args.unsafe_exec)
        policy, texts, x_0 = load(args, world, task)
        process, log_prob = objective(args, policy)
        parameters = [p for p in policy.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, args.lr, tuple(args.betas), weight_decay=args.weight_decay)
        run = Run(args, world)
        run.restore(policy, None, optimizer)
        prompts, x_0 = policy.encode(texts), x_0.to(world.device)  # [n, P], [n, L]

    n_held_out = min(256, -(-len(texts) // 10))
    mine, real = world.share(args.batch)
    real = torch.tensor(real, device=world.device)
    for iteration in run.iterations():
        g = generator("sft", args.seed, iteration)
        chosen = torch.randint(n_held_out, len(texts), (args.batch,), generator=g)[mine]
        t, noise = (x[mine].to(world.device) for x in process(args.batch, policy.length, g))
        drop = (torch.rand(args.batch, generator=g) < args.drop_prompt)[mine].to(world.device)
        r = (iteration + 0.5) / args.iterations
        total = 0.0
        for i in range(0, len(mine), args.micro_batch):
            b = slice(i, i + args.micro_batch)
            prompt = prompts[chosen[b]]
            if args.drop_prompt:
                prompt = prompt.replaced(drop[b], policy.unconditional(prompt))
            bound = log_prob(prompt, x_0[chosen[b]], noise[b], t[b])  # [B], Eq. 2
            loss = -(bound * real[b]).sum() / (args.batch * policy.length)
            loss.backward()
            total += loss.item()
        world.sum_gradients(parameters)
        lr = args.lr * min(r / 0.05, 0.5 * (1 + math.cos(math.pi * r)))
        run.optimizer_step(parameters, lr)
        if (iteration + 1) % 20 == 0:
            run.log(iteration + 1, {"loss": world.sum(total)[0], "lr": lr})

    if policy.mask_id is not None:  # there is no such bound of uniform diffusion
        bound = held_out_bound(policy, prompts[:n_held_out], x_0[:n_held_out], args, world)
        if world.rank == 0:
            print(f"bound on log p, held out: {bound:.4f} nats a token ({n_held_out} pairs)")
    run.finish(policy)
    if not args.data:  # pairs of one's own: python -m eval.evaluate says which task they are for
        score(policy, task, args, world)


def held_out_bound(policy, prompts, x_0: Tensor, args: argparse.Namespace, world: World) -> float:
    """The bound on log p(x_0 | c) a token, mean over the pairs; each process has its share of them."""
    mine, real = world.share(len(x_0))
    total = 0.0
    for i in range(0, len(mine), args.micro_batch):
        b = mine[i : i + args.micro_batch]
        bound = log_likelihood(policy, prompts[b], x_0[b], DRAWS, generator("bound", args.seed, *b))
        total += (bound.cpu() * torch.tensor(real[i : i + args.micro_batch])).sum().item()
    return world.sum(total)[0] / x_0.numel()


def load(args: argparse.Namespace, world: World, task) -> tuple:
    """(policy, prompts, x_0 [n, L]): an untrained built-in model or --model; pairs of its world or --data.

    Raises ValueError for a --model that has neither.
    """
    from eval.jsonl import read_jsonl
    from eval.pairs import load_pairs
    from models import tiny
    from scale import check_export, load_policy

    refuse(args, ("reward", "reward_normalize", "strict", "eval_every"), "in sft.py, which has no rollouts")
    if args.data:
        refuse(args, ("examples", "eval_prompts"), "with --data")
    if args.model.split(":")[0] == "tiny":
        idle = (*BIG, "shard") if args.shard == "fsdp" else BIG
        refuse(args, idle, f"with --model {args.model}, which is made here, small, and trained whole")
        policy = tiny.build(args.task, args.seed, variants_of(args.model), args.path or "mask")
        policy.to(world.device)
        check_export(policy, args)
    elif args.data:
        args.beta = 0.0  # no reference
        policy = load_policy(args, world, task)[0]
    else:
        raise ValueError(f"--model {args.model}: add --data, the prompts and completions to train it on")
    if args.data and task.modality == "image":
        if world.rank == 0:  # encodes the pictures; the other ranks read the codes
            load_pairs(args.data, policy, CACHE)
        world.barrier()
        texts, x_0 = load_pairs(args.data, policy, CACHE)
    else:
        pairs = world_of(args.task).base_rows(args.examples, args.seed) if not args.data else None
        pairs = pairs or read_jsonl(args.data, ("prompt", "completion"), check_texts)
        texts, completions = ([pair[k] for pair in pairs] for k in ("prompt", "completion"))
        x_0 = torch.cat([policy.respond(completions[i : i + 512]) for i in range(0, len(pairs), 512)])
    if len(texts) < 2:
        raise ValueError(f"--data {args.data}: at least two pairs are needed, one is held out")
    return policy, texts, x_0


def check_texts(pair: dict) -> None:
    if not all(isinstance(pair[name], str) for name in ("prompt", "completion")):
        raise ValueError("prompt and completion must be texts")


def score(policy, task, args: argparse.Namespace, world: World) -> None:
    """Print the held-out score, with the sampler settings that maskgrpo.py or udm_grpo.py has for the
    task."""
    import maskgrpo
    import udm_grpo
    from eval.evaluate import evaluate
    from samplers import settings_of

    if policy.mask_id is None:
        path = path_of(args, policy)
        settings = settings_of(udm_grpo.flags(["--task", args.task]), policy.length, *path)
    else:
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
    """Shades of a patch in ``tiny:<variants>`` (tiny-geneval); ``tiny`` has the default."""
    name, _, variants = model.partition(":")
    from models.tiny import VARIANTS

    if name != "tiny" or not (variants or "1").isdigit() or variants == "0":
        raise ValueError(
            f"--model {model}: accepted are tiny, tiny:<shades of a patch>, a hub id, a directory"
        )
    return int(variants or VARIANTS)


def base(task: str, model: str, world: World, path: str | None = None, seed: int = 0) -> Path:
    """The directory of a built-in base, trained now where there is none. ``path``: of uniform diffusion.

    It is keyed by a hash of all that it depends on: flags, size, and the pairs of its world.
    """
    from models import tiny

    chosen = ["--task", task, "--model", model, "--seed", str(seed), *(["--path", path] if path else [])]
    args = flags(chosen)
    pairs = world_of(task).base_rows(200, args.seed)
    kept = "task model iterations batch lr weight_decay betas examples drop_prompt seed".split()
    config = {k: getattr(args, k) for k in kept} | tiny.SIZE | {"variants": variants_of(model)}
    config |= tiny.PATHS.get(path, {})
    data = [(p["prompt"], p["completion"]) for p in pairs]
    data = [(c, x if isinstance(x, str) else x.sum().item()) for c, x in data]
    digest = hashlib.sha256(json.dumps([config, data], sort_keys=True).encode()).hexdigest()[:10]
    out = Path("runs/base") / f"{task}-{digest}"
    if not (out / "model" / "policy.json").exists():
        if world.rank == 0:
            print(f"no base model yet: training one, about 2 min ({out})", flush=True)
        making = out.with_name(f"{out.name}.{world.gather_objects(os.getpid())[0]}")
        main([*chosen, "--out", str(making)])
        if world.rank == 0:
            try:
                os.rename(making, out)
            except OSError:  # another start was first
                shutil.rmtree(making)
    world.barrier()
    return out / "model"


if __name__ == "__main__":
    main()
