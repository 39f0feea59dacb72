"""The one interface that the algorithms see: a policy over a response.

A backbone says how ids become hidden states; where, chunks, log-softmax and guidance are done here, once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 2048  # rows that go through the head at once


@dataclass
class Prompt:
    """A batch of prompts. ids [B, P] int64, mask [B, P] bool: False on padding."""

    ids: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index) -> "Prompt":
        return Prompt(self.ids[index], self.mask[index])

    def repeat_interleave(self, n: int) -> "Prompt":
        return Prompt(self.ids.repeat_interleave(n, 0), self.mask.repeat_interleave(n, 0))

    def to(self, device: torch.device | str) -> "Prompt":
        return Prompt(self.ids.to(device), self.mask.to(device))

    def replaced(self, where: Tensor, other: "Prompt") -> "Prompt":
        """Rows of ``other``, of the same shape, where ``where`` [B] is true."""
        pick = where[:, None]
        return Prompt(torch.where(pick, other.ids, self.ids), torch.where(pick, other.mask, self.mask))

    def masked(self, p: float, u: Tensor, mask_id: int) -> "Prompt":
        """diffu-GRPO's prompt masking: a prompt token, never padding, is masked where u [B, P] < p."""
        return Prompt(torch.where((u < p) & self.mask, mask_id, self.ids), self.mask)


class Policy(nn.Module):
    """p(x_0 | x_t, prompt) over responses of ``length`` tokens out of ``vocab_size``.

    Subclasses set the attributes below and give the methods that raise NotImplementedError.
    """

    length: int  # L
    vocab_size: int  # K
    mask_id: int | None = None  # [M] in response ids; None for uniform diffusion
    prompt_mask_id: int | None = None  # [M] in prompt ids, for --remask full
    end_ids: tuple[int, ...] = ()
    codebook: Tensor | None = None  # [K, d], for the metric path

    def hidden(self, prompt: Prompt, x_t: Tensor) -> Tensor:
        """[B, L, D]: row l predicts response token l."""
        raise NotImplementedError

    def head(self, h: Tensor) -> Tensor:
        """[N, D] -> [N, K]."""
        raise NotImplementedError

    def encode(self, texts: list[str]) -> Prompt:
        raise NotImplementedError

    def unconditional(self, prompt: Prompt) -> Prompt:
        raise NotImplementedError

    def decode(self, x_0: Tensor) -> list[str] | Tensor:
        raise NotImplementedError

    def respond(self, completions: list) -> Tensor:
        """The inverse of decode: texts or uint8 images [3, H, W] -> x_0 [B, L]."""
        raise NotImplementedError

    def save(self, path, state: dict[str, Tensor] | None = None) -> None:
        """Write the model in the layout that ``models.load`` reads; ``state`` is the state dict to write, of
        ``backbone`` where there is one, None for the model's own."""
        raise NotImplementedError

    def forward(
        self,
        prompt: Prompt,
        x_t: Tensor,
        where: Tensor | None = None,
        target: Tensor | None = None,
        null: Prompt | None = None,
        cfg: float = 0.0,
    ) -> Tensor:
        """Logits [N, K] float32 at the N positions of ``where`` [B, L] (None: all), or with ``target`` x_0
        [B, L] their log p(x_0 | x_t) [N] float32.

        With cfg w != 0 both are of the guided distribution, logits (1 + w) cond - w uncond, whose
        unconditional rows are ``null`` with the same x_t; gradients flow through both. The head is called
        even for N = 0, so that every rank of a sharded model makes the same calls.
        """
        guided = cfg != 0.0
        if guided:
            if null is None:
                raise ValueError("cfg needs null, the unconditional prompt (policy.unconditional)")
            both = Prompt(torch.cat([prompt.ids, null.ids]), torch.cat([prompt.mask, null.mask]))
            h, h_null = self.hidden(both, torch.cat([x_t, x_t])).chunk(2)
        else:
            h = h_null = self.hidden(prompt, x_t)
        if where is None:
            where = torch.ones_like(x_t, dtype=torch.bool)
        h, h_null = h[where], h_null[where]  # [N, D]

        def logits(rows: Tensor, rows_null: Tensor) -> Tensor:
            z = self.head(rows).float()
            return (1 + cfg) * z - cfg * self.head(rows_null).float() if guided else z

        def log_prob(rows: Tensor, rows_null: Tensor, x_0: Tensor) -> Tensor:
            return -F.cross_entropy(logits(rows, rows_null), x_0, reduction="none")

        if target is None:
            out = h.new_empty(len(h), self.vocab_size, dtype=torch.float32)  # the one buffer of its size
            for rows in [slice(i, i + CHUNK) for i in range(0, len(h) or 1, CHUNK)]:
                out[rows] = logits(h[rows], h_null[rows])
            return out
        parts = zip(h.split(CHUNK), h_null.split(CHUNK), target[where].split(CHUNK), strict=True)
        return torch.cat([checkpoint(log_prob, *part, use_reentrant=False) for part in parts])
