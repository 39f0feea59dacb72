"""What the algorithms share: randomness, forward process, ELBO, advantage, processes, checkpoints, the log of
a run."""

import hashlib
import importlib.util
import math
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


def import_file(path: str, flag: str, name: str) -> ModuleType:
    """A Python file of the user's that must define ``name``. ValueError, one sentence, where it does not.

    It stands in sys.modules, where dataclasses and pickle look for it, under a name made of path and content:
    it clashes with no other, and a file that is named twice is one module.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{flag} {path}: no such file")
    with open(path, "rb") as f:
        digest = hashlib.blake2b(os.path.realpath(path).encode() + f.read(), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(f"file_{digest}", path)
    module = sys.modules.get(spec.name)
    if module is None:
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[spec.name]
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == spec.origin]
            line = lines[-1] if lines else getattr(error, "lineno", 1)  # a syntax error never ran
            raise ValueError(f"{flag} {path}, line {line}: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{flag} {path}: defines no function {name!r}")
    return module


# ---- Randomness: explicit generators only, keyed by what they are for, so that any number of processes draws
# the same


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by its key, e.g. ``generator("rollout", seed, iteration, sample)``."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def prompt_indices(n_rows: int, n_prompts: int, iteration: int, seed: int) -> list[int]:
    """Which rows an iteration uses: an endless pass, in a new order in each epoch. A function of the
    iteration alone, so that a resumed run needs no cursor."""
    first, last = iteration * n_prompts, (iteration + 1) * n_prompts
    epochs = range(first // n_rows, (last - 1) // n_rows + 1)
    order = torch.cat([torch.randperm(n_rows, generator=generator("data", seed, epoch)) for epoch in epochs])
    start = first - epochs[0] * n_rows
    return order[start : start + n_prompts].tolist()


# ---- Forward process, masked diffusion


def times(mu: int, gamma: float = 0.0) -> list[float]:
    """t_j = gamma + (1 - gamma) j / mu, j = 1..mu (MaskGRPO Eq. 11). The last is 1: the public code's cap at
    0.999 would leave some tokens unmasked at every j."""
    return [gamma + (1 - gamma) * j / mu for j in range(1, mu + 1)]


def fading_keep(t: float, L: int) -> Tensor:
    """Probability [L] that each completion token stays shown (Alg. 1): d (1-t) L / sum d, d = linspace(1, 0,
    L), at most 1.

    Its mean is 1 - t where nothing is clipped (t >= 1/2), so the mean mask rate is t, rising towards the end.
    """
    d = torch.linspace(1, 0, L, dtype=torch.float64)
    return (d * ((1 - t) * L / d.sum())).clamp(max=1)


def remask(kind: str, t: float, u: Tensor, revealed: Tensor | None = None) -> Tensor:
    """Which completion tokens are masked at t in (0, 1]: bool [B, L], from uniforms u [B, L]. Prompts are
    never touched.

    fading (Alg. 1): u >= keep; random (Alg. 2): u < t; trace: the ceil(t L) tokens revealed last by the
    sampler (``revealed`` [B, L]), all tokens of a step together; full: everything.
    """
    L = u.shape[-1]
    if kind == "fading":
        return u >= fading_keep(t, L).to(u.device)
    if kind == "random":
        return u < t
    if kind == "full":
        return torch.ones_like(u, dtype=torch.bool)
    if kind == "trace":
        last = revealed.sort(-1, descending=True).values[:, math.ceil(t * L - 1e-9) - 1]
        return revealed >= last.unsqueeze(-1)
    raise ValueError(f"--remask {kind}: accepted are fading, random, trace, full")


# ---- Forward process, uniform diffusion

CHUNK = 2**24  # probabilities alive at once


def per_token(t: float | Tensor, x: Tensor) -> Tensor:
    """Times t, one for all or one for each row [B], as float64 in the shape of x."""
    t = torch.as_tensor(t, dtype=torch.float64, device=x.device)
    return t.view(t.shape + (1,) * (x.dim() - t.dim())).expand(x.shape)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Index [N] drawn in proportion to weights [N, K] >= 0 at u [N] in [0, 1)."""
    cdf = weights.double().cumsum(-1)
    index = torch.searchsorted(cdf, (u * cdf[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
    return index.clamp(max=weights.shape[-1] - 1)


class MixturePath:
    """x_t is x_1 with probability t, else one of K tokens at random (x_1 among them)."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def probability(self, x_1: Tensor, t: float | Tensor) -> Tensor:
        """p_t(x | x_1) [B, L, K] for x_1 [B, L] and t in [0, 1], a number or [B]."""
        t = per_token(t, x_1).unsqueeze(-1).float()
        p = ((1 - t) / self.vocab_size).repeat(*(1,) * x_1.dim(), self.vocab_size)
        return p.scatter_add_(-1, x_1.unsqueeze(-1), t.contiguous())

    def corrupt(self, x_1: Tensor, t: float | Tensor, u: Tensor) -> Tensor:
        """x_t ~ p_t(x | x_1) [B, L] at u [B, L] in [0, 1): noise where u < 1 - t, which the K tokens
        share."""
        noise = 1 - per_token(t, x_1)
        x_0 = (u.double() / noise * self.vocab_size).clamp(max=self.vocab_size - 1)
        return torch.where(u < noise, x_0.nan_to_num().long(), x_1)

    def rate(self, x_t: Tensor, x_1: Tensor, t: float | Tensor, s: float | Tensor | None = None) -> Tensor:
        """Rate [B, L, K] of the jumps from x_t to each token given x_1, 0 to itself: 1 / (1 - t) to x_1.

        With s in (t, 1) its integral over [t, s], log (1 - t) / (1 - s): a token then jumps with probability
        (s - t) / (1 - t), which is exact.
        """
        t = per_token(t, x_1)
        rate = 1 / (1 - t) if s is None else torch.log((1 - t) / (1 - per_token(s, x_1)))
        rate = torch.where(x_t == x_1, 0, rate).float().unsqueeze(-1)
        return rate.new_zeros(*x_1.shape, self.vocab_size).scatter_(-1, x_1.unsqueeze(-1), rate)

    def jump(
        self, x_t: Tensor, x_1: Tensor, t: float, s: float, u: Tensor, integrated: bool = True
    ) -> Tensor:
        """x_s [B, L] from x_t and the drawn x_1, at u [2, B, L]; see MetricPath.jump."""
        total = math.log((1 - t) / (1 - s)) if integrated else (s - t) / (1 - t)
        return torch.where(u[0] < -math.expm1(-total), x_1, x_t)


class MetricPath:
    """p_t(x | x_1) = softmax_x(-b_t d(x, x_1)) with b_t = c (t / (1 - t))^alpha (URSA; FUDOKI: power 2).

    d is the squared distance of the L2-normalised rows of codebook [K, d], raised to ``power``. The path is
    kinetic optimal: its rate b'_t p_t(x | x_1) relu(d(x_t, x_1) - d(x, x_1)) only jumps closer to x_1.
    """

    def __init__(self, codebook: Tensor, alpha: float, c: float, power: int = 1):
        self.codebook = F.normalize(codebook.float(), dim=-1, eps=1e-5)
        self.alpha, self.c, self.power = alpha, c, power
        self.vocab_size = len(codebook)

    def beta(self, t: Tensor) -> Tensor:
        return self.c * (t / (1 - t)) ** self.alpha

    def beta_prime(self, t: Tensor) -> Tensor:
        """db/dt; 0 at t = 0, where it is infinite for alpha < 1, as in the public code."""
        slope = self.c * self.alpha * t ** (self.alpha - 1) / (1 - t) ** (self.alpha + 1)
        return torch.where(t > 0, slope, 0)

    def distance(self, x_1: Tensor, x: Tensor | None = None) -> Tensor:
        """d(x, x_1) [...] for codes x_1 and x [...]; without x to every code, [..., K]."""
        e_1 = self.codebook[x_1]
        if x is not None:
            return (self.codebook[x] - e_1).square().sum(-1) ** self.power
        d = e_1.square().sum(-1, keepdim=True) + self.codebook.square().sum(-1) - 2 * e_1 @ self.codebook.T
        return d**self.power

    def probability(self, x_1: Tensor, t: float | Tensor) -> Tensor:
        """p_t(x | x_1) [B, L, K] for x_1 [B, L] and t in [0, 1), a number or [B]."""
        return self.softmax(x_1, self.beta(per_token(t, x_1)))

    def softmax(self, x_1: Tensor, b: Tensor) -> Tensor:
        """softmax_x(-b d(x, x_1)) [B, L, K] for x_1 and b [B, L]."""
        return self.distance(x_1).mul_(-b.float().unsqueeze(-1)).softmax(-1)

    def rate(self, x_t: Tensor, x_1: Tensor, t: float | Tensor, s: float | Tensor | None = None) -> Tensor:
        """Rate [B, L, K] of the jumps from x_t to each token given x_1, 0 to itself, at t in [0, 1).

        With s in (t, 1) its integral over [t, s], which is one over b, by the midpoint rule: b_s - b_t in
        place of b'_t, and p at (b_t + b_s) / 2. It is finite at t = 0.
        """
        t = per_token(t, x_1)
        b, gain = self.beta(t), self.beta_prime(t)
        if s is not None:
            gain = self.beta(per_token(s, x_1)) - b
            b = b + gain / 2
        closer = (self.distance(x_1, x_t).unsqueeze(-1) - self.distance(x_1)).relu_()
        rate = closer.mul_(self.softmax(x_1, b)).mul_(gain.float().unsqueeze(-1))
        return rate.scatter_(-1, x_t.unsqueeze(-1), 0)

    def corrupt(self, x_1: Tensor, t: float | Tensor, u: Tensor) -> Tensor:
        """x_t ~ p_t(x | x_1) [B, L] by inverse CDF at u [B, L] in [0, 1)."""
        parts = self.split(x_1, per_token(t, x_1), u)
        return torch.cat([inverse_cdf(self.probability(x, s), v) for x, s, v in parts]).view(x_1.shape)

    def jump(
        self, x_t: Tensor, x_1: Tensor, t: float, s: float, u: Tensor, integrated: bool = True
    ) -> Tensor:
        """One Euler step of the jump process: x_s [B, L] from x_t, the drawn x_1 and u [2, B, L] in [0, 1).

        A token jumps where u[0] < 1 - exp(-total rate over [t, s]), to a token drawn at u[1] in proportion to
        the rates. ``integrated=False`` takes (s - t) times the rate at t, as the public code.
        """
        x_s = []
        for x, y, v, w in self.split(x_t, x_1, u[0], u[1]):
            rate = self.rate(x, y, t, s) if integrated else self.rate(x, y, t) * (s - t)
            x_s.append(torch.where(v < -torch.expm1(-rate.sum(-1)), inverse_cdf(rate, w), x))
        return torch.cat(x_s).view(x_t.shape)

    def split(self, *values: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Flat pieces of [B, L] values, so short that no more than CHUNK probabilities are alive."""
        rows = max(1, CHUNK // self.vocab_size)
        return zip(*(v.flatten().split(rows) for v in values), strict=True)


def uniform_path(
    policy,
    path: str | None = None,
    alpha: float | None = None,
    c: float | None = None,
    power: int | None = None,
    shift: float | None = None,
) -> tuple[MixturePath | MetricPath, float]:
    """The path and the time shift: what is given, else what the checkpoint says (``policy.path_settings``).

    Raises ValueError where neither says it: another alpha, c or shift is another process, so none is guessed.
    """
    given = {"path": path, "alpha": alpha, "c": c, "power": power, "shift": shift}
    known = {"power": 1} | getattr(policy, "path_settings", {})
    known |= {name: value for name, value in given.items() if value is not None}
    kind = known.get("path")
    if kind not in ("mixture", "metric", None):
        raise ValueError(f"--path {kind}: accepted are mixture, metric")
    needed = {"mixture": ("shift",), "metric": ("alpha", "c", "shift")}.get(kind, ("path",))
    absent = [name for name in needed if known.get(name) is None]
    if absent:
        raise ValueError(
            f"no scheduler file of the checkpoint gives {', '.join(absent)}: "
            "give --path, --shift and, for metric, --path-alpha and --path-c"
        )
    if kind == "mixture":
        return MixturePath(policy.vocab_size), known["shift"]
    if policy.codebook is None:
        raise ValueError("--path metric: the model has no codebook to measure distances in")
    if len(policy.codebook) != policy.vocab_size:
        raise ValueError(
            f"--path metric: the head has {policy.vocab_size} codes, the codebook {len(policy.codebook)}"
        )
    codebook = policy.codebook.to(next(policy.parameters()).device)
    return MetricPath(codebook, known["alpha"], known["c"], known["power"]), known["shift"]


def path_times(u: Tensor, shift: float = 1.0) -> Tensor:
    """Times t in [0, 1) at which a base is trained, from uniforms u: sigma = 1 - 0.999 u as in URSA, then the
    shift of ``samplers.euler_times``."""
    sigma = 1 - 0.999 * u
    return 1 - shift * sigma / (1 + (shift - 1) * sigma)


# ---- ELBO


def elbo(policy, prompt, x_0: Tensor, mask: Tensor, t: Tensor, null=None, cfg: float = 0.0) -> Tensor:
    """l(x_t, x_0) = (1/t) sum over masked k of log p(x_0^k | x_t, c)  (MaskGRPO Eq. 2): [B], at most 0.

    x_0 [B, L], mask [B, L] bool, t [B] in (0, 1]. Its mean over t ~ U(0, 1] and masks with rate t, or over k
    ~ U{1..L} and masks of k tokens with t = k/L, is the bound on log p(x_0 | c).
    """
    x_t = torch.where(mask, policy.mask_id, x_0)
    log_p = policy(prompt, x_t, where=mask, target=x_0, null=null, cfg=cfg)
    return torch.zeros(x_0.shape, device=log_p.device).masked_scatter(mask, log_p).sum(-1) / t


@torch.no_grad()
def log_likelihood(policy, prompt, x_0: Tensor, draws: int, g: torch.Generator) -> Tensor:
    """Monte-Carlo estimate [B] of the bound on log p(x_0 | c), with k ~ U{1..L} masked tokens in each of
    ``draws``."""
    B, L = x_0.shape
    total = torch.zeros(B, device=x_0.device)
    for _ in range(draws):
        k = torch.randint(1, L + 1, (B, 1), generator=g)
        mask = (torch.rand(B, L, generator=g).argsort(-1).argsort(-1) < k).to(x_0.device)
        total += elbo(policy, prompt, x_0, mask, (k.squeeze(-1) / L).to(x_0.device))
    return total / draws


# ---- End of text, advantage, KL


def end_of_text(x: Tensor, end_ids: tuple[int, ...]) -> Tensor:
    """Length [B] of each response [B, L]: up to and including its first end id; L where there is none."""
    ends = torch.isin(x, torch.tensor(end_ids, device=x.device, dtype=x.dtype))
    return torch.where(ends.any(-1), ends.int().argmax(-1) + 1, x.shape[-1])


def group_advantage(
    rewards: Tensor, std: str = "group", ddof: int = 1, eps: float = 1e-5, clip: float | None = None
) -> Tensor:
    """A [n, G] (MaskGRPO Eq. 4): (r - group mean) / (std + eps); exactly 0 in a group of equal rewards.

    ``std``: group, batch (over all rewards) or none (d1). ddof 1, eps 1e-5 for MaskGRPO and RebRL; 0, 1e-4
    for UDM-GRPO, which also clips to +-5. Raises ValueError for G < 2.
    """
    if rewards.shape[-1] < 2:
        raise ValueError(
            "--group-size must be at least 2: an advantage compares the completions of one prompt"
        )
    advantage = rewards - rewards.mean(-1, keepdim=True)
    if std == "group":
        advantage = advantage / (rewards.std(-1, correction=ddof, keepdim=True) + eps)
    elif std == "batch":
        advantage = advantage / (rewards.std(correction=ddof) + eps)
    equal = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    advantage = advantage.masked_fill(equal, 0.0)
    return advantage if clip is None else advantage.clamp(-clip, clip)


def k3(log_p: Tensor, log_ref: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = log_ref - log_p (form of MaskGRPO Eq. 10): >= 0, and its mean under p is KL(p
    || ref). As a loss its gradient is that of the estimator, not of the KL."""
    d = log_ref - log_p
    return d.exp() - d - 1


# ---- Processes


@dataclass
class World:
    """One of ``size`` torchrun processes; 1 without torchrun."""

    rank: int
    size: int
    device: torch.device

    def share(self, n: int) -> tuple[list[int], list[float]]:
        """The indices out of 0..n-1 that this rank works on, and their weights: equal counts on all ranks, so
        the last rank repeats index n-1 with weight 0."""
        per_rank = math.ceil(n / self.size)
        mine = range(self.rank * per_rank, (self.rank + 1) * per_rank)
        return [min(i, n - 1) for i in mine], [float(i < n) for i in mine]

    def gather(self, local: Tensor, n: int) -> Tensor:
        """Rows [n, ...] of all ranks in the order of ``share``."""
        if self.size == 1:
            return local
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts)[:n]

    def gather_objects(self, local) -> list:
        """One Python object of each rank."""
        found = [local] * self.size
        if self.size > 1:
            dist.all_gather_object(found, local)
        return found

    def sum(self, *values: float | Tensor) -> list[float]:
        """Each value summed over all ranks."""
        v = torch.stack(
            [torch.as_tensor(x, dtype=torch.float64, device=self.device).detach() for x in values]
        )
        if self.size > 1:
            dist.all_reduce(v)
        return v.tolist()

    def max(self, value: float | Tensor) -> float:
        v = torch.as_tensor(value, dtype=torch.float64, device=self.device).detach().clone()
        if self.size > 1:
            dist.all_reduce(v, op=dist.ReduceOp.MAX)
        return v.item()

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """--shard ddp, as cleanRL does it: the loss is divided by global counts, so gradients add up.
        Those of --shard fsdp come summed."""
        if self.size == 1 or hasattr(parameters[0], "full_tensor"):
            return
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat)
        for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(g.view_as(p))

    def any(self, value: bool) -> bool:
        """Whether it is true on any rank."""
        return self.max(float(value)) > 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def start_processes() -> World:
    """Join the other torchrun processes (nccl on GPUs, gloo else)."""
    cuda = torch.cuda.is_available()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        patience = timedelta(hours=2)  # a rank may judge a long batch of code while the others wait
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=patience)
    return World(rank, size, device)
