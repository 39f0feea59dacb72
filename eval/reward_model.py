"""What the picture rewards share: weights that fit or name what does not, pictures scored in batches."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


def pil_images(images: list[Tensor]) -> list:
    """uint8 pictures [3, H, W] as PIL images in RGB."""
    from PIL import Image

    return [Image.fromarray(image.permute(1, 2, 0).cpu().numpy()) for image in images]


def batched(
    score: Callable[[list[str], list], Tensor], size: int
) -> Callable[[list[dict], list], np.ndarray]:
    """``score(prompts, PIL images) -> [b]`` made to score rows and uint8 images, ``size`` at a time."""

    @torch.no_grad()
    def scores(rows: list[dict], images: list[Tensor]) -> np.ndarray:
        if len(rows) != len(images):
            raise ValueError(f"{len(rows)} prompts for {len(images)} images")
        prompts = [row["prompt"] for row in rows]
        parts = [
            score(prompts[i : i + size], pil_images(images[i : i + size])).double().cpu().numpy()
            for i in range(0, len(images), size)
        ]
        return np.concatenate([np.zeros(0), *parts])

    return scores


def fetch(name: str, file: str) -> Path:
    """``file`` of a local directory or of a hub id; ValueError, one sentence, where it cannot be had."""
    if Path(name).is_dir():
        if not (Path(name) / file).is_file():
            raise ValueError(f"{name}: has no {file}")
        return Path(name) / file
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, file))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {file} cannot be had ({_first_line(error)})") from error


def pretrained(kind: type, name: str, **kwargs):
    """``kind.from_pretrained`` of a local directory or hub id: a tokenizer, an image processor, a config.

    ValueError, one sentence, where it cannot be loaded.
    """
    try:
        return kind.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: no {kind.__name__} can be loaded ({_first_line(error)})") from error


def pretrained_model(kind: type, name: str | None, **kwargs) -> nn.Module:
    """A transformers model in eval mode, all tensors in place; ValueError names those that do not fit."""
    model, info = pretrained(kind, name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    mismatched = [f"{key} {tuple(stored)} for {tuple(ours)}" for key, stored, ours in info["mismatched_keys"]]
    refuse_misfits(name or kind.__name__, info["missing_keys"], info["unexpected_keys"], mismatched)
    return model.eval().requires_grad_(False)


def fill(model: nn.Module, state: dict[str, Tensor], where: str) -> nn.Module:
    """``model`` with the tensors of ``state``, in eval mode; ValueError names those that do not fit."""
    ours = model.state_dict()
    mismatched = [
        f"{key} {tuple(state[key].shape)} for {tuple(ours[key].shape)}"
        for key in ours.keys() & state.keys()
        if state[key].shape != ours[key].shape
    ]
    refuse_misfits(where, ours.keys() - state.keys(), state.keys() - ours.keys(), mismatched)
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def refuse_misfits(where: str, missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[str]):
    """ValueError that names the misfits, if there are any."""
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    misfits = [f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names]
    if misfits:
        raise ValueError(f"{where}: the weights do not fit; {'; '.join(misfits)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
