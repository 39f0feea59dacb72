"""What the image backbones share: an image tokenizer beside the network, left-padded text, loading."""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from models import weights
from models.llada import LlamaPolicy
from models.policy import Prompt


class ImagePolicy(LlamaPolicy):
    """Images of ``length`` codes, which the image tokenizer ``vq`` makes of pixels and turns back into them.

    vq: any object with ``decode(codes) -> uint8 [B, 3, H, W]`` and, where there is one, ``encode`` (its
    inverse) and ``codebook`` [K, d]. codebook: of the metric path, where it is not the vq's.

    Subclasses set the attributes below and give ``encode``, ``hidden``, ``settings`` and the methods that
    raise NotImplementedError.
    """

    VQ: type  # the image tokenizer of a released checkpoint: ``load(source, device)``
    pad_id: int

    def __init__(self, backbone, tokenizer, vq, codebook: Tensor | None = None) -> None:
        super().__init__(backbone, tokenizer)
        # not a submodule: the image tokenizer is neither trained, nor sharded, nor among the weights
        self.__dict__["vq"] = vq
        self.codebook = getattr(vq, "codebook", None) if codebook is None else codebook

    def head(self, h: Tensor) -> Tensor:
        return self.backbone.get_output_embeddings()(h)

    def left_padded(self, rows: list[list[int]], width: int) -> Prompt:
        ids = torch.full((len(rows), width), self.pad_id)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.tensor(row, dtype=torch.long)
            mask[i, width - len(row) :] = True
        return Prompt(ids, mask).to(self.backbone.device)

    def unconditional(self, prompt: Prompt) -> Prompt:
        """The empty text, of the same width."""
        return self.encode([""])[[0] * len(prompt)].to(prompt.ids.device)

    def decode(self, x_0: Tensor) -> Tensor:
        """codes [B, L] -> uint8 images [B, 3, H, W]."""
        return self._vq(x_0.device).decode(x_0)

    def respond(self, completions: list[Tensor] | Tensor) -> Tensor:
        """uint8 images [3, H, W] -> codes [B, L]."""
        device = self.backbone.device
        return self._vq(device).encode(torch.stack(list(completions)).to(device)).flatten(1)

    def _vq(self, device: torch.device):
        return self.vq.to(device) if isinstance(self.vq, nn.Module) else self.vq

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: str,
        length: int | None = None,
        max_prompt: int | None = None,
        vq: str | None = None,
    ) -> Self:
        """A directory that ``save`` wrote, or the model as released. length: codes of an image; max_prompt:
        tokens of a prompt; vq: directory or hub id of another image tokenizer than the checkpoint's."""
        parts, ours = cls.read(directory, dtype, device), directory / "policy.json"
        settings = weights.read_json(ours) if ours.exists() else cls.released_settings(directory, parts)
        settings.pop("kind", None)
        stored = settings.pop("vq")
        if "/" not in stored and not stored.startswith("tiny"):
            stored = directory / stored  # a folder of the checkpoint
        settings |= {name: value for name, value in cls.sizes(length, max_prompt).items() if value}
        return cls(vq=cls.load_vq(vq or stored, device), **parts, **settings)

    @staticmethod
    def read(directory: Path, dtype: torch.dtype, device: str) -> dict:
        """The constructor's keywords that are no settings: ``backbone``, ``tokenizer``, ``codebook``."""
        raise NotImplementedError

    @staticmethod
    def released_settings(directory: Path, parts: dict) -> dict:
        """``settings`` of a checkpoint without policy.json; ``parts`` is what ``read`` gave."""
        raise NotImplementedError

    @staticmethod
    def sizes(length: int | None, max_prompt: int | None) -> dict:
        """The constructor's keywords for ``load``'s; what is None stays as it is."""
        raise NotImplementedError

    @classmethod
    def load_vq(cls, source: str | Path, device: str):
        """The image tokenizer of a directory or hub id; ``tiny..``: one of models/tiny.py."""
        if str(source).startswith("tiny"):
            from models.tiny import load_vq

            return load_vq(source)
        return cls.VQ.load(source, device)
