"""LoRA by peft: low-rank adapters on all seven projections of each block, beside a frozen base."""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from common import generator
from models import released, weights
from models.policy import Policy

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
POLICY, REFERENCE = "policy", "reference"  # names of the adapters: the trained one, the one of the KL
PREFIX = "base_model.model."  # of a tensor in peft's files


def add(policy: Policy, base: str, rank: int, alpha: float, targets: tuple[str, ...] = TARGETS) -> None:
    """Freeze the policy and add an adapter W + (alpha / rank) B A in float32, B = 0: the output is unchanged.

    base: where the base's weights are, as the adapter's checkpoint will name it. Raises ImportError without
    peft.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ImportError("LoRA needs peft: pip install -r requirements.txt") from None
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=list(targets),
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
    )
    policy.requires_grad_(False)
    inject_adapter_in_model(config, policy.backbone, POLICY)
    policy.eval()
    for name, layer in layers(policy):
        A, B = layer.lora_A[POLICY].float().weight, layer.lora_B[POLICY].float().weight
        u = torch.rand(A.shape, generator=generator("lora", name))
        A.data.copy_((2 * u - 1) / math.sqrt(A.shape[1]))
        B.data.zero_()


def add_reference(policy: Policy) -> None:
    """A second adapter, frozen, a copy of the first: see ``copy`` and ``use``."""
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks whether a second adapter is meant
        inject_adapter_in_model(policy.backbone.peft_config[POLICY], policy.backbone, REFERENCE)
    policy.eval()
    for _, layer in layers(policy):
        for pair in (layer.lora_A, layer.lora_B):
            pair[REFERENCE].float().requires_grad_(False)
            pair[POLICY].requires_grad_(True)
    copy(policy)
    use(policy, POLICY)


def layers(policy: Policy) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, layer) of each adapted projection; none without LoRA."""
    return ((n, m) for n, m in getattr(policy, "backbone", policy).named_modules() if hasattr(m, "lora_A"))


@torch.no_grad()
def copy(policy: Policy) -> None:
    """Make the reference adapter equal to the trained one."""
    for _, layer in layers(policy):
        for pair in (layer.lora_A, layer.lora_B):
            pair[REFERENCE].weight.copy_(pair[POLICY].weight)


def use(policy: Policy, adapter: str) -> None:
    """Compute with this adapter. peft's ``set_adapter`` would also turn gradients on and off, which a sharded
    parameter cannot follow."""
    for _, layer in layers(policy):
        layer._active_adapter = [adapter]


def adapter_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trained adapter out of a backbone's state dict, under peft's names."""
    return {PREFIX + n.replace(f".{POLICY}.", "."): t for n, t in state.items() if f".{POLICY}." in n}


def merged_state(policy: Policy, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a plain backbone: each W becomes W + (alpha / rank) B A, in its own dtype."""
    scaling = {name: layer.scaling[POLICY] for name, layer in layers(policy)}
    plain = {n: t for n, t in state.items() if ".lora_" not in n and ".base_layer." not in n}
    for name, s in scaling.items():
        W = state[f"{name}.base_layer.weight"]
        A, B = (state[f"{name}.lora_{x}.{POLICY}.weight"].float() for x in "AB")
        plain[f"{name}.weight"] = (W.float() + s * B @ A).to(W.dtype)
    return plain


def save(policy: Policy, path: Path, state: dict[str, Tensor]) -> None:
    """peft's layout: adapter_config.json, which names the base, and adapter_model.safetensors; no base
    weights. ``state``: the backbone's, gathered."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    policy.backbone.peft_config[POLICY].save_pretrained(path)
    adapter = {n: t.contiguous() for n, t in adapter_state(state).items()}
    save_file(adapter, path / "adapter_model.safetensors", {"format": "pt"})


def load(directory: Path, **options) -> Policy:
    """The base that an adapter directory names, with the adapter. Tensors under LLaDA's released names, as
    public trainers write them, are taken too. ``options``: of ``models.load``."""
    from safetensors.torch import load_file

    import models

    config = weights.read_json(directory / "adapter_config.json")
    file = directory / "adapter_model.safetensors"
    if not file.exists():
        raise ValueError(f"{file}: no such file")
    policy = models.load(config["base_model_name_or_path"], **options)
    table = released.names(len(policy.backbone.get_decoder().layers))
    stored = {}
    for key, value in load_file(file).items():
        module, part = key.removeprefix(PREFIX).split(".lora_")
        module = table.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")
        stored[f"{module}.lora_{part.replace('.', f'.{POLICY}.', 1)}"] = value.float()
    targets = tuple(sorted({name.split(".lora_")[0] for name in stored}))
    add(policy, config["base_model_name_or_path"], config["r"], config["lora_alpha"], targets)
    own = {n: p for n, p in policy.backbone.named_parameters() if f".{POLICY}." in n}
    wrong = {
        n
        for n in own.keys() | stored.keys()
        if n not in own or n not in stored or own[n].shape != stored[n].shape
    }
    if wrong:
        raise ValueError(f"{file}: missing, unexpected or of another shape: {sorted(wrong)}")
    for name, value in stored.items():
        own[name].data.copy_(value)
    return policy
