"""A policy as the flags ask for it: with its reference, whole or sharded, with LoRA or without; and how it is
stored."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import models
from common import World
from models import lora


class Reference(nn.Module):
    """The frozen policy of the KL. ``refresh`` makes it a copy of the policy as it is now."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy.requires_grad_(False)

    @torch.no_grad()
    def forward(self, *args, **kwargs):
        return self.policy(*args, **kwargs)

    @torch.no_grad()
    def refresh(self, policy) -> None:
        new = policy.state_dict()  # of sharded models the shards, though a forward pass has left some whole
        for name, mine in self.policy.state_dict().items():
            mine.copy_(new[name])


class AdapterReference:
    """The reference with LoRA: the policy itself, computing with its second, frozen adapter."""

    def __init__(self, policy):
        self.policy = policy
        lora.add_reference(policy)

    @torch.no_grad()
    def __call__(self, *args, **kwargs) -> Tensor:
        lora.use(self.policy, lora.REFERENCE)
        try:
            return self.policy(*args, **kwargs)
        finally:
            lora.use(self.policy, lora.POLICY)

    def refresh(self, policy) -> None:
        lora.copy(policy)


def load_policy(args, world: World, task) -> tuple:
    """(policy, reference) of --model, in eval mode: dropout is off whenever the policy scores or samples. The
    reference is None with --beta 0. ``--model tiny`` is the built-in base of the task, trained first where
    there is none yet.

    Weights that are trained are held in float32: with --lora-rank the adapter alone, beside a base in
    --dtype; else all of them, and --shard fsdp computes in --dtype. Raises ValueError for what does not fit.
    """
    path = args.model
    if path.split(":")[0] == "tiny":
        from sft import base

        path = base(args.task, args.model, world, getattr(args, "path", None))
    dtype, sharded = getattr(torch, args.dtype), args.shard == "fsdp"
    if dtype != torch.float32 and not args.lora_rank and not sharded:
        raise ValueError(
            f"--dtype {args.dtype} without --lora-rank: steps of --lr would be lost in the rounding of the "
            "weights; add --shard fsdp (one process will do): it keeps them in float32, computes in --dtype"
        )

    def load(held: torch.dtype):
        chosen = dict(length=args.length, max_prompt=args.max_prompt, modality=task.modality, vq=args.vq)
        return models.load(str(path), dtype=held, device=str(world.device), **chosen)

    policy, reference = load(dtype if args.lora_rank else torch.float32), None
    backbone = getattr(policy, "backbone", None)
    if backbone is None and (args.lora_rank or sharded or args.grad_checkpoint):
        raise ValueError(
            f"--model {path}: --lora-rank, --shard fsdp and --grad-checkpoint need policy.backbone"
        )
    check_export(policy, args)
    if args.lora_rank:
        add_adapter(policy, str(path), args)
        reference = AdapterReference(policy) if args.beta else None
    elif any(lora.layers(policy)):
        raise ValueError(f"--model {path} is a LoRA adapter: give its --lora-rank to train it on")
    if args.grad_checkpoint:
        policy.gradient_checkpointing()
    if sharded:
        shard(policy, dtype, world)
    elif world.size > 1:  # ranks read the same files: only what they make themselves could differ
        for p in policy.parameters():
            if p.requires_grad:
                dist.broadcast(p.data, 0)
    if args.beta and not args.lora_rank:
        reference = Reference(load(dtype))
        if sharded:
            shard(reference.policy, dtype, world)
    return policy, reference


def check_export(policy, args) -> None:
    """Raises ValueError where the model cannot be stored as --export asks."""
    if args.export and type(getattr(policy, "backbone", None)).__name__ != "LlamaForCausalLM":
        raise ValueError(f"--export {args.export}: {type(policy).__name__} has another layout")


def add_adapter(policy, path: str, args) -> None:
    """A new adapter, or the one that --model brings. Raises ValueError where that has another rank."""
    if not any(lora.layers(policy)):
        lora.add(policy, path, args.lora_rank, args.lora_alpha)
    has = policy.backbone.peft_config[lora.POLICY]
    if (has.r, has.lora_alpha) != (args.lora_rank, args.lora_alpha):
        raise ValueError(
            f"--lora-rank {args.lora_rank} --lora-alpha {args.lora_alpha}: the adapter in {path} has rank "
            f"{has.r}, alpha {has.lora_alpha}"
        )


def shard(policy, dtype: torch.dtype, world: World) -> None:
    """FSDP2: each block a unit, all else the root unit; computed in ``dtype``, gradients summed (not
    averaged) over the ranks in float32."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():  # one process without torchrun
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh(world.device.type, (world.size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*policy.backbone.get_decoder().layers, policy):
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def gathered(state: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """The whole tensors on rank 0, in host memory where they were sharded. Every rank must call."""
    whole = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
            value = torch.empty_like(value, device="cpu").copy_(value) if world.rank == 0 else None
        whole[name] = value
    return whole


def store(policy, path, args, world: World) -> None:
    """The trained model in ``path``, for ``models.load``: all weights in --dtype or, with LoRA, the adapter
    alone; with --export llada the whole model in the released layout too, beside it. Every rank must call."""
    adapted, dtype = any(lora.layers(policy)), getattr(torch, args.dtype)
    state = getattr(policy, "backbone", policy).state_dict()
    if adapted and not args.export:
        state = {n: t for n, t in state.items() if "lora_" in n}
    state = gathered(state, world)
    if world.rank:
        return
    if adapted:
        lora.save(policy, path, state)
    else:
        state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()}
        policy.save(path, state)
    if args.export:
        whole = lora.merged_state(policy, state) if adapted else state
        policy.export_llada(path.with_name("llada"), whole)
