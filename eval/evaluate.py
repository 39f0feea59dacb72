"""Score a policy on a task: the same sampler as in training, every item once, sharded over the processes.

    python -m eval.evaluate --model runs/maskgrpo_gsm8k_s0 --task gsm8k
    torchrun --nproc_per_node 8 -m eval.evaluate --model GSAI-ML/LLaDA-8B-Instruct --task gsm8k --samples 4
    python -m eval.evaluate --model runs/rebrl_geneval_s0 --samples 4 --save-images pictures/
    python -m eval.geneval pictures/

--model: a run directory, a stored model (LoRA or whole, ours or released), or a hub id. Settings that are not
given are the run's; where there is none, those of the recipe of model and task. A call that was killed goes
on where it was; --samples and --limit can be raised later, and nothing is done twice.
"""

import argparse
import functools
import hashlib
import importlib
import json
import math
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import models
import samplers
from common import World, end_of_text, generator, start_processes
from flags import check_idle, check_ranges, one_sentence, path_flags, path_of, refuse
from models import weights
from run import config_hash, write_atomically


@dataclass
class Scored:
    """summary: score, se, n, the mean of each component, length; parts: each component [n]; completions: this
    rank's, of the items ``mine``."""

    summary: dict
    parts: dict[str, np.ndarray]
    completions: list
    mine: list[int]


def evaluate(
    policy,
    task,
    rows: list[dict],
    settings: dict,
    *,
    seed: int,
    world: World,
    micro_batch: int,
    rewards: Callable[[list[dict], list, int], dict[str, np.ndarray]] | None = None,
) -> Scored:
    """One completion of each row. Item i has its own generator: any number of processes gives the same.

    ``rewards(rows, completions, n)``: every component [n] over all processes, of this rank's rows; None: the
    task's own.
    """
    mine, _ = world.share(len(rows))
    prompts = policy.encode([r["prompt"] for r in rows])
    completions, lengths = [], []
    for i in range(0, len(mine), micro_batch):
        index = mine[i : i + micro_batch]
        noise = [generator("eval", seed, n) for n in index]
        out = samplers.sample(policy, prompts[index], noise, settings)
        completions += list(policy.decode(out.x_0))
        lengths.append(end_of_text(out.x_0, policy.end_ids))
    my_rows = [rows[n] for n in mine]
    if rewards is None:
        parts = task.reward(my_rows, completions)
        parts = {k: world.gather(torch.as_tensor(v), len(rows)).numpy() for k, v in parts.items()}
    else:
        parts = rewards(my_rows, completions, len(rows))
    score, se = mean_and_error(parts[scored_by(task, parts)], [r.get(task.category) for r in rows])
    means = {k: float(v.mean()) for k, v in parts.items()}
    length = world.gather(torch.cat(lengths), len(rows)).double().mean().item()
    summary = {"score": score, "se": se, "n": len(rows), **means, "length": length}
    return Scored(summary, parts, completions, mine)


def scored_by(task, parts: dict) -> str:
    """The component that is the task's score; the first where it has none, or --reward leaves it out."""
    return task.score if task.score in parts else next(iter(parts))


def mean_and_error(values: np.ndarray, categories: list) -> tuple[float, float]:
    """Mean over categories of their means (one category: the plain mean), and its standard error."""
    in_category = [values[[c == name for c in categories]] for name in dict.fromkeys(categories)]
    variance = sum(v.var(ddof=1) / len(v) if len(v) > 1 else 0.0 for v in in_category)
    return float(np.mean([v.mean() for v in in_category])), float(np.sqrt(variance) / len(in_category))


def evaluate_run(run, step: int, policy, task, rewards, rows: list[dict], settings: dict, args) -> None:
    """When an evaluation is due after ``step`` iterations: score the held-out prompts greedily and sampled by
    every reward, trained or only measured (weight 0), and write samples.

    A resumed run scores what is missing of a step, and nothing twice.
    """
    if step not in (0, args.iterations) and not (args.eval_every and step % args.eval_every == 0):
        return
    from eval.gallery import write_samples

    rows, scored = rows[: args.eval_prompts or None], None
    done = {s["mode"] for s in run.scores() if s["step"] == step}
    for mode, temperature in (("greedy", 0.0), ("sampled", args.temperature)):
        if run.world.any(mode in done):
            continue
        chosen = settings | {"temperature": temperature, "steps": args.eval_steps or settings["steps"]}
        how = dict(seed=args.seed, world=run.world, micro_batch=args.micro_batch)
        scored = evaluate(
            policy, task, rows, chosen, rewards=functools.partial(run.gather_rewards, rewards), **how
        )
        run.score(step, task.name, mode, scored.summary)
    if scored and run.world.rank == 0:
        shown = scored.mine[:16]
        write_samples(
            run.dir / "samples" / f"step_{step:06d}",
            [rows[n]["prompt"] for n in shown],
            scored.completions[: len(shown)],
            scored.parts[scored_by(task, scored.parts)][shown].tolist(),
        )


# ---- python -m eval.evaluate


def flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "eval.evaluate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="run directory, stored model or hub id")
    parser.add_argument("--task", help="default: the run's")
    parser.add_argument("--compare", nargs="+", metavar="RESULT", help="print result.json files as one table")
    parser.add_argument("--out", type=Path, help="default: in the run, else under runs/eval/")
    # torchrun takes a plain --n for one of its own flags
    parser.add_argument("--samples", type=int, default=1, help="of each prompt; gives pass@k up to it")
    parser.add_argument("--limit", type=int, help="only so many prompts, from the first on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reward", help="score by a=1,http://host:8000/b=0 in place of the task's own")
    parser.add_argument(
        "--save-images",
        type=Path,
        metavar="DIR",
        help="keep pictures there, for python -m eval.geneval DIR (default: images/ in --out)",
    )
    parser.add_argument("--unsafe-exec", action="store_true", help="run the model's code without isolation")
    g = parser.add_argument_group("settings (default: the run's, else the recipe's)")
    g.add_argument("--vq", help="image tokenizer in place of the checkpoint's: a hub id or a directory")
    g.add_argument("--protocol", help="prompt and scoring preset of the task")
    g.add_argument("--data", help="path in place of the task's own data")
    g.add_argument("--length", type=int, help="tokens of a completion")
    g.add_argument("--max-prompt", type=int, help="longest prompt in tokens")
    g.add_argument("--sampler", choices=tuple(samplers.SAMPLERS))
    g.add_argument("--steps", type=int, help="denoising steps")
    g.add_argument("--block", type=int, help="tokens of a block")
    g.add_argument("--temperature", type=float, help="default for text with --samples 1: 0")
    g.add_argument("--eos-rule", choices=("none", "last"))
    g.add_argument("--schedule", choices=("cosine", "linear", "pow2", "sigmoid"))
    g.add_argument("--rate", choices=("integrated", "instantaneous"), help="of euler")
    g.add_argument("--cfg", type=float, help="guidance: (1+w) cond - w uncond; 0 is off")
    g.add_argument("--cfg-until", type=float)
    g.add_argument("--dtype", choices=("float32", "bfloat16"))
    g.add_argument("--micro-batch", type=int, help="completions in a forward pass")
    path_flags(parser, ("mixture", "metric"))
    args = parser.parse_args(argv)
    if not args.compare and not args.model:
        parser.error("--model is needed (or --compare)")
    check_ranges(parser, args)
    return args


def find(model: str) -> tuple[str, dict | None]:
    """(what ``models.load`` opens, the flags it was trained with or None) for a run directory, a model that a
    run stored, or anything else. Warns where the model in a run directory is another run's."""
    path = Path(model)
    config = None
    if (path / "metrics.jsonl").exists():
        config = weights.read_json(path / "config.json")
        path = path / "model"
        if not path.exists():
            raise ValueError(f"--model {model}: this run has not finished, it has no {path}")
    if (path / "training.json").exists():
        trained = weights.read_json(path / "training.json")
        if config is not None and config_hash(config) != trained["config_hash"]:
            wrong = [k for k, v in trained["config"].items() if config.get(k) != v]
            warnings.warn(
                f"{path} was trained with other flags than its run: {', '.join(wrong)}", stacklevel=2
            )
        config = trained["config"]
    return str(path), config


def settle(args: argparse.Namespace, model: str, directory: Path, config: dict | None) -> argparse.Namespace:
    """The flags with every default filled in: the run's, else the recipe's in the script for such models.

    Raises ValueError where the task is not known, or where a flag given would be ignored.
    """
    config = config or {}
    task = args.task or config.get("task")
    if task is None:
        raise ValueError("--task is needed: no run of this model says it")
    uniform = directory.is_dir() and models.kind_of(directory) in ("ursa", "fudoki")
    script = importlib.import_module("udm_grpo" if uniform else "maskgrpo")
    defaults = vars(script.flags(["--model", config.get("model", model), "--task", task])) | config
    if task != config.get("task"):
        defaults |= {"data": None, "protocol": None}
    given = {k: v for k, v in vars(args).items() if v is not None}
    defaults["steps"] = defaults["eval_steps"] or defaults["steps"]
    defaults["source"] = dict.fromkeys(given, "command line")
    args = argparse.Namespace(**vars(args) | defaults | given)
    check_idle(args)
    own = {
        f.__name__: {name.removesuffix("_name") for name in names}
        for f, names in samplers.OWN_SETTINGS.items()
    }
    own["euler"] |= {"path_alpha", "path_c", "distance_power"}
    refuse(args, sorted(set().union(*own.values()) - own[args.sampler]), f"with --sampler {args.sampler}")
    return args


def fingerprint(directory: Path) -> str:
    """12 hex digits that change when the weights or configs do: from names and sizes of the files, small ones
    whole, and 64 samples of each large one; the base of an adapter with it."""
    digest = hashlib.sha256()
    adapter = directory / "adapter_config.json"
    if adapter.exists():
        base = weights.read_json(adapter)["base_model_name_or_path"]
        digest.update(fingerprint(weights.find(base)).encode())
    stored = sorted(p for p in directory.rglob("*") if p.suffix in (".json", ".safetensors", ".pth", ".pt"))
    for path in stored or [directory]:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(directory)} {size}".encode())
        with open(path, "rb") as f:
            for i in range(64 if size > 2**22 else 1):
                f.seek(i * size // 64)
                digest.update(f.read(2**14 if size > 2**22 else size))
    return digest.hexdigest()[:12]


def device_name(world: World) -> str:
    return torch.cuda.get_device_name() if world.device.type == "cuda" else platform.processor() or "cpu"


def describe(args, world: World, policy, settings: dict, rows: list[dict], directory: Path) -> dict:
    """All that fixes an item's completion and verdict."""
    import transformers

    path = settings.get("path")
    return {
        "model": args.model,
        "model_hash": fingerprint(directory),
        "vq": args.vq,
        "task": args.task,
        "protocol": args.protocol or "default",
        "data": args.data or "the task's own",
        "reward": args.reward,
        "data_hash": hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()[:12],
        **dict.fromkeys(("eos_rule", "schedule_name", "shift", "rate")),
        **{k: v for k, v in settings.items() if k not in ("path", "block")},
        "path": path
        and {
            "name": type(path).__name__,
            **{k: vars(path)[k] for k in ("alpha", "c", "power") if k in vars(path)},
        },
        "block_length": settings.get("block"),
        "gen_length": policy.length,
        "seed": args.seed,
        "dtype": args.dtype,
        "device_name": device_name(world),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
    }


def main(argv: list[str] | None = None) -> dict | None:
    args = flags(argv)
    if args.compare:
        with one_sentence():
            print(compare([read_result(path) for path in args.compare]))
        return None
    from eval.reward_client import RewardServersDown
    from eval.rewards import Rewards
    from eval.task import load_task, task_module

    with one_sentence():
        world = start_processes()
        model, config = find(args.model)
        directory = Path(model) if model.endswith(".py") else weights.find(model)
        asked, args = args, settle(args, model, directory, config)
        args.reward = asked.reward  # a run's was for training
        task = load_task(args.task, args.protocol, args.unsafe_exec)
        if args.save_images and task.modality != "image":
            raise ValueError(f"--save-images: --task {args.task} completes text")
        rewards = Rewards(task, args.reward, strict=True, device=str(world.device))
        rows = task.rows("test", args.data)
        options = dict(length=args.length, max_prompt=args.max_prompt, modality=task.modality, vq=args.vq)
        policy = models.load(model, dtype=getattr(torch, args.dtype), device=str(world.device), **options)
        if asked.temperature is None and task.modality == "text" and args.samples == 1:
            args.temperature = 0.0
        if (args.sampler == "euler") != (policy.mask_id is None):
            kind = "uniform" if policy.mask_id is None else "masked"
            raise ValueError(f"--sampler {args.sampler}: --model {args.model} is a model of {kind} diffusion")
        uniform = path_of(args, policy) if policy.mask_id is None else ()
        settings = samplers.settings_of(args, policy.length, *uniform)
        prompts = policy.encode([row["prompt"] for row in rows])  # one that is too long ends it now
        fixed = describe(args, world, policy, settings, rows, directory)
        key = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:8]
        name = f"{Path(args.task).stem}-{key}"
        in_run = model != asked.model
        out = asked.out or (Path(asked.model, "eval") if in_run else Path("runs/eval", directory.name)) / name
        if args.save_images:
            claim(args.save_images, "--save-images", fixed, world)
        claim(out, "--out", fixed, world)

    wanted = [(i, s) for i in range(len(rows))[: args.limit] for s in range(args.samples)]
    done = read_items(out)
    if task.modality == "image":  # one whose picture was taken away is not done
        done = {w: item for w, item in done.items() if (out / item["completion"]).exists()}
    world.barrier()  # every rank has read before one writes
    left = [w for w in wanted if w not in done]
    length = prompts.mask.sum(-1).tolist()
    left.sort(key=lambda w: (length[w[0]], w))  # a batch of prompts of about one length has little padding
    share = slice(world.rank, None, world.size)
    if args.save_images:
        copy_pictures(out, args.save_images, [done[w] for w in wanted if w in done][share], rows)
    extract = getattr(task_module(args.task), "extract", None)
    try:
        complete(policy, task, rewards, rows, left[share], settings, args, out, world, extract)
    except RewardServersDown as error:
        sys.exit(f"eval.evaluate: {error}; what was scored is kept: the same call goes on there")
    world.barrier()
    result = None
    if world.rank == 0:
        result = summarize(out, fixed, task, rows, wanted)
        score = f"{result['score']:.4f} +-{result['se']:.4f} ({result['n']} prompts)"
        print(f"{args.task}, {result['scored_by']}: {score}   {out}/result.json")
    world.barrier()
    return result


def claim(out: Path, flag: str, fixed: dict, world: World) -> None:
    """Make the directory of these settings; ValueError, with ``flag``, where it holds the items of others."""
    from eval.geneval import prompt_folders

    path = out / "settings.json"
    if path.exists():
        old = json.loads(path.read_text())
        differs = [k for k, v in json.loads(json.dumps(fixed)).items() if old.get(k) != v]
        if differs:
            raise ValueError(f"{flag} {out} holds items of another evaluation: {', '.join(differs)}")
    elif out.exists() and prompt_folders(out):
        raise ValueError(f"{flag} {out} holds pictures already: give an empty directory")
    world.barrier()
    if world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(fixed, indent=1))
    world.barrier()


def read_items(out: Path) -> dict[tuple[int, int], dict]:
    """What was done so far, by (prompt, sample), the newest last; a line that a kill cut off is left out."""
    items = {}
    for path in [*out.glob("items.jsonl"), *sorted(out.glob("items.*.jsonl"))]:
        for line in path.read_text().splitlines():
            try:
                item = json.loads(line)
            except json.JSONDecodeError:
                continue
            items[item["item"], item["sample"]] = item
    return items


def copy_pictures(out: Path, folder: Path, done: list[dict], rows: list[dict]) -> None:
    """The pictures of items that an earlier call stored elsewhere."""
    from eval.geneval import sample_path

    for item in done:
        path = sample_path(folder, item["item"], item["sample"], rows[item["item"]])
        if not path.exists():
            shutil.copyfile(out / item["completion"], path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)


def complete(policy, task, rewards, rows, mine, settings, args, out: Path, world: World, extract) -> None:
    """Sample and judge this rank's share, a line of items.<rank>.jsonl each; rank 0 shows the progress."""
    from tqdm import tqdm

    from eval.geneval import sample_path
    from eval.reward_model import pil_images

    with (
        open(out / f"items.{world.rank}.jsonl", "a") as f,
        tqdm(total=len(mine), disable=world.rank > 0) as bar,
    ):
        f.write("\n")  # after a line that a kill cut off
        for i in range(0, len(mine), args.micro_batch):
            batch = mine[i : i + args.micro_batch]
            noise = [generator("eval", args.seed, n, *([s] if s else [])) for n, s in batch]
            prompt = policy.encode([rows[n]["prompt"] for n, _ in batch])
            x_0 = samplers.sample(policy, prompt, noise, settings).x_0
            completions, lengths = list(policy.decode(x_0)), end_of_text(x_0, policy.end_ids).tolist()
            parts = rewards.components([rows[n] for n, _ in batch], completions)
            for k, (n, s) in enumerate(batch):
                completion = completions[k]
                if task.modality == "image":
                    path = sample_path(args.save_images or out / "images", n, s, rows[n])
                    pil_images([completion])[0].save(path)
                    completion = os.path.relpath(path, out)
                item = {"item": n, "sample": s, "prompt": rows[n]["prompt"], "completion": completion}
                if extract is not None:
                    item["extracted"] = extract(completion, rows[n])
                item |= {"verdict": float(parts[scored_by(task, parts)][k]), "length": lengths[k]}
                item |= {"components": {name: float(v[k]) for name, v in parts.items()}}
                f.write(json.dumps(item) + "\n")
            f.flush()
            bar.update(len(batch))


def summarize(out: Path, fixed: dict, task, rows: list[dict], wanted: list[tuple[int, int]]) -> dict:
    """items.jsonl in order, and result.json; ValueError where an item is missing."""
    items = read_items(out)
    missing = [w for w in wanted if w not in items]
    if missing:
        raise ValueError(f"{out}: {len(missing)} of {len(wanted)} items are missing, no score")
    n = 1 + wanted[-1][0]
    ordered = [items[w] for w in wanted]
    verdicts = np.array([item["verdict"] for item in ordered]).reshape(n, -1)
    score, se = mean_and_error(verdicts.mean(1), [row.get(task.category) for row in rows[:n]])
    parts = ordered[0]["components"]
    ks = [2**p for p in range(16)] if np.isin(verdicts, (0, 1)).all() else []  # a mark is not right or wrong
    result = {
        "score": score,
        "se": se,
        "scored_by": scored_by(task, parts),
        "n": n,
        "samples": verdicts.shape[1],
        **{f"pass@{k}": pass_at(verdicts, k) for k in ks if k <= verdicts.shape[1]},
        "components": {name: float(np.mean([i["components"][name] for i in ordered])) for name in parts},
        "length": float(np.mean([item["length"] for item in ordered])),
        **fixed,
    }
    every = [items[w] for w in sorted(items)]  # of an earlier call with a larger --samples or --limit too
    write_atomically(out / "items.jsonl", "".join(json.dumps(item) + "\n" for item in every))
    for part in out.glob("items.*.jsonl"):
        part.unlink()
    write_atomically(out / "result.json", json.dumps(result, indent=1))
    return result


def pass_at(verdicts: np.ndarray, k: int) -> float:
    """Chance that one of k samples is right, without bias from the n drawn: the mean over prompts of
    1 - C(n-c, k) / C(n, k), c of n being right; verdicts [prompts, n]."""
    n = verdicts.shape[1]
    right = (verdicts == 1).sum(1)
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in right]))


ALIKE = ("task", "protocol", "reward", "steps", "gen_length", "data_hash")  # in the results of a table
CELLS = ("model", "sampler", "block_length", "temperature", "cfg", "dtype")


def read_result(path: str) -> dict:
    """A result.json; ValueError, with its name, for another file."""
    result = weights.read_json(Path(path))
    if missing := [key for key in (*ALIKE, *CELLS, "score", "se", "n") if key not in result]:
        raise ValueError(f"--compare {path}: no result.json, it lacks {', '.join(missing)}")
    return result


def compare(results: list[dict]) -> str:
    """Markdown table of results. Raises ValueError for results that cannot be compared: of another task,
    protocol, reward, number of steps or length, or on other data."""
    for key in ALIKE:
        values = list(dict.fromkeys(r[key] for r in results))
        if len(values) > 1:
            raise ValueError(
                f"--compare: results of different {key} ({', '.join(map(str, values))}) are no table"
            )
    first = results[0]
    lines = [
        "{task}, protocol {protocol}, {steps} steps, length {gen_length}".format(**first),
        "",
        "| model | sampler | block | temperature | cfg | dtype | score | n |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cells = [str(r[name]) for name in CELLS] + [f"{r['score']:.4f} +-{r['se']:.4f}", str(r["n"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
