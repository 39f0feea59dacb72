"""Memory of a run by arithmetic (--dry-run): the model is built on the meta device, no weight is loaded."""

import math
from pathlib import Path

import torch

from models import lora, released, weights
from models.policy import CHUNK

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


def config_of(model: str):
    """The LlamaConfig of a directory, an adapter's base, or a released hub id, whose sizes are known."""
    from transformers import LlamaConfig

    for name, own in KNOWN.items():
        if model.startswith(name):
            return released.config(EIGHT_B | own, model)
    directory = Path(model)
    if not directory.is_dir():
        raise ValueError(f"--dry-run: --model {model} is no directory, nor one of {', '.join(KNOWN)}...")
    if (directory / "adapter_config.json").exists():
        return config_of(weights.read_json(directory / "adapter_config.json")["base_model_name_or_path"])
    kind = weights.read_json(directory / "config.json").get("model_type")
    if kind == "llama":
        return LlamaConfig.from_pretrained(directory)
    if kind in ("llada", "mmada"):
        return released.read_config(directory / "config.json")
    raise ValueError(f"--dry-run: {directory} is {kind!r}; the arithmetic knows LLaDA and MMaDA")


def saved_per_token(config, c: int, rank: int) -> float:
    """Bytes that one block keeps of a token for the backward pass; c bytes a number, LoRA of ``rank`` or 0.

    Of each norm its input in float32; q, k, v and the output of attention; gate, its silu and up. What is
    trained keeps its input: norms and projections, or with LoRA the low-rank ones, which cast it to float32.
    """
    d, f, h = config.hidden_size, config.intermediate_size, config.num_attention_heads
    kv = d * config.num_key_value_heads // h
    saved = 2 * 4 * d + c * (2 * d + 2 * kv) + 4 * h + 3 * c * f
    if not rank:
        return saved + c * (5 * d + f)
    return saved + 4 * (3 * d + f if c == 4 else 6 * d + f) + 4 * 7 * rank  # no cast: q, k, v share one


def memory(args, config, gpus: int, image: bool = False) -> dict[str, float]:
    """Bytes on each of ``gpus`` GPUs, by what they are for."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    def count(module) -> int:
        return sum(p.numel() for p in module.parameters())

    block = model.model.layers[0]
    projections = [m for n, m in block.named_modules() if n.split(".")[-1] in lora.TARGETS]
    adapter = len(model.model.layers) * args.lora_rank * sum(sum(m.weight.shape) for m in projections)
    whole, root = count(model), count(model) - len(model.model.layers) * count(block)
    trained = adapter or whole

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

    released_config = getattr(config, "released", {})
    L = args.length or (released_config.get("num_vq_tokens") if image else None) or 256
    K = released_config["codebook_size"] if image else config.vocab_size
    responses = args.batch if args.name == "sft" else args.prompts * args.group_size
    rows = min(args.micro_batch, math.ceil(responses / gpus))
    guided = args.name != "sft" and args.cfg and args.score == "guided"
    tokens = rows * (L + (args.max_prompt or 256)) * (2 if guided else 1)
    per_token, n_layers = saved_per_token(config, c, args.lora_rank), len(model.model.layers)
    kept = c * config.hidden_size * n_layers + per_token if args.grad_checkpoint else per_token * n_layers
    used["activations"] = tokens * kept
    scored = min(CHUNK, rows * L) * K * (2 * c + 12)  # logits, in float32, log-softmax, and two gradients
    shown = args.block if vars(args).get("sampler") == "semi_autoregressive" else L
    used["logits"] = max(scored, rows * shown * K * 12)  # or those of a rollout, [M] taken out, drawn from
    return used


def table(args) -> str:
    """The Markdown table of --dry-run: GB (10^9 bytes) a GPU, for 1, 4 and 8 GPUs."""
    from eval.task import load_task

    if args.model.split(":")[0] == "tiny":
        raise ValueError("--dry-run: the built-in models fit anywhere; give --model")
    config = config_of(args.model)
    image = load_task(args.task, args.protocol).modality == "image"
    columns = [memory(args, config, gpus, image) for gpus in GPUS]
    how = f"LoRA rank {args.lora_rank}" if args.lora_rank else "all weights trained"
    lines = [
        f"{args.model}, {how}, --shard {args.shard.replace('none', 'ddp')}, {args.dtype}, "
        f"micro-batch {args.micro_batch}{', blocks recomputed' if args.grad_checkpoint else ''}; "
        f"prompts of {args.max_prompt or 256} tokens",
        "",
        "| GB a GPU | " + " | ".join(f"{n} GPU{'s' if n > 1 else ''}" for n in GPUS) + " |",
        "|---" * (len(GPUS) + 1) + "|",
    ]
    for name in columns[0]:
        lines.append(f"| {name} | " + " | ".join(f"{c[name] / 1e9:.1f}" for c in columns) + " |")
    lines.append("| **sum** | " + " | ".join(f"{sum(c.values()) / 1e9:.1f}" for c in columns) + " |")
    return "\n".join(lines)
