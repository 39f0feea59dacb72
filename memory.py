"""Memory of a run by arithmetic (--dry-run): the model is built on the meta device, no weight is loaded."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import models
import samplers
from models import fudoki, lora, policy, released, ursa, weights

GPUS = (1, 4, 8)
# what --dry-run needs of the 8B configs, for when the hub cannot be asked
EIGHT_B = {
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "mlp_hidden_size": 12288,
    "max_sequence_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "eos_token_id": 126081,
}
KNOWN = {
    "GSAI-ML/LLaDA-": {"model_type": "llada", "vocab_size": 126464},
    "Gen-Verse/MMaDA-8B": {
        "model_type": "mmada",
        "vocab_size": 134656,
        "codebook_size": 8192,
        "num_vq_tokens": 1024,
    },
}
CONFIGS = ["*config.json", "model_index.json", "policy.json"]


@dataclass
class Model:
    """A backbone on meta, K, and the tokens of a response and of a prompt where no flag says them."""

    backbone: nn.Module
    K: int
    length: int = 256
    prompt: int = 256


def model_of(name: str, modality: str) -> Model:
    """--model by its config alone. Raises ValueError, one sentence, where that is not enough."""
    from transformers import LlamaConfig, LlamaForCausalLM

    kind, config, ours = config_of(name)
    makes = models.MODALITY[kind]
    if modality != makes and (kind, modality, ours) != ("mmada", "text", {}):  # as released it makes both
        raise ValueError(f"--model {name}: {kind} makes {makes}, the task asks for {modality}")
    try:
        with torch.device("meta"):
            if kind == "ursa":
                K, sizes = config["lm_head_size"], {field: config[field] for field in ursa.SIZES}
                backbone = ursa.qwen3(K, head_dim=config.get("head_dim", 128), **sizes)
                return Model(backbone, K, math.prod(ours.get("grid", (32, 32))), ours.get("text_length", 320))
            if kind == "fudoki":
                llama = {field: v for field, v in config["language_config"].items() if field in fudoki.SIZES}
                codes, head = (config[f"gen_{part}_config"]["params"] for part in ("vision", "head"))
                sizes = (codes["image_token_size"], codes["n_embed"], head["image_token_embed"])
                return Model(fudoki.Backbone(LlamaConfig(**llama), *sizes), sizes[0], ours.get("length", 576))
            plain = config.get("model_type") == "llama"
            llama = LlamaConfig.from_dict(config) if plain else released.config(config, name)
            backbone, sizes = LlamaForCausalLM(llama), config | ours
            if modality == "text":
                return Model(backbone, llama.vocab_size, ours.get("length", 256))
            return Model(backbone, sizes["codebook_size"], sizes["num_vq_tokens"], sizes.get("max_text", 256))
    except KeyError as error:
        raise ValueError(f"--dry-run: the config of --model {name} has no {error}") from None


def config_of(name: str) -> tuple[str, dict, dict]:
    """(kind, config, policy.json or {}) of a directory, of an adapter's base, or of a hub id: one whose sizes
    are known, or its config is fetched, and no weights."""
    for start, own in KNOWN.items():
        if name.startswith(start):
            return own["model_type"], EIGHT_B | own, {}
    directory = Path(name)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            directory = Path(snapshot_download(name, allow_patterns=CONFIGS))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            raise ValueError(
                f"--dry-run: --model {name} is no directory, and the hub did not give its config "
                f"({type(error).__name__}); known without it: {', '.join(KNOWN)}..."
            ) from error
    if (directory / "adapter_config.json").exists():
        return config_of(weights.read_json(directory / "adapter_config.json")["base_model_name_or_path"])
    kind, ours = models.kind_of(directory), directory / "policy.json"
    config = weights.read_json(directory / ("transformer" if kind == "ursa" else "") / "config.json")
    return kind, config, weights.read_json(ours) if ours.exists() else {}


def saved_per_token(block: nn.Module, c: int, rank: int) -> float:
    """Bytes that one block keeps of a token for the backward pass; c bytes a number, LoRA of ``rank`` or 0.

    Of each norm its input in float32; q, k, v and the output of attention; gate, its silu and up. What is
    trained keeps its input: norms and projections, or with LoRA the low-rank ones, which cast it to float32.
    """
    attention = block.self_attn
    d, f = attention.q_proj.in_features, block.mlp.gate_proj.out_features
    q, kv = attention.q_proj.out_features, attention.k_proj.out_features
    normed = q + kv if hasattr(attention, "q_norm") else 0
    saved = 4 * (2 * d + normed) + c * (2 * q + 2 * kv) + 4 * q / attention.head_dim + 3 * c * f
    if not rank:
        return saved + c * (4 * d + normed + f)
    return saved + 4 * (2 * d + f if c == 4 else 5 * d + q + f) + 4 * 7 * rank  # no cast: q, k, v share one


def logits(args, K: int, L: int, rows: int, c: int, guided: bool) -> float:
    """Bytes at the worst moment of a micro-batch: of an update, ``guided`` or not, or of a rollout."""
    pair = 16  # a logit under guidance, float32: z, z_null, and each with its weight
    # without, in the backward pass: log-softmax, and the gradients of it and of the logit
    scored = min(policy.CHUNK, rows * L) * K * (pair if guided else 12)
    if "sampler" not in args:
        return scored
    shown = rows * (args.block if args.sampler == "semi_autoregressive" else L) * K
    filled = min(policy.CHUNK * K, shown) * (pair if args.cfg else 4 if c == 4 else 4 + c)
    drawn = min(24 * samplers.CHUNK, 16 * shown)  # in float64
    held = 4 if args.sampler == "euler" else 8  # with the copy without [M]
    return max(scored, held * shown + max(filled, drawn))


def memory(args, model: Model, gpus: int) -> dict[str, float]:
    """Bytes on each of ``gpus`` GPUs, by what they are for."""

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    layers = model.backbone.get_decoder().layers
    block, n_layers = layers[0], len(layers)
    projections = [m for n, m in block.named_modules() if n.split(".")[-1] in lora.TARGETS]
    adapter = n_layers * args.lora_rank * sum(sum(m.weight.shape) for m in projections)
    whole = count(model.backbone)
    root, trained = whole - n_layers * count(block), adapter or whole

    c = torch.finfo(getattr(torch, args.dtype)).bits // 8
    sharded, reference = args.shard == "fsdp", bool(vars(args).get("beta"))
    shards = gpus if sharded else 1
    gathered = c * (root + 2 * count(block)) if sharded else 0  # a block in use, one on its way
    used = {
        "weights": (c * whole if adapter else 4 * whole) / shards + 4 * adapter / shards + gathered,
        "gradients": 4 * trained / shards * (2 if gpus > 1 and not sharded else 1)  # ddp sums in a flat copy
        + (c * (root + count(block)) if sharded and not adapter else 0),
        "optimizer": 8 * trained / shards,
        "reference": reference * (4 * adapter / shards or c * whole / shards + (c * root if sharded else 0)),
    }

    L, d = args.length or model.length, block.self_attn.q_proj.in_features
    responses = args.batch if args.name == "sft" else args.prompts * args.group_size
    mine = math.ceil(responses / gpus)
    rows = min(args.micro_batch, mine)
    guided = vars(args).get("score") == "guided" and args.cfg > 0
    tokens = rows * (L + (args.max_prompt or model.prompt)) * (2 if guided else 1)
    per_token = saved_per_token(block, c, args.lora_rank)
    kept = c * d * n_layers + per_token if args.grad_checkpoint else per_token * n_layers
    used["activations"] = tokens * kept
    used["logits"] = logits(args, model.K, L, rows, c, guided)
    if "train_steps" in args:  # x_t and x_1 of a rollout's steps; x_t, log p and log p of the reference
        used["states"] = 16 * mine * L * (args.steps + 1 + args.train_steps)
    return used


def table(args) -> str:
    """The Markdown table of --dry-run: GB (10^9 bytes) a GPU, for 1, 4 and 8 GPUs."""
    from eval.task import load_task

    if args.model.split(":")[0] == "tiny":
        raise ValueError("--dry-run: the built-in models fit anywhere; give --model")
    model = model_of(args.model, load_task(args.task, args.protocol).modality)
    columns = [memory(args, model, gpus) for gpus in GPUS]
    how = f"LoRA rank {args.lora_rank}" if args.lora_rank else "all weights trained"
    lines = [
        f"{args.model}, {how}, --shard {args.shard.replace('none', 'ddp')}, {args.dtype}, "
        f"micro-batch {args.micro_batch}{', blocks recomputed' if args.grad_checkpoint else ''}; "
        f"prompts of {args.max_prompt or model.prompt} tokens, responses of {args.length or model.length}",
        "",
        "| GB a GPU | " + " | ".join(f"{n} GPU{'s' if n > 1 else ''}" for n in GPUS) + " |",
        "|---" * (len(GPUS) + 1) + "|",
    ]
    for name in columns[0]:
        lines.append(f"| {name} | " + " | ".join(f"{c[name] / 1e9:.1f}" for c in columns) + " |")
    lines.append("| **sum** | " + " | ".join(f"{sum(c.values()) / 1e9:.1f}" for c in columns) + " |")
    return "\n".join(lines)
