"""The image tokenizer of Janus and FUDOKI: transformers' JanusVQVAE, quantised on the unit sphere."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import weights

PREFIX = "gen_vision_model."
AT_ONCE = 8  # images in one pass
# a part of a released tensor's name -> transformers'
RENAME = {
    "encoder.conv_blocks": "encoder.down",
    "decoder.conv_blocks": "decoder.up",
    ".res.": ".block.",
    ".mid.0.": ".mid.block_1.",
    ".mid.1.": ".mid.attn_1.",
    ".mid.2.": ".mid.block_2.",
}


class JanusVQ(nn.Module):
    """``state``: the released gen_vision_model tensors, without that prefix; the sizes are read off them."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        from transformers import JanusVQVAE, JanusVQVAEConfig

        base = state["encoder.conv_in.weight"].shape[0]
        levels = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.conv_blocks"))
        blocks = {name.split(".")[4] for name in state if name.startswith("encoder.conv_blocks.0.res.")}
        widths = [state[f"encoder.conv_blocks.{i}.res.0.conv1.weight"].shape[0] for i in range(levels)]
        codes, width = state["quantize.embedding.weight"].shape
        config = JanusVQVAEConfig(
            embed_dim=width,
            num_embeddings=codes,
            latent_channels=state["encoder.conv_out.weight"].shape[0],
            base_channels=base,
            channel_multiplier=[w // base for w in widths],
            num_res_blocks=len(blocks),
        )
        with torch.device("meta"):
            self.model = JanusVQVAE(config)
        # the public class also stores 65,536 zeros that nothing reads
        renamed = {rename(name): value for name, value in state.items() if name != "quantize.codebook_used"}
        self.model.load_state_dict(renamed, assign=True)
        self.names = [name for name in state if name != "quantize.codebook_used"]
        self.eval().requires_grad_(False)

    @property
    def codebook(self) -> Tensor:
        return self.model.quantize.embedding.weight.detach()

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, N] of square images -> uint8 [B, 3, H, W], truncated, as the public code saves them."""
        pixels = torch.cat([self.pixels(part) for part in codes.split(AT_ONCE)])
        return ((pixels + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """uint8 images [B, 3, H, W] -> codes [B, N]."""
        x = images.to(self.codebook.dtype) / 127.5 - 1
        return torch.cat([self.quantize(part) for part in x.split(AT_ONCE)])

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, N] -> [B, 3, H, W], about [-1, 1]."""
        side = round(codes.shape[1] ** 0.5)
        rows = F.normalize(self.codebook, dim=-1)[codes]
        z = rows.transpose(1, 2).unflatten(2, (side, side))
        return self.model.decoder(self.model.post_quant_conv(z))

    def quantize(self, x: Tensor) -> Tensor:
        """x [B, 3, H, W] in [-1, 1] -> the nearest code [B, N] on the unit sphere. transformers' ``encode``
        normalises neither side, which gives other codes."""
        z = F.normalize(self.model.quant_conv(self.model.encoder(x)).flatten(2), dim=1)  # [B, d, N]
        return torch.einsum("bdn,kd->bnk", z, F.normalize(self.codebook, dim=-1)).argmax(-1)

    def state(self) -> dict[str, Tensor]:
        """The tensors under their released names."""
        tensors = self.model.state_dict()
        return {PREFIX + name: tensors[rename(name)] for name in self.names}

    @classmethod
    def load(cls, source: str | Path, device: str = "cpu") -> "JanusVQ":
        """From the checkpoint of a Janus-like model, a directory or hub id, in float32."""
        directory = weights.find(source, "--vq")
        state = {
            name.removeprefix(PREFIX): value.float()
            for name, value in weights.tensors(directory, device)
            if name.startswith(PREFIX)
        }
        if not state:
            raise ValueError(f"--vq {source}: none of its tensors begins with {PREFIX}")
        return cls(state)


def rename(name: str) -> str:
    """A released name as transformers' JanusVQVAE has it."""
    for ours, theirs in RENAME.items():
        name = name.replace(ours, theirs)
    return name
