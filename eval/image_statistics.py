"""``edges`` and other plain statistics of a picture: held-out metrics that no reward model is behind.

A picture that goes black or flat while its trained score rises shows here first.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

EDGE = 0.1  # luminance step, of 0..1, that counts as an edge


def statistics(image: Tensor) -> dict[str, float]:
    """Statistics, each within 0..1, of a uint8 picture [3, H, W].

    edges: share of pixels where the luminance (Rec. 601) steps by more than EDGE to the right or downwards;
    luminance: its mean; contrast: twice its standard deviation; saturation: mean of (max - min) / max of the
    channels, as in HSV.
    """
    rgb = image.double() / 255
    luminance = torch.einsum("c,chw->hw", rgb.new_tensor([0.299, 0.587, 0.114]), rgb)
    across = torch.zeros_like(luminance)
    down = torch.zeros_like(luminance)
    across[:, :-1] = luminance.diff(dim=1)
    down[:-1] = luminance.diff(dim=0)
    high, low = rgb.amax(0), rgb.amin(0)
    return {
        "edges": (torch.hypot(across, down) > EDGE).double().mean().item(),
        "luminance": luminance.mean().item(),
        "contrast": 2 * luminance.std(correction=0).item(),
        "saturation": ((high - low) / high.clamp(min=1e-9)).mean().item(),
    }


def reward(device: str = "cpu") -> Callable[[list[dict], list], dict[str, np.ndarray]]:
    """``edges``, ``luminance``, ``contrast`` and ``saturation`` of uint8 images [3, H, W]."""
    names = statistics(torch.zeros(3, 1, 1)).keys()

    def score(rows: list[dict], images: list) -> dict[str, np.ndarray]:
        found = [statistics(image.to(device)) for image in images]
        return {name: np.array([one[name] for one in found], dtype=np.float64) for name in names}

    return score
