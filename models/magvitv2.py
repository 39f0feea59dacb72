"""MAGVITv2 as MMaDA uses it: a convolutional network and a lookup-free quantiser (arXiv:2310.05737).

The code of a latent of d channels is its signs, read as a binary number, channel 0 first.
"""

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import weights

RELEASED = {
    "encoder": {"ch": 128, "ch_mult": (1, 2, 2, 4, 4), "num_res_blocks": (4, 3, 4, 3, 4), "z_channels": 13},
    "decoder": {"ch": 128, "ch_mult": (1, 1, 2, 2, 4), "num_res_blocks": (4, 4, 3, 4, 3), "z_channels": 13},
}
BATCH = 8  # images at once: one activation of a 512-pixel image is 134 MB at full resolution
DERIVED = ("quantize.embedding", "quantize.power_vals")  # stored, but they follow from d


def conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=int(stride == 1))


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(inputs), conv3(inputs, outputs)
        self.norm2, self.conv2 = norm(outputs), conv3(outputs, outputs)
        self.nin_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """One head over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).transpose(1, 2) for f in (self.q, self.k, self.v))  # [B, HW, C]
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view_as(x)
        return x + self.proj_out(h)


class Down(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv3(channels, channels, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv3(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def level(inputs: int, outputs: int, blocks: int, resample: str | None) -> nn.ModuleDict:
    """``blocks`` residual blocks and, named as released, a change of resolution."""
    parts = [Residual(inputs if i == 0 else outputs, outputs) for i in range(blocks)]
    change = {resample: Down(outputs) if resample == "downsample" else Up(outputs)} if resample else {}
    return nn.ModuleDict({"block": nn.Sequential(*parts), **change})


def middle(channels: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "block_1": Residual(channels, channels),
            "attn_1": Attention(channels),
            "block_2": Residual(channels, channels),
        }
    )


def through(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    for part in parts.values():
        x = part(x)
    return x


class Encoder(nn.Module):
    def __init__(self, ch: int, ch_mult: tuple, num_res_blocks: tuple, z_channels: int) -> None:
        super().__init__()
        widths = [ch, *(ch * m for m in ch_mult)]
        last = len(ch_mult) - 1
        self.conv_in = conv3(3, ch)
        self.down = nn.ModuleList(
            level(widths[i], widths[i + 1], n, "downsample" if i < last else None)
            for i, n in enumerate(num_res_blocks)
        )
        self.mid = middle(widths[-1])
        self.norm_out, self.conv_out = norm(widths[-1]), conv3(widths[-1], z_channels)
        self.quant_conv = nn.Conv2d(z_channels, z_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for parts in self.down:
            x = through(parts, x)
        x = through(self.mid, x)
        return self.quant_conv(self.conv_out(F.silu(self.norm_out(x))))


class Decoder(nn.Module):
    def __init__(self, ch: int, ch_mult: tuple, num_res_blocks: tuple, z_channels: int) -> None:
        super().__init__()
        widths = [*(ch * m for m in ch_mult), ch * ch_mult[-1]]  # level i turns widths[i + 1] into widths[i]
        self.post_quant_conv = nn.Conv2d(z_channels, z_channels, 1)
        self.conv_in = conv3(z_channels, widths[-1])
        self.mid = middle(widths[-1])
        self.up = nn.ModuleList(
            level(widths[i + 1], widths[i], n, "upsample" if i > 0 else None)
            for i, n in enumerate(num_res_blocks)
        )
        self.norm_out, self.conv_out = norm(widths[0]), conv3(widths[0], 3)

    def forward(self, z: Tensor) -> Tensor:
        x = through(self.mid, self.conv_in(self.post_quant_conv(z)))
        for parts in reversed(self.up):
            x = through(parts, x)
        return self.conv_out(F.silu(self.norm_out(x)))


class MAGVITv2(nn.Module):
    """Codes in 0..2^d - 1, one per 16 x 16 pixels, row by row."""

    source: str = ""  # the directory or hub id it came from

    def __init__(self, encoder: dict, decoder: dict) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(**encoder), Decoder(**decoder)
        self.bits = encoder["z_channels"]

    @property
    def codebook(self) -> Tensor:
        """[2^d, d] float32, the +-1 latent of every code."""
        return self.latent(torch.arange(2**self.bits))

    def latent(self, codes: Tensor) -> Tensor:
        """codes [...] -> their +-1 latents [..., d] float32."""
        place = torch.arange(self.bits - 1, -1, -1, device=codes.device)
        return (codes[..., None] >> place & 1) * 2.0 - 1.0

    def code(self, z: Tensor) -> Tensor:
        """Latents [..., d] -> codes [...] int64; zero counts as -1."""
        place = torch.arange(self.bits - 1, -1, -1, device=z.device)
        return ((z > 0).long() << place).sum(-1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """uint8 images [B, 3, H, W], sides multiples of 16 -> codes [B, HW/256] int64."""
        z = [self.encoder(x.to(self.encoder.conv_in.weight) / 127.5 - 1) for x in images.split(BATCH)]
        return self.code(torch.cat(z).flatten(2).transpose(1, 2))

    def pixels(self, codes: Tensor, shape: tuple[int, int] | None = None) -> Tensor:
        """codes [B, N] -> float pixels [B, 3, 16 h, 16 w], about -1..1; shape (h, w), square by default."""
        side = math.isqrt(codes.shape[1])
        h, w = shape or (side, side)
        if h * w != codes.shape[1]:
            raise ValueError(f"{codes.shape[1]} codes do not make a picture of {h} x {w}")
        z = self.latent(codes).to(self.decoder.conv_in.weight)
        return self.decoder(z.transpose(1, 2).unflatten(2, (h, w)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """codes [B, N] of square pictures -> uint8 images [B, 3, H, W]."""
        x = torch.cat([self.pixels(part) for part in codes.split(BATCH)])
        return (((x.float() + 1) / 2).clamp(0, 1) * 255).to(torch.uint8)

    @classmethod
    def load(cls, source: str, device: str = "cpu") -> "MAGVITv2":
        """A directory or hub id (showlab/magvitv2), in float32; the released config.json names no sizes."""
        directory = weights.find(source, "--vq")
        config = directory / "config.json"
        sizes = weights.read_json(config) if config.exists() else {}
        if "encoder" not in sizes:
            sizes = RELEASED
        fields = RELEASED["encoder"]
        with torch.device("meta"):
            model = cls(*({name: sizes[part][name] for name in fields} for part in ("encoder", "decoder")))
        weights.fill(model, directory, torch.float32, device, lambda name: None if name in DERIVED else name)
        model.source = str(directory.resolve() if directory == Path(source) else source)
        return model.eval().requires_grad_(False)
