"""A policy as the flags ask for it: loaded, with its reference, on one process or many."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import models
from common import World


class Reference(nn.Module):
    """The frozen policy of the KL. ``refresh`` makes it a copy of the policy as it is now."""

    def __init__(self, policy):
        super().__init__()
        self.policy = copy.deepcopy(policy).requires_grad_(False)

    @torch.no_grad()
    def forward(self, *args, **kwargs):
        return self.policy(*args, **kwargs)

    def refresh(self, policy) -> None:
        self.policy.load_state_dict(policy.state_dict())


def load_policy(args, world: World, task) -> tuple:
    """(policy, reference) of --model, in eval mode: dropout is off whenever the policy scores or samples. The
    reference is None with --beta 0. ``--model tiny`` is the built-in base of the task, trained first where
    there is none yet."""
    path = args.model
    if path.split(":")[0] == "tiny":
        from sft import base

        path = base(args.task, args.model, world)
    dtype = getattr(torch, args.dtype)
    sizes = dict(length=args.length, max_prompt=args.max_prompt, modality=task.modality)
    policy = models.load(str(path), dtype=dtype, device=str(world.device), **sizes).eval()
    if args.grad_checkpoint:
        policy.gradient_checkpointing()
    reference = Reference(policy) if args.beta else None
    if args.shard == "ddp" and world.size > 1:
        for p in policy.parameters():
            dist.broadcast(p.data, 0)
    return policy, reference
