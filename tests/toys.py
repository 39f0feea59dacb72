"""A policy small enough to enumerate, the recorded LLaDA, and a sampler's recorded run."""

import itertools
import json
import math

import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file
from torch import nn

import models
from models.policy import Policy, Prompt


class Pairwise(Policy):
    """Logits of token k: the sum over positions l of table[l, k, x_t^l], and of a row for each prompt word.

    K tokens, of which 0 may end a text; K itself is [M], which has no row. Texts are numbers between blanks.
    """

    def __init__(
        self, K: int = 3, L: int = 3, seed: int = 0, end_ids: tuple[int, ...] = (), scale: float = 1.0
    ):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(L, L, K + 1, K, generator=g) * scale)
        self.words = nn.Parameter(torch.randn(5, K, generator=g) * scale)
        self.length, self.vocab_size, self.mask_id, self.end_ids = L, K, K, end_ids
        self.prompt_mask_id = 0

    def hidden(self, prompt, x_t):
        position = torch.arange(self.length)
        pairs = self.table[position[:, None], position, x_t[:, :, None]]  # [B, l, k, K]
        words = (self.words[prompt.ids] * prompt.mask[..., None]).sum(1)
        return pairs.sum(1) + words[:, None]

    def head(self, h):
        return h

    def encode(self, texts):
        rows = [[int(word) for word in text.split()] for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([[1] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        return Prompt(ids, mask)

    def unconditional(self, prompt):
        return Prompt(torch.where(prompt.mask, self.prompt_mask_id, prompt.ids), prompt.mask)

    def decode(self, x_0):
        return [" ".join(map(str, row)) for row in x_0.tolist()]


def all_masks(L: int) -> torch.Tensor:
    """Every mask of L tokens but the empty one: bool [2^L - 1, L]."""
    return torch.tensor(list(itertools.product((False, True), repeat=L))[1:])


def any_order_bound(policy, prompt, x_0) -> float:
    """The ELBO of x_0 [1, L] with neither t nor mask rate in it: the mean over all orders sigma of
    sum_l log p(x^sigma(l) | x^sigma(<l)), which integrating t out of MaskGRPO Eq. 2 gives."""
    L, total = policy.length, 0.0
    for order in itertools.permutations(range(L)):
        x_t = torch.full((1, L), policy.mask_id)
        for k in order:
            total += policy(prompt, x_t).detach().double().log_softmax(-1)[k, x_0[0, k]].item()
            x_t[0, k] = x_0[0, k]
    return total / math.factorial(L)


def golden_llada(path, length: int):
    """LLaDA with the recorded weights (golden llada_tiny); skips where ../shared is absent."""
    config = json.loads(shared("golden/llada_tiny/config.json").read_text())
    weights = load_file(shared("golden/llada_tiny/model.safetensors"))
    return models.load(str(released_standins.llada(path, config=config, weights=weights)), length=length)


def whole(ids: torch.Tensor) -> Prompt:
    """A prompt without padding."""
    return Prompt(ids, torch.ones_like(ids, dtype=torch.bool))


class Recorded:
    """Answers with recorded logits [steps, B, L, K], one step a call, whatever it is shown."""

    def __init__(self, logits: torch.Tensor):
        self.length, self.vocab_size = logits.shape[2:]
        self.logits = iter(logits.flatten(1, 2))

    def __call__(self, prompt, x_t, null=None, cfg=0.0):
        return next(self.logits)


def recorded_noise(x_t: torch.Tensor, K: int, *u: torch.Tensor):
    """``samplers.uniform`` of a recorded run of euler: it begins with x_t [B, L]; u: the uniforms
    [steps, B, L] of the draw, of whether to jump, and of where to (-1 where there was none)."""

    def uniform(generators, *shape, device="cpu"):
        if shape == x_t.shape[1:]:
            return (x_t.double() + 0.5) / K
        return torch.stack(u, 2).transpose(0, 1).clamp(min=0)

    return uniform
