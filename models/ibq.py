"""IBQ, URSA's image tokenizer: convolutions around a codebook that is matched by dot product."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import weights

AT_ONCE = 8  # images in one pass


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class ResBlock(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = group_norm(channels), nn.Conv2d(channels, out, 3, padding=1)
        self.norm2, self.conv2 = group_norm(out), nn.Conv2d(out, out, 3, padding=1)
        if channels != out:
            self.conv_shortcut = nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x)


class Attention(nn.Module):
    """One head over all positions, with its residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.group_norm = group_norm(channels)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.group_norm(x).flatten(2).transpose(1, 2)  # [B, H W, C]
        h = F.scaled_dot_product_attention(self.to_q(h), self.to_k(h), self.to_v(h))
        return x + self.to_out[0](h).transpose(1, 2).view_as(x)


class Resample(nn.Module):
    """Half the size (padded right and below) or, ``up``, twice the size by nearest neighbour."""

    def __init__(self, channels: int, up: bool) -> None:
        super().__init__()
        self.up = up
        self.conv = nn.Conv2d(channels, channels, 3, stride=1 if up else 2, padding=1 if up else 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0) if self.up else F.pad(x, (0, 1, 0, 1)))


class Level(nn.Module):
    """``depth`` residual blocks, each followed by attention where ``attention``, then a change of size."""

    def __init__(self, channels: int, out: int, depth: int, attention: bool, resample: str | None) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(channels if i == 0 else out, out) for i in range(depth))
        self.attentions = nn.ModuleList(Attention(out) for _ in range(depth * attention))
        if resample:
            self.add_module(resample, nn.ModuleList([Resample(out, up=resample == "upsamplers")]))
        self.resample = resample

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.resnets):
            x = block(x)
            if self.attentions:
                x = self.attentions[i](x)
        return getattr(self, self.resample)[0](x) if self.resample else x


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(channels, channels) for _ in range(2))
        self.attentions = nn.ModuleList([Attention(channels)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Encoder(nn.Module):
    def __init__(self, colours: int, latent: int, widths: list[int], depth: int, attention: bool) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(colours, widths[0], 3, padding=1)
        ins, deepest = [widths[0], *widths], len(widths) - 1
        self.down_blocks = nn.ModuleList(
            Level(ins[i], w, depth, attention and i == deepest, "downsamplers" if i < deepest else None)
            for i, w in enumerate(widths)
        )
        self.mid_block = Middle(widths[-1])
        self.conv_norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], latent, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        return self.conv_out(F.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nn.Module):
    def __init__(self, latent: int, colours: int, widths: list[int], depth: int, attention: bool) -> None:
        super().__init__()
        widths = widths[::-1]
        self.conv_in = nn.Conv2d(latent, widths[0], 3, padding=1)
        self.mid_block = Middle(widths[0])
        ins, last = [widths[0], *widths], len(widths) - 1
        self.up_blocks = nn.ModuleList(
            Level(ins[i], w, depth + 1, attention and i == 0, "upsamplers" if i < last else None)
            for i, w in enumerate(widths)
        )
        self.conv_norm_out = group_norm(widths[-1])
        self.conv_out = nn.Conv2d(widths[-1], colours, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(z))
        for level in self.up_blocks:
            x = level(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class IBQ(nn.Module):
    """``config``: the released config.json (AutoencoderVQ). ``stride``: the side of a code in pixels."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        quantizer = config.get("_quantizer_name", "VQuantizer")
        if quantizer != "VQuantizer":
            raise ValueError(f"IBQ: _quantizer_name is {quantizer!r}, only 'VQuantizer' is supported")
        self.config = config
        colours, out, latent = config["in_channels"], config["out_channels"], config["latent_channels"]
        widths, depth = list(config["block_out_channels"]), config["layers_per_block"]
        self.encoder = Encoder(colours, latent, widths, depth, config.get("attn_down_block", False))
        self.decoder = Decoder(latent, out, widths, depth, config.get("attn_up_block", False))
        self.quant_conv = nn.Conv2d(latent, config["vq_embed_dim"], 1)
        self.post_quant_conv = nn.Conv2d(config["vq_embed_dim"], latent, 1)
        self.quantizer = nn.Module()
        self.quantizer.embedding = nn.Embedding(config["num_vq_embeddings"], config["vq_embed_dim"])
        self.stride = 2 ** (len(widths) - 1)

    @property
    def codebook(self) -> Tensor:
        return self.quantizer.embedding.weight.detach()

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """uint8 images [B, 3, H, W] -> codes [B, H / stride, W / stride]."""
        x = images.to(self.codebook.dtype) / 127.5 - 1
        return torch.cat([self.quantize(self.latent(part)) for part in x.split(AT_ONCE)])

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, h, w] -> uint8 images [B, 3, H, W], truncated, as the public code saves them."""
        pixels = torch.cat([self.pixels(part) for part in codes.split(AT_ONCE)])
        return (pixels * 127.5 + 127.5).clamp(0, 255).to(torch.uint8)

    def latent(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> [B, d, h, w]."""
        return self.quant_conv(self.encoder(x))

    def quantize(self, z: Tensor) -> Tensor:
        """The code of largest dot product, neither side normalised: [B, d, h, w] -> [B, h, w]."""
        return torch.einsum("bdhw,kd->bhwk", z, self.codebook).argmax(-1)

    def pixels(self, codes: Tensor) -> Tensor:
        """codes [B, h, w] -> [B, 3, H, W], about [-1, 1]."""
        return self.decoder(self.post_quant_conv(self.codebook[codes].permute(0, 3, 1, 2)))

    def save(self, path: str | Path) -> None:
        """config.json and safetensors, as released."""
        from safetensors.torch import save_file

        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config, indent=1))
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def load(cls, source: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> "IBQ":
        """From a directory or hub id in the released layout, frozen."""
        directory = weights.find(source, "--vq")
        with torch.device("meta"):
            vq = cls(weights.read_json(directory / "config.json"))
        weights.fill(vq, directory, dtype, device)
        return vq.eval().requires_grad_(False)
