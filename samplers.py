"""Samplers of discrete diffusion models: prompt in, response tokens out.

Each step is a pure function of (logits, noise). All noise of a row comes from the row's own generator, one
uniform per token and draw, so that a sample does not depend on the batch or on the number of processes. Every
sampler makes a fixed number of policy calls whatever the data, so that the ranks of a sharded model stay
together.

The policy is any object with ``policy(prompt, x_t, where=, null=, cfg=)``, ``length``, ``mask_id``,
``end_ids`` (see models/policy.py).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 2**24  # probabilities alive at once


@dataclass
class Sample:
    """x_0 [B, L] response ids; revealed [B, L] the step 0..T-1 at which each token was revealed; on request
    the trajectory [(x_t [B, L], t)] exactly as it was fed to the model, and for euler the x_1 [B, L] drawn
    from each."""

    x_0: Tensor
    revealed: Tensor
    trajectory: list[tuple[Tensor, float]] = field(default_factory=list)
    x_1: list[Tensor] = field(default_factory=list)


def schedule(name: str, r: Tensor | float) -> Tensor:
    """Share of tokens still masked, 1 - alpha, at progress r in [0, 1]: cosine, linear, pow2 or sigmoid. A
    number is taken in float64, a tensor in its own type."""
    r = r if isinstance(r, Tensor) else torch.tensor(r, dtype=torch.float64)
    if name == "cosine":
        return torch.cos(r * math.pi / 2)
    if name == "linear":
        return 1 - r
    if name == "pow2":
        return 1 - r**2
    if name == "sigmoid":
        low, high = torch.sigmoid(torch.tensor([-3.0, 3.0], dtype=r.dtype))
        return (high - torch.sigmoid(6 * r - 3)) / (high - low)
    raise ValueError(f"--schedule {name}: accepted are cosine, linear, pow2, sigmoid")


def uniform(generators: list[torch.Generator], *shape: int, device: torch.device | str = "cpu") -> Tensor:
    """[B, *shape] float64 in [0, 1), row b from generators[b]."""
    return torch.stack([torch.rand(shape, generator=g, dtype=torch.float64) for g in generators]).to(device)


def draw(logits: Tensor, u: Tensor, temperature: float = 1.0) -> Tensor:
    """Tokens [N] from softmax(logits [N, K] / temperature) by inverse CDF at u [N]; the argmax at temperature
    0.

    The cumulative sum is taken in float64, a few rows at a time: float32 would lose the tail of a large
    vocabulary.
    """
    if temperature == 0:
        return logits.argmax(-1)
    rows = max(1, CHUNK // logits.shape[-1])
    tokens = []
    for z, v in zip(logits.split(rows), u.split(rows), strict=True):
        cdf = (z.double() / temperature).softmax(-1).cumsum(-1)
        tokens.append(torch.searchsorted(cdf, (v * cdf[:, -1]).unsqueeze(-1), right=True).squeeze(-1))
    return torch.cat(tokens).clamp(max=logits.shape[-1] - 1)


def confidence_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Raw softmax probability [N] of the drawn tokens: untempered, mask id included."""
    return torch.exp(logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1))


def without_mask(logits: Tensor, mask_id: int) -> Tensor:
    """The logits from which tokens are drawn: [M] is never an answer (for images it has no row in the
    head)."""
    if mask_id >= logits.shape[-1]:
        return logits
    return logits.index_fill(-1, torch.tensor([mask_id], device=logits.device), -math.inf)


def most_confident(confidence: Tensor, where: Tensor, k: int) -> Tensor:
    """Bool [B, L]: in each row the k positions of ``where`` with the highest confidence, all if there are
    fewer."""
    order = confidence.masked_fill(~where, -math.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(where).scatter_(-1, order[:, :k], True) & where


def transfer_schedule(count: int, steps: int) -> list[int]:
    """How many of ``count`` masked tokens each of ``steps`` steps reveals: equal shares, the first ones take
    the rest."""
    return [count // steps + (s < count % steps) for s in range(steps)]


@torch.no_grad()
def semi_autoregressive(
    policy,
    prompt,
    generators: list[torch.Generator],
    *,
    steps: int,
    block: int,
    temperature: float = 0.0,
    null=None,
    cfg: float = 0.0,
    cfg_until: float = 1.0,
    eos_rule: str = "none",
    remasking: str = "low_confidence",
    keep_trajectory: bool = False,
) -> Sample:
    """LLaDA's sampler (MaskGRPO Alg. 3): blocks from left to right, within a block the most confident tokens
    first.

    Tokens are drawn at ``temperature`` (0: argmax). ``eos_rule="last"`` reveals end ids only when nothing
    else in the block is left: their confidence is lowered after the draw. ``remasking="random"`` reveals at
    random, independently of the logits. Raises ValueError unless block divides L and the number of blocks
    divides steps.
    """
    L, mask_id, device = policy.length, policy.mask_id, prompt.ids.device
    check_blocks(L, block, steps)
    per_block = steps // (L // block)
    noise = uniform(generators, steps, 2, L, device=device)
    end_ids = torch.tensor(policy.end_ids, device=device, dtype=torch.int64)
    position = torch.arange(L, device=device)
    x_t = torch.full((len(generators), L), mask_id, device=device)
    out = Sample(x_t, torch.zeros_like(x_t))
    for step in range(steps):
        k = transfer_schedule(block, per_block)[step % per_block]
        where = (x_t == mask_id) & (position // block == step // per_block)
        if keep_trajectory:
            out.trajectory.append((x_t, 1 - step / steps))
        w = cfg if step / steps < cfg_until else 0.0
        logits = policy(prompt, x_t, where=where, null=null, cfg=w)  # [N, K]
        u, u_order = noise[:, step].unbind(1)
        tokens = draw(without_mask(logits, mask_id), u[where], temperature)
        confidence = u_order.clone()
        if remasking == "low_confidence":
            confidence[where] = confidence_of(logits, tokens).double()
        del logits  # the next step's shall not stand beside them
        x_0 = x_t.masked_scatter(where, tokens)
        if eos_rule == "last":
            confidence.masked_fill_(torch.isin(x_0, end_ids), -1.0)
        reveal = most_confident(confidence, where, k)
        x_t = torch.where(reveal, x_0, x_t)
        out.revealed[reveal] = step
    out.x_0 = x_t
    return out


def check_blocks(length: int, block: int, steps: int) -> None:
    """Raises ValueError unless block divides length and the number of blocks divides steps."""
    if block < 1 or length % block:
        raise ValueError(f"--block {block} must divide --length {length}")
    if steps < length // block or steps % (length // block):
        raise ValueError(
            f"--steps {steps} must be a multiple of the {length // block} blocks (length / block)"
        )
    if steps > length:
        raise ValueError(
            f"--steps {steps} is more than the {length} tokens of --length: each step reveals at least one"
        )


@torch.no_grad()
def maskgit(
    policy,
    prompt,
    generators: list[torch.Generator],
    *,
    steps: int,
    temperature: float = 1.0,
    null=None,
    cfg: float = 0.0,
    cfg_until: float = 1.0,
    schedule_name: str = "cosine",
    canvas: Tensor | None = None,
    keep_trajectory: bool = False,
) -> Sample:
    """MaskGIT: draw every masked token, keep the most confident, mask the rest again by the schedule.

    ``temperature`` scales Gumbel noise on the log confidence and is annealed cumulatively, as in the public
    code; 0 also takes the argmax of each token. ``canvas`` [B, L] is a partly known start.
    """
    L, mask_id, device = policy.length, policy.mask_id, prompt.ids.device
    noise = uniform(generators, steps, 2, L, device=device)
    x_t = torch.full((len(generators), L), mask_id, device=device) if canvas is None else canvas
    out = Sample(x_t, torch.zeros_like(x_t))
    anneal = float(temperature)
    for step in range(steps):
        where = x_t == mask_id
        if keep_trajectory:
            out.trajectory.append((x_t, schedule(schedule_name, step / steps).item()))
        w = cfg if step / steps < cfg_until else 0.0
        logits = policy(prompt, x_t, where=where, null=null, cfg=w)
        u, u_gumbel = noise[:, step].unbind(1)
        tokens = draw(without_mask(logits, mask_id), u[where], float(temperature > 0))
        x_0 = x_t.masked_scatter(where, tokens)
        out.revealed[where] = step
        anneal *= 1 - (step + 1) / steps
        p = torch.full(x_t.shape, torch.finfo(torch.float32).max, device=device)
        p[where] = confidence_of(logits, tokens)
        del logits
        gumbel = -torch.log(-torch.log(u_gumbel.clamp(min=1e-20)))
        again = maskgit_remask(
            p, gumbel, anneal, maskgit_length(L, where.sum(-1), (step + 1) / steps, schedule_name)
        )
        x_t = torch.where(again & where, mask_id, x_0)
    out.x_0 = x_0
    return out


def maskgit_length(L: int, unknown: Tensor, r: float, schedule_name: str = "cosine") -> Tensor:
    """How many tokens [B] are masked again at progress r: the schedule's share of L, within 1 and unknown -
    1. In float32, as the public code: where cos is 1/2, its floor is one lower than the exact one."""
    share = schedule(schedule_name, torch.tensor(r, dtype=torch.float32))
    return torch.clamp((L * share).floor().long().to(unknown.device), max=unknown - 1).clamp(min=1)


def maskgit_remask(p: Tensor, gumbel: Tensor, temperature: float, length: Tensor) -> Tensor:
    """Bool [B, L]: tokens whose noisy log confidence lies strictly below that of ascending rank ``length``
    [B]."""
    confidence = p.clamp(min=1e-20).log() + temperature * gumbel.to(p.dtype)
    return confidence < confidence.sort(-1).values.gather(-1, length.unsqueeze(-1))


@torch.no_grad()
def emerge(
    policy,
    prompt,
    generators: list[torch.Generator],
    *,
    steps: int,
    temperature: float = 1.0,
    null=None,
    cfg: float = 0.0,
    cfg_until: float = 1.0,
    schedule_name: str = "cosine",
    canvas: Tensor | None = None,
    keep_trajectory: bool = False,
) -> Sample:
    """The emerge sampler (MaskGRPO Alg. 4), which is the reverse kernel itself (Eq. 3): from t to s a masked
    token appears with probability (alpha_s - alpha_t) / (1 - alpha_t), drawn from the guided prediction, else
    it stays masked; shown tokens stay. No count is fixed, and tokens that do not appear cost no head.
    """
    L, mask_id, device = policy.length, policy.mask_id, prompt.ids.device
    noise = uniform(generators, steps, L, device=device)
    x_t = torch.full((len(generators), L), mask_id, device=device) if canvas is None else canvas
    out = Sample(x_t, torch.zeros_like(x_t))
    for step in range(steps):
        appear = emerge_probability(step, steps, schedule_name)
        u = noise[:, step]
        where = (x_t == mask_id) & (u < appear)
        if keep_trajectory:
            out.trajectory.append((x_t, schedule(schedule_name, step / steps).item()))
        w = cfg if step / steps < cfg_until else 0.0
        logits = policy(prompt, x_t, where=where, null=null, cfg=w)
        # u is uniform on [0, appear) here, so u / appear serves as the noise of the draw
        tokens = draw(without_mask(logits, mask_id), u[where] / appear, temperature)
        del logits
        x_t = x_t.masked_scatter(where, tokens)
        out.revealed[where] = step
    out.x_0 = x_t
    return out


def emerge_probability(step: int, steps: int, schedule_name: str = "cosine") -> float:
    """(alpha_s - alpha_t) / (1 - alpha_t) of Eq. 3; 1 at the last step."""
    if step + 1 == steps:
        return 1.0
    k_t, k_s = (
        schedule(schedule_name, step / steps).item(),
        schedule(schedule_name, (step + 1) / steps).item(),
    )
    return (k_t - k_s) / k_t


def euler_times(steps: int, shift: float = 1.0) -> list[float]:
    """The steps + 1 times from 0 to 1: t = 1 - shift sigma / (1 + (shift - 1) sigma), sigma = 1 - k / steps,
    written as one fraction, so that without a shift t is k / steps to the last digit."""
    return [k / (k + shift * (steps - k)) for k in range(steps + 1)]


@torch.no_grad()
def euler(
    policy,
    prompt,
    generators: list[torch.Generator],
    *,
    steps: int,
    path,
    temperature: float = 1.0,
    null=None,
    cfg: float = 0.0,
    cfg_until: float = 1.0,
    shift: float = 1.0,
    rate: str = "integrated",
    keep_trajectory: bool = False,
) -> Sample:
    """Uniform diffusion: from random tokens, each step draws x_1 from the prediction, then tokens jump along
    ``path`` (common.MixturePath, common.MetricPath).

    The last step returns its draw: at t = 1 every token has jumped. ``rate="instantaneous"`` holds the rate
    at the start of the step, as the public code does; on the metric path it is 0 at t = 0, which wastes a
    step. The model is guided while t < ``cfg_until``. One list of times serves the jumps and the trajectory.
    Raises ValueError for another rate, or steps or shift that are not positive.
    """
    if rate not in ("integrated", "instantaneous"):
        raise ValueError(f"--rate {rate}: accepted are integrated, instantaneous")
    if steps < 1 or shift <= 0:
        raise ValueError(f"--steps {steps} --shift {shift}: both must be positive")
    L, K, device = policy.length, policy.vocab_size, prompt.ids.device
    times = euler_times(steps, shift)
    x_t = (uniform(generators, L, device=device) * K).long()
    noise = uniform(generators, steps, 3, L, device=device).transpose(0, 1)  # [steps, B, 3, L]
    out = Sample(x_t, torch.zeros_like(x_t))
    for step, (t, s) in enumerate(zip(times, times[1:], strict=False)):
        logits = policy(prompt, x_t, null=null, cfg=cfg if t < cfg_until else 0.0)  # [B L, K]
        u, u_jump = noise[step][:, 0], noise[step][:, 1:].transpose(0, 1)
        x_1 = draw(logits, u.flatten(), temperature).view(x_t.shape)
        del logits
        if keep_trajectory:
            out.trajectory.append((x_t, t))
            out.x_1.append(x_1)
        x_s = path.jump(x_t, x_1, t, s, u_jump, rate == "integrated") if step + 1 < steps else x_1
        out.revealed[x_s != x_t] = step
        x_t = x_s
    out.x_0 = x_t
    return out


OWN_SETTINGS = {
    semi_autoregressive: ("block", "eos_rule"),
    maskgit: ("schedule_name",),
    emerge: ("schedule_name",),
    euler: ("path", "shift", "rate"),
}
SAMPLERS = {f.__name__: f for f in OWN_SETTINGS}


def sample(
    policy, prompt, generators: list[torch.Generator], settings: dict, keep_trajectory: bool = False
) -> Sample:
    """Sample one response to each prompt as ``settings`` say: sampler, steps, temperature, cfg, cfg_until and
    what the sampler has of its own. The one entry point of rollout, evaluation and demonstration."""
    sampler = SAMPLERS[settings["sampler"]]
    own = {k: settings[k] for k in ("steps", "temperature", "cfg", "cfg_until", *OWN_SETTINGS[sampler])}
    null = policy.unconditional(prompt) if own["cfg"] else None
    return sampler(policy, prompt, generators, null=null, keep_trajectory=keep_trajectory, **own)


def settings_of(args, length: int, path=None, shift: float = 1.0) -> dict:
    """The settings of ``sample`` from the flags of a script, checked against the response length L; ``path``
    and ``shift`` of uniform diffusion, which come with the model.

    Raises ValueError for what does not fit.
    """
    shared = {name: getattr(args, name) for name in ("sampler", "steps", "temperature", "cfg", "cfg_until")}
    if args.sampler == "euler":
        if not shift > 0:
            raise ValueError(f"--shift {shift}: must be a number above 0")
        return shared | {"path": path, "shift": shift, "rate": args.rate}
    if args.sampler == "semi_autoregressive":
        check_blocks(length, args.block, args.steps)
        check_blocks(length, args.block, args.eval_steps or args.steps)
    return shared | {"block": args.block, "schedule_name": args.schedule, "eos_rule": args.eos_rule}
