"""The flags of the scripts: those that they share, recipes for a model and task, and one sentence for what is
wrong."""

import argparse
import math
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common import MixturePath, uniform_path


@dataclass(frozen=True)
class Recipe:
    """Defaults for the models that match a regular expression and for some tasks.

    ``paper``: what the paper or its public code fixes; ``ours``: what no source gives, chosen by us.
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
    return argparse.ArgumentParser(
        name, f"python {name} [flags]", doc, formatter_class=Help, allow_abbrev=False
    )


def run_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that the scripts share, same name, same meaning: this and the three functions below."""
    g = parser.add_argument_group("what to train")
    g.add_argument("--model", default="tiny", help="tiny: the built-in base; else a hub id or a directory")
    g.add_argument("--vq", help="image tokenizer in place of the checkpoint's: a hub id or a directory")
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
    says it. The policy notes what was asked, so that it is stored with the path it was trained on."""
    asked = {"path": args.path, "alpha": args.path_alpha, "c": args.path_c, "power": args.distance_power}
    asked = {name: value for name, value in (asked | {"shift": args.shift}).items() if value is not None}
    found = uniform_path(policy, **asked)
    if isinstance(found[0], MixturePath):
        refuse(args, ("path_alpha", "path_c", "distance_power"), "on the mixture path")
    policy.path_settings = getattr(policy, "path_settings", {}) | asked
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
    typed = {k for k, v in vars(parser.parse_args(argv, unset)).items() if v is not None}
    source = dict.fromkeys(vars(args), "default") | dict.fromkeys(recipe.paper, "paper")
    args.source = source | dict.fromkeys(recipe.ours, "ours") | dict.fromkeys(typed, "command line")
    args.name = Path(parser.prog).stem
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    args.shard = args.shard or ("none" if alone else "ddp")
    if args.shard == "none" and not alone:
        parser.error("--shard none: accepted under torchrun are ddp, fsdp")
    check_ranges(parser, args)
    with one_sentence():
        check_idle(args)
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


POSITIVE = (math.ulp(0.0), math.inf)  # from the least number above 0
RANGES = {  # flag -> least and largest value
    **dict.fromkeys(("prompts", "steps", "eval_steps", "mu", "micro_batch", "iterations"), (1, math.inf)),
    **dict.fromkeys(("length", "max_prompt", "block", "batch", "examples"), (1, math.inf)),
    **dict.fromkeys(("samples", "limit", "seeds", "workers"), (1, math.inf)),
    **dict.fromkeys(("lr", "beta", "temperature", "weight_decay", "warmup", "ref_every"), (0, math.inf)),
    **dict.fromkeys(("lora_rank", "eval_every", "save_every", "eval_prompts", "cfg"), (0, math.inf)),
    **dict.fromkeys(("prompt_mask", "drop_prompt", "cfg_until", "eps", "betas"), (0, 1)),
    **dict.fromkeys(("grad_clip", "lora_alpha", "path_alpha", "path_c", "shift"), POSITIVE),
    "seed": (0, 2**32 - 1),
    "group_size": (2, math.inf),  # an advantage compares the completions of one prompt
}
IDLE = {  # flag -> another, and its values at which the flag has no effect
    "lora_alpha": ("lora_rank", (0,)),
    "ref_every": ("beta", (0,)),
    "cfg_until": ("cfg", (0,)),
}


def check_ranges(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one sentence where a flag is out of its range."""
    for flag, (least, largest) in RANGES.items():
        within = f", at least {least}" if largest == math.inf else f", from {least} to {largest}"
        within = " above 0" if (least, largest) == POSITIVE else within
        values = getattr(args, flag, None)
        for value in values if isinstance(values, list | tuple) else [values]:
            if value is not None and not (least <= value <= largest and value < math.inf):
                parser.error(f"--{flag.replace('_', '-')} {value}: must be a number{within}")


def check_idle(args: argparse.Namespace) -> None:
    """ValueError where a flag of the command line would be ignored, by IDLE."""
    for flag, (other, idle) in IDLE.items():
        if getattr(args, other, None) in idle:
            refuse(args, (flag,), f"with --{other.replace('_', '-')} {getattr(args, other)}")


def given(args: argparse.Namespace) -> set[str]:
    """The flags that stand on the command line; none where ``parse`` did not make ``args``."""
    return {k for k, source in vars(args).get("source", {}).items() if source == "command line"}


def refuse(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """ValueError where one of these flags, which would have no effect, stands on the command line."""
    idle = [f"--{name.replace('_', '-')}" for name in names if name in given(args)]
    if idle:
        raise ValueError(f"{', '.join(idle)}: no effect {why}")


def describe(args: argparse.Namespace) -> str:
    """The recipe as printed at the start: each value, and who chose it; or that there is none."""
    lines = []
    if not {"paper", "ours"} & set(args.source.values()) and args.model.split(":")[0] != "tiny":
        lines.append("no recipe for this model and task: the script's defaults hold")
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
    except (ValueError, ImportError, OSError, RewardServersDown) as error:
        if isinstance(error, OSError) and error.filename is not None:  # in place of [Errno 13]
            error = f"{error.filename}: {error.strerror}"
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")
