"""The life of a run: flags and recipes, directory and log, checkpoints and resume. Nothing of an algorithm in
here."""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common import World, uniform_path

# ---- Flags


@dataclass(frozen=True)
class Recipe:
    """Defaults for the models that match a regular expression and for some tasks.

    ``paper``: what the paper's recipe fixes; ``ours``: what no source gives, chosen by us.
    """

    model: str
    tasks: tuple[str, ...]
    paper: dict = field(default_factory=dict)
    ours: dict = field(default_factory=dict)


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The script's docstring as it stands, and the default of each flag: that of the recipe which fits."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def script_parser(name: str, doc: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(name, f"python {name} [flags]", doc, formatter_class=Help)


def run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that the scripts share, same name, same meaning: this and the three functions below."""
    g = parser.add_argument_group("what to train")
    g.add_argument("--model", default="tiny", help="tiny: the built-in base; else a hub id or a directory")
    g.add_argument(
        "--task", default="tiny-math", help="prompts and reward: a name, or a .py file of your own"
    )
    g.add_argument("--protocol", help="prompt and reward preset of the task: d1, maskgrpo, llada")
    g.add_argument("--data", help="path in place of the task's own data (same fields)")
    g.add_argument(
        "--unsafe-exec", action="store_true", help="run the model's code without isolation (code tasks)"
    )
    g.add_argument("--reward", help="a=1,http://host:8000/b=0.5: split at commas, weight after the last '='")
    g.add_argument(
        "--reward-normalize", action="store_true", help="normalise each reward in its group, then sum"
    )

    g = parser.add_argument_group("the run")
    g.add_argument("--out", help="directory of the run (default: runs/<script>_<task>_s<seed>)")
    g.add_argument("--seed", type=int, default=0, help="of every generator")
    g.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint in --out")
    g.add_argument(
        "--iterations", type=int, default=36, help="outer RL steps: rollout, then the updates on it"
    )
    g.add_argument(
        "--eval-every", type=int, default=12, help="iterations between evaluations (0: only the ends)"
    )
    g.add_argument("--eval-prompts", type=int, default=256, help="held-out prompts in an evaluation (0: all)")
    g.add_argument(
        "--save-every", type=int, default=12, help="iterations between checkpoints (0: only the end)"
    )
    g.add_argument("--export", choices=("llada",), help="store the model in that released layout too")
    g.add_argument("--track", action="store_true", help="log to Weights & Biases too")
    g.add_argument("--dry-run", action="store_true", help="print the memory that these flags need, then stop")
    g.add_argument(
        "--strict", action="store_true", help="stop at the first reward error (else counted, scored 0)"
    )


def rollout_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("rollout")
    g.add_argument("--length", type=int, metavar="L", help="tokens of a completion (default: the model's)")
    g.add_argument("--max-prompt", type=int, help="longest prompt in tokens (default: the model's)")
    g.add_argument("--steps", type=int, default=12, metavar="T", help="denoising steps")
    g.add_argument("--eval-steps", type=int, help="denoising steps of an evaluation (default: --steps)")
    g.add_argument("--temperature", type=float, default=1.0, help="of the token draw; 0 is the argmax")
    g.add_argument(
        "--cfg", type=float, default=0.0, metavar="W", help="guidance: (1+w) cond - w uncond; 0 is off"
    )
    g.add_argument("--cfg-until", type=float, default=1.0, help="share of the denoising that is guided")


def update_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("update")
    g.add_argument("--prompts", type=int, default=12, help="groups an iteration, over all processes")
    g.add_argument("--group-size", type=int, default=8, metavar="G", help="completions of a prompt")
    g.add_argument("--mu", type=int, default=4, help="updates on each rollout")
    g.add_argument("--eps", type=float, default=0.2, help="clip range of the ratio")
    g.add_argument("--beta", type=float, default=0.01, help="weight of the KL; 0 never loads the reference")
    g.add_argument("--lr", type=float, default=3e-4, help="AdamW")
    g.add_argument("--weight-decay", type=float, default=0.1, help="AdamW")
    g.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.99), metavar=("B1", "B2"), help="AdamW")
    g.add_argument("--grad-clip", type=float, default=1.0, help="largest norm of the gradient")
    g.add_argument("--warmup", type=int, default=0, help="optimizer steps of linear warm-up")
    g.add_argument(
        "--adv-std", choices=("group", "batch", "none"), default="group", help="A is divided by (Eq. 4)"
    )
    g.add_argument("--drop-equal", action="store_true", help="leave out groups of equal rewards, KL too")
    g.add_argument(
        "--ref-every", type=int, default=0, help="optimizer steps until the reference is refreshed"
    )


def scale_flags(parser: argparse.ArgumentParser) -> None:
    g = parser.add_argument_group("scale")
    g.add_argument("--shard", choices=("none", "ddp", "fsdp"), help="default: ddp under torchrun")
    g.add_argument("--micro-batch", type=int, default=96, help="completions in a forward pass")
    g.add_argument("--lora-rank", type=int, default=0, help="LoRA on all seven projections (needs peft)")
    g.add_argument("--lora-alpha", type=float, default=64.0)
    g.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the frozen or sharded weights"
    )
    g.add_argument("--grad-checkpoint", action="store_true", help="recompute each block in the backward pass")


def path_flags(parser: argparse.ArgumentParser, kinds: tuple[str, ...]) -> None:
    g = parser.add_argument_group("uniform path (default: what the checkpoint says)")
    g.add_argument("--path", choices=kinds, help="p_t(x | x_1)")
    g.add_argument("--path-alpha", type=float, help="metric: b_t = c (t / (1-t))^alpha")
    g.add_argument("--path-c", type=float)
    g.add_argument(
        "--distance-power", type=int, choices=(1, 2), help="2: the distance squared again (FUDOKI)"
    )
    g.add_argument("--shift", type=float, help="of the times: t = 1 - s sigma / (1 + (s-1) sigma)")


def path_of(args: argparse.Namespace, policy) -> tuple:
    """(path, shift) of uniform diffusion: the flags given, else the checkpoint's; ValueError where neither
    says it. The policy notes what was given, so that it is stored with the path it was trained on."""
    given = {"path": args.path, "alpha": args.path_alpha, "c": args.path_c, "power": args.distance_power}
    given = {name: value for name, value in (given | {"shift": args.shift}).items() if value is not None}
    found = uniform_path(policy, **given)
    policy.path_settings = getattr(policy, "path_settings", {}) | given
    return found


def parse(
    parser: argparse.ArgumentParser, recipes: list[Recipe], argv: list[str] | None = None
) -> argparse.Namespace:
    """Flags over the recipe of the model and task chosen over the script's defaults. ``args.source`` says,
    flag by flag, where a value comes from. With --dry-run, print the memory needed and stop."""
    words = sys.argv[1:] if argv is None else argv
    first, _ = parser.parse_known_args([w for w in words if w not in ("-h", "--help")])
    recipe = find_recipe(recipes, first.model, first.task)
    parser.set_defaults(**recipe.paper, **recipe.ours)
    args = parser.parse_args(argv)
    unset = argparse.Namespace(**dict.fromkeys(vars(args)))  # argparse sets no default where there is a value
    given = {k for k, v in vars(parser.parse_args(argv, unset)).items() if v is not None}
    source = dict.fromkeys(vars(args), "default") | dict.fromkeys(recipe.paper, "paper")
    args.source = source | dict.fromkeys(recipe.ours, "ours") | dict.fromkeys(given, "command line")
    args.name = Path(parser.prog).stem
    if args.shard is None:
        args.shard = "ddp" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else "none"
    check_ranges(parser, args)
    if args.dry_run:
        from memory import table

        with one_sentence():
            print(f"{describe(args)}\n\n{table(args)}")
        sys.exit()
    return args


def find_recipe(recipes: list[Recipe], model: str, task: str) -> Recipe:
    """The first that fits; an empty one where none does."""
    for recipe in recipes:
        if re.search(recipe.model, model) and task in recipe.tasks:
            return recipe
    return Recipe(model, (task,))


RANGES = {  # flag -> least and largest value
    **dict.fromkeys(("prompts", "steps", "eval_steps", "mu", "micro_batch", "iterations"), (1, math.inf)),
    **dict.fromkeys(("length", "max_prompt", "batch", "examples"), (1, math.inf)),
    **dict.fromkeys(("lr", "beta", "temperature", "weight_decay", "warmup", "ref_every"), (0, math.inf)),
    **dict.fromkeys(("lora_rank", "eval_every", "save_every", "eval_prompts", "cfg"), (0, math.inf)),
    **dict.fromkeys(("prompt_mask", "drop_prompt", "cfg_until", "eps"), (0, 1)),
    "grad_clip": (1e-8, math.inf),
    "group_size": (2, math.inf),  # an advantage compares the completions of one prompt
}


def check_ranges(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one sentence where a flag is out of its range."""
    for flag, (least, largest) in RANGES.items():
        value = getattr(args, flag, None)
        if value is not None and not (least <= value <= largest and value < math.inf):
            within = f"at least {least}" if largest == math.inf else f"from {least} to {largest}"
            parser.error(f"--{flag.replace('_', '-')} {value}: must be a number, {within}")


def describe(args: argparse.Namespace) -> str:
    """The recipe as printed at the start: each value, and who chose it."""
    lines = []
    for source in ("paper", "ours", "command line"):
        chosen = [f"{k.replace('_', '-')} {getattr(args, k)}" for k, s in args.source.items() if s == source]
        if chosen:
            lines.append(f"{source + ':':14}{', '.join(chosen)}")
    return "\n".join(lines)


@contextmanager
def one_sentence():
    """While a run is set up, a wrong flag or file, or reward servers that are down, end it with one sentence,
    not a traceback."""
    from eval.reward_client import RewardServersDown

    try:
        yield
    except (ValueError, ImportError, RewardServersDown) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")


# ---- Directory and log


class Run:
    """``runs/<name>/``: config.json, metrics.jsonl, eval.jsonl, samples/, checkpoints/. Only rank 0 writes.

    Raises ValueError when --out already holds a run and --resume was not given, or the other way round.
    """

    def __init__(self, args: argparse.Namespace, world: World):
        self.args, self.world = args, world
        self.writer = self.wandb = None
        self.warned = False
        name = f"{args.name}_{Path(args.task).stem}_s{args.seed}"
        self.dir = Path(args.out or f"runs/{name}")
        holds_run = (self.dir / "config.json").exists()
        if args.resume and not holds_run:
            raise ValueError(f"--resume: {self.dir} holds no run; name it with --out")
        if not args.resume and holds_run:
            if args.out:
                raise ValueError(
                    f"--out {args.out} already holds a run: add --resume, or choose another directory"
                )
            n = 2
            while (self.dir.parent / f"{name}_{n}" / "config.json").exists():
                n += 1
            self.dir = self.dir.parent / f"{name}_{n}"
        self.step = newest_checkpoint(self.dir)[0] if args.resume else 0  # iterations done
        world.barrier()  # every rank has looked before rank 0 writes
        if world.rank == 0:
            print(describe(args))
            (self.dir / "samples").mkdir(parents=True, exist_ok=True)
            config = {k: v for k, v in vars(args).items() if k not in ("resume", "source")}
            if holds_run and args.resume:
                warn_if_changed(json.loads((self.dir / "config.json").read_text()), config)
            write_atomically(self.dir / "config.json", json.dumps(config, indent=1))
            for log in ("metrics.jsonl", "eval.jsonl"):
                cut_back(self.dir / log, self.step)
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(self.dir / "tensorboard", purge_step=self.step + 1)
            except ImportError:
                pass
            if args.track:
                import wandb

                self.wandb = wandb.init(
                    project="ddrl", name=self.dir.name, config=config, resume="allow", id=self.dir.name
                )

    def log(self, step: int, metrics: dict) -> None:
        """A line of metrics.jsonl; TensorBoard, Weights & Biases and the progress bar too."""
        if self.world.rank:
            return
        append(self.dir / "metrics.jsonl", {"step": step, **metrics})
        if self.writer:
            for k, v in metrics.items():
                self.writer.add_scalar(k, v, step)
        if self.wandb:
            self.wandb.log(metrics, step=step)
        shown = {"reward/mean": "reward", "kl": "kl", "loss": "loss"}
        self.bar.set_postfix({short: f"{metrics[k]:.4f}" for k, short in shown.items() if k in metrics})
        if metrics.get("zero_spread", 0.0) > 0.7 and not self.warned:
            self.warned = True
            self.bar.write(
                f"only {1 - metrics['zero_spread']:.0%} of the groups have unequal rewards, the others give "
                "no signal: a larger --group-size, or easier prompts, give more"
            )

    def score(self, step: int, task: str, mode: str, result: dict) -> None:
        """A line of eval.jsonl: step, task, mode (greedy or sampled), score, se, n and whatever else was
        measured."""
        if self.world.rank == 0:
            append(self.dir / "eval.jsonl", {"step": step, "task": task, "mode": mode, **result})
            if self.writer:
                self.writer.add_scalar(f"eval/{mode}", result["score"], step)
            if self.wandb:
                self.wandb.log({f"eval/{mode}": result["score"]}, step=step)

    def scores(self) -> list[dict]:
        """The lines of eval.jsonl so far."""
        path = self.dir / "eval.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def iterations(self):
        """Yield the iterations left, with a progress bar; save when one is done and a checkpoint is due."""
        from tqdm import tqdm

        args = self.args
        total = args.iterations
        self.bar = tqdm(total=total, initial=self.step, desc=self.dir.name, disable=self.world.rank > 0)
        while self.step < total:
            yield self.step
            self.step += 1
            self.bar.update()
            if self.step == total or (args.save_every and self.step % args.save_every == 0):
                self.save()
        self.bar.close()

    def restore(
        self, policy: nn.Module, reference: nn.Module | None, optimizer: torch.optim.Optimizer
    ) -> None:
        """Name what a checkpoint holds, and fill it from the newest one if this run goes on from there."""
        self.held = {"policy": policy}
        if reference is not None and self.args.ref_every and reference.policy is not policy:
            self.held["reference"] = reference.policy
        self.optimizer = optimizer
        if self.step:
            load_checkpoint(newest_checkpoint(self.dir)[1], self.state(), optimizer)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors that training changes; asked for anew each time, as sharded ones are moved about."""
        return {name: trained_state(module) for name, module in self.held.items()}

    def finish(self, policy) -> None:
        """Store the trained model, draw the curve, say what became of the score and where everything is."""
        from eval.report import draw
        from scale import store

        store(policy, self.dir / "model", self.args, self.world)
        if self.world.rank:
            return
        config = json.loads((self.dir / "config.json").read_text())
        training = {"step": self.step, "config_hash": config_hash(config), "config": config}
        training |= {"scores": [s for s in self.scores() if s["step"] == self.step]}
        for model in (self.dir / name for name in ("model", "llada")):
            if model.exists():
                write_atomically(model / "training.json", json.dumps(training, indent=1))
        draw({self.dir.name: [self.dir]}, self.dir / "curve.png")
        first, last = ({s["mode"]: s for s in self.scores() if s["step"] == at} for at in (0, self.step))
        if last:
            print(f"\n{'held-out score':16}{'base':>16}{'trained':>18}")
        for mode in last:
            cells = (f"{s[mode]['score']:11.3f} +-{s[mode]['se']:.3f}" for s in (first, last))
            print(f"{mode:16}{''.join(cells)}")
        print(f"model {self.dir}/model   curve {self.dir}/curve.png   samples {self.dir}/samples/")

    def save(self) -> None:
        save_checkpoint(self.dir, self.step, self.state(), self.optimizer, self.world)

    def warmed_up(self, update: int) -> float:
        """Learning rate of optimizer step ``update`` (from 0): linear over --warmup, then constant."""
        return self.args.lr * min(1.0, (update + 1) / max(self.args.warmup, 1))

    def optimizer_step(self, parameters: list[nn.Parameter], lr: float) -> float:
        """Clip, step, clear; the norm before clipping. A norm that is not finite stops the run, unstepped."""
        norm = nn.utils.clip_grad_norm_(parameters, self.args.grad_clip)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # --shard fsdp
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient is not finite in iteration {self.step + 1}: nothing of it was saved"
            )
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def refresh(self, reference, policy: nn.Module, updates: int, own: int | None = None) -> None:
        """After an iteration that ends at ``updates`` optimizer steps, ``own`` (default: --mu) of them its
        own: every --ref-every of them, rounded up to the end of an iteration, the reference becomes a copy
        of the policy."""
        every = self.args.ref_every
        own = self.args.mu if own is None else own
        if reference is not None and every and updates // every > (updates - own) // every:
            reference.refresh(policy)

    def gather_rewards(self, rewards, rows: list[dict], completions: list, n: int) -> dict[str, np.ndarray]:
        """Every component [n] over all processes. When all reward servers are down a checkpoint is saved,
        then it stops."""
        from eval.reward_client import RewardServersDown

        down = None
        try:
            parts = rewards.components(rows, completions)
        except RewardServersDown as error:
            down = error
        if self.world.any(down is not None):  # all ranks stop together
            self.save()
            raise SystemExit(
                f"{down or 'reward servers are down'}; saved after iteration {self.step}: go on with --resume"
            )
        found = self.world.gather_objects(list(parts))  # a reward that raised on one rank answers fewer there
        names = list(dict.fromkeys(name for ranks in found for name in ranks))
        parts = [torch.from_numpy(parts.get(name, np.zeros(len(rows)))) for name in names]
        return {
            k: self.world.gather(v.to(self.world.device), n).cpu().numpy()
            for k, v in zip(names, parts, strict=True)
        }


def append(path: Path, row: dict) -> None:
    with open(path, "a") as f:
        f.write(json.dumps({k: round(v, 8) if isinstance(v, float) else v for k, v in row.items()}) + "\n")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def config_hash(config: dict) -> str:
    """12 hex digits that tell one set of flags from another."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after ``step``, and a last line that was cut off by a kill."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    write_atomically(path, "".join(kept))


def warn_if_changed(old: dict, new: dict) -> None:
    """A resumed run whose flags differ is another run: say which."""
    for k in sorted(
        old.keys() & new.keys() - {"iterations", "out", "eval_every", "save_every", "track", "name"}
    ):
        if json.loads(json.dumps(new[k])) != old[k]:
            warnings.warn(f"--resume: --{k.replace('_', '-')} was {old[k]}, is now {new[k]}", stacklevel=2)


# ---- Checkpoints


def trained_state(policy: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model: all of it; with LoRA the adapters, no base weights."""
    state = policy.state_dict()
    return {n: t for n, t in state.items() if "lora_" in n} or state


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict:
    """Moments by position. Before the first step AdamW has none: create them, so that loading finds its
    tensors."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state[p]:
                zeros = torch.zeros_like(p)
                optimizer.state[p] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": zeros,
                    "exp_avg_sq": zeros.clone(),
                }
    return {f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}


def save_checkpoint(
    directory: Path, step: int, state: dict, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Write ``checkpoints/step_<n>`` whole or not at all. ``state``: named tensors or nested dictionaries of
    them. Sharded tensors are written by the ranks that hold them, and can be loaded by any number of
    ranks."""
    import torch.distributed.checkpoint as dcp

    root = directory / "checkpoints"
    final, temporary = root / f"step_{step:06d}", root / f"step_{step:06d}.tmp"
    if world.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    world.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dcp says that one process is not distributed
        dcp.save(
            {**state, "optimizer": optimizer_state(optimizer)},
            checkpoint_id=temporary,
            no_dist=world.size == 1,
        )
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        for old in sorted(p for p in root.iterdir() if p.suffix != ".tmp")[:-2]:
            shutil.rmtree(old)
    world.barrier()


def load_checkpoint(path: Path, state: dict, optimizer: torch.optim.Optimizer) -> None:
    """Fill the tensors of ``state`` and the optimizer in place."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    moments = optimizer_state(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({**state, "optimizer": moments}, checkpoint_id=path, no_dist=not dist.is_initialized())


def newest_checkpoint(directory: Path) -> tuple[int, Path | None]:
    """(step, path) of the newest whole checkpoint; (0, None) where a run was killed before its first."""
    found = sorted(p for p in (directory / "checkpoints").glob("step_*") if p.suffix != ".tmp")
    return (int(found[-1].name.removeprefix("step_")), found[-1]) if found else (0, None)
