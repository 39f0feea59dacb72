"""The life of a run: directory and log, checkpoints and resume. Nothing of an algorithm in here."""

import argparse
import hashlib
import json
import math
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common import World
from flags import describe
from models.weights import read_json

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
                warn_if_changed(read_json(self.dir / "config.json"), config)
            self.config = json.dumps(config, indent=1)
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
        return read_log(self.dir / "eval.jsonl")

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
        if self.world.rank == 0:  # now that these flags have been found to fit
            write_atomically(self.dir / "config.json", self.config)

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
        config = read_json(self.dir / "config.json")
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
            raise SystemExit(
                f"the gradient is not finite in iteration {self.step + 1}: nothing of it was saved; with a "
                "smaller --lr, --resume goes on from the last checkpoint"
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


def read_log(path: Path) -> list[dict]:
    """The rows of metrics.jsonl or eval.jsonl, none where there is no file; a last line that was cut off by
    a kill is left out. ValueError, naming file and line, for damage elsewhere."""
    rows = []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise ValueError(f"{path}:{number}: a damaged line of the log; take it out") from None
    return rows


def cut_back(path: Path, step: int) -> None:
    """Drop the rows after ``step``, and a last line that was cut off by a kill."""
    if path.exists():
        kept = [json.dumps(row) + "\n" for row in read_log(path) if row["step"] <= step]
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
        found = whole_checkpoints(directory)
        for old in sorted(found)[:-2]:
            shutil.rmtree(found[old])
    world.barrier()


def load_checkpoint(path: Path, state: dict, optimizer: torch.optim.Optimizer) -> None:
    """Fill the tensors of ``state`` and the optimizer in place. ValueError where the checkpoint is damaged
    or of other flags."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    state = {**state, "optimizer": optimizer_state(optimizer)}
    shapes = {f"{part}.{name}": t.shape for part, held in state.items() for name, t in held.items()}
    try:
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        stored = {name: getattr(tensor, "size", None) for name, tensor in stored.items()}
        others = [name for name, shape in shapes.items() if stored.get(name) != shape]
        if not others:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:  # of whatever kind: pickle, zip, a missing file
        failures = getattr(error, "failures", None) or {0: (error, None)}
        reason = str(next(iter(failures.values()))[0]).split("\n")[0]
        raise ValueError(
            f"--resume: {path} cannot be read ({reason}): remove it, and --resume goes on from the one before"
        ) from error
    if others:
        raise ValueError(
            f"--resume: {path} was saved with other flags, such as --model or --lora-rank: it holds no "
            f"{others[0]} of shape {tuple(shapes[others[0]])}"
        )


def whole_checkpoints(directory: Path) -> dict[int, Path]:
    """``checkpoints/step_<n>`` by n; what is half-written or has another name is passed over."""
    found = {p.name.removeprefix("step_"): p for p in (directory / "checkpoints").glob("step_*")}
    return {int(n): path for n, path in found.items() if n.isdigit()}


def newest_checkpoint(directory: Path) -> tuple[int, Path | None]:
    """(step, path) of the newest whole checkpoint; (0, None) where a run was killed before its first."""
    return max(whole_checkpoints(directory).items(), default=(0, None))
