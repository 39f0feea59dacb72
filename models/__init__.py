"""One short file per backbone, behind the interface of models/policy.py."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common import import_file
from models import weights

if TYPE_CHECKING:
    from models.policy import Policy

# kind -> class of models/<kind>.py
CLASSES = {"llada": "LLaDA", "mmada": "MMaDA", "ursa": "URSA", "fudoki": "FUDOKI"}
MODALITY = {"llada": "text", "mmada": "image", "ursa": "image", "fudoki": "image"}
RELEASED = {"URSAPipeline": "ursa", "multi_modality": "fudoki"}  # name in a release -> kind


def load(
    name_or_path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    length: int | None = None,
    max_prompt: int | None = None,
    modality: str | None = None,
    vq: str | None = None,
) -> "Policy":
    """The policy of a local directory, of a hub id, or of ``policy()`` in a .py file; in eval mode.

    A directory written by ``policy.save`` says its kind in policy.json, a released one in config.json; one of
    a LoRA adapter names its base.
    length, max_prompt: None keeps what the checkpoint says. modality: "text" or "image", an error where the
    checkpoint cannot make it; MMaDA as released makes both, and None means image. vq: another image tokenizer
    (directory or hub id) than the checkpoint's. A .py file says all of this itself. ValueError, one sentence,
    where it cannot be loaded.
    """
    sizes = dict(dtype=dtype, device=device, length=length, max_prompt=max_prompt)
    try:
        return opened(name_or_path, sizes, modality, vq)
    except (ValueError, ImportError, RuntimeError):
        raise
    except Exception as error:  # what a library says of a file that it cannot read
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"--model {name_or_path}: cannot be loaded ({reason})") from error


def opened(name_or_path: str, sizes: dict, modality: str | None, vq: str | None) -> "Policy":
    """``load`` but for what a library raises; ``sizes``: its first four options."""
    if str(name_or_path).endswith(".py"):
        given = {"--length": sizes["length"], "--max-prompt": sizes["max_prompt"], "--vq": vq}
        if given := [flag for flag, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: --model {name_or_path} says it itself, in policy()")
        return own(name_or_path).to(sizes["device"], sizes["dtype"]).eval()
    directory = weights.find(name_or_path)
    if (directory / "adapter_config.json").exists():
        from models import lora

        return lora.load(directory, modality=modality, vq=vq, **sizes)
    kind = kind_of(directory)
    if kind == "mmada" and modality == "text" and not (directory / "policy.json").exists():
        kind = "llada"
    if modality not in (None, MODALITY[kind]):
        raise ValueError(
            f"--model {name_or_path}: {kind} makes {MODALITY[kind]}, the task asks for {modality}"
        )
    if vq is not None and MODALITY[kind] != "image":
        raise ValueError(f"--vq {vq}: --model {name_or_path} makes text here, without an image tokenizer")
    options = {"vq": vq} if MODALITY[kind] == "image" else {}
    cls = getattr(importlib.import_module(f"models.{kind}"), CLASSES[kind])
    policy = cls.load(directory, **sizes, **options).eval()
    codebook = getattr(getattr(policy, "vq", None), "codebook", None)
    if vq is not None and codebook is not None and len(codebook) != policy.vocab_size:
        raise ValueError(
            f"--vq {vq}: has {len(codebook)} codes, --model {name_or_path} has {policy.vocab_size}"
        )
    return policy


def own(path: str) -> "Policy":
    """What ``policy()`` of a .py file gives; ValueError where that lacks what the scripts need."""
    from models.policy import Policy

    policy = import_file(path, "--model", "policy").policy()
    if not isinstance(policy, Policy):
        raise ValueError(f"--model {path}: policy() gives a {type(policy).__name__}, no models.policy.Policy")
    absent = [name for name in ("length", "vocab_size") if not hasattr(policy, name)]
    absent += [m for m in ("encode", "decode", "save") if getattr(type(policy), m) is getattr(Policy, m)]
    if absent:
        raise ValueError(f"--model {path}: {type(policy).__name__} lacks {', '.join(absent)}")
    return policy


def kind_of(directory: Path) -> str:
    """The kind of model that a checkpoint, or the base of an adapter, says it is; ValueError for another."""
    adapter, ours = directory / "adapter_config.json", directory / "policy.json"
    if adapter.exists():
        return kind_of(weights.find(weights.read_json(adapter)["base_model_name_or_path"]))
    if ours.exists():
        kind = weights.read_json(ours).get("kind")
    else:
        index = directory / "model_index.json"  # URSA has no config.json
        name = "_class_name" if index.exists() else "model_type"
        kind = weights.read_json(index if index.exists() else directory / "config.json").get(name)
        kind = RELEASED.get(kind, kind)
    if kind not in CLASSES:
        raise ValueError(f"--model {directory}: kind {kind!r} is not supported, only {', '.join(CLASSES)}")
    return kind
