"""Tiny checkpoints laid out as the released ones, with random weights unless given."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

WORDS = "user assistant a red blue green cube ball on table two small dogs".split()
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLADA_IDS = {
    "<|startoftext|>": 250,
    "<|start_header_id|>": 251,
    "<|end_header_id|>": 252,
    "<|endoftext|>": 253,
    "<|eot_id|>": 254,
    "<|mdm_mask|>": 255,
}
MMADA_IDS = {
    "<|startoftext|>": 160,
    "<|endoftext|>": 161,
    "<|reserved_token_0|>": 162,  # <|soi|>
    "<|reserved_token_1|>": 163,  # <|eoi|>
    "<|reserved_token_4|>": 166,  # <|t2i|>
    "<|reserved_token_9|>": 171,  # [iPAD]
    "<|mdm_mask|>": 180,
    "<|start_header_id|>": 187,
    "<|end_header_id|>": 188,
    "<|eot_id|>": 189,
}
LLADA = {
    "activation_type": "silu",
    "block_type": "llama",
    "d_model": 32,
    "embedding_size": 256,
    "eos_token_id": 253,
    "include_bias": False,
    "layer_norm_type": "rms",
    "mask_token_id": 255,
    "max_sequence_length": 128,
    "mlp_hidden_size": 48,
    "model_type": "llada",
    "n_heads": 2,
    "n_kv_heads": 2,
    "n_layers": 2,
    "pad_token_id": 253,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "float32",
    "vocab_size": 256,
}
URSA_IDS = {"<|startoftext|>": 60, "<|endoftext|>": 61, "<|bov|>": 62}
FUDOKI_IDS = {"<|startoftext|>": 60, "<|endoftext|>": 61, "<begin_of_image>": 62, "<end_of_image>": 63}
IBQ = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [32, 32],
    "layers_per_block": 1,
    "latent_channels": 4,
    "num_vq_embeddings": 64,
    "vq_embed_dim": 8,
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MMADA = LLADA | {
    "codebook_size": 64,
    "embedding_size": 264,
    "eos_token_id": 161,
    "llm_vocab_size": 200,
    "mask_token_id": 180,
    "model_type": "mmada",
    "num_vq_tokens": 16,
    "vocab_size": 264,
}


def tokenizer(ids: dict[str, int], size: int, chat: str | None = CHAT):
    """A word-level tokenizer of ``size`` entries; a line break is a token of its own."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(["<unk>", "\n", *WORDS])} | ids
    free = sorted(set(range(size)) - set(vocab.values()))
    vocab |= {f"word{i}": i for i in free[: size - len(vocab)]}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^\s]+"), "removed", invert=True)
    words.add_special_tokens(list(ids))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = chat
    return fast


def tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the released names."""
    noise, d, width = torch.Generator().manual_seed(seed), config["d_model"], config["mlp_hidden_size"]
    shapes = {"wte": (config["embedding_size"], d), "ln_f": (d,), "ff_out": (config["embedding_size"], d)}
    for i in range(config["n_layers"]):
        square = {name: (d, d) for name in ("q_proj", "k_proj", "v_proj", "attn_out")}
        mlp = {"ff_proj": (width, d), "up_proj": (width, d), "ff_out": (d, width)}
        norms = {"attn_norm": (d,), "ff_norm": (d,)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in (square | mlp | norms).items()}
    return {
        f"model.transformer.{name}.weight": torch.randn(shape, generator=noise) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write(
    path: Path, config: dict, words, weights: dict[str, torch.Tensor] | None = None, shards: int = 1
) -> Path:
    """A released checkpoint in ``path``; with ``shards`` > 1 in that many files and an index."""
    path.mkdir(parents=True, exist_ok=True)
    words.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(config))
    weights = tensors(config) if weights is None else weights
    if shards == 1:
        save_file(weights, path / "model.safetensors")
        return path
    files = {name: f"model-{i % shards:05}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({name: t for name, t in weights.items() if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def llada(path: Path, **options) -> Path:
    """LLaDA with 256 rows, mask 255, ends 253 and 254."""
    return write(path, options.pop("config", LLADA), tokenizer(LLADA_IDS, 256), **options)


def mmada(path: Path, **options) -> Path:
    """MMaDA with 264 rows, of which 64 image codes from row 190 = len(tokenizer) on."""
    return write(path, options.pop("config", MMADA), tokenizer(MMADA_IDS, 190), **options)


def ursa(path: Path) -> Path:
    """URSA with 64 text rows, 64 image codes of 2 x 2 pixels and a table of its own for the metric path."""
    from models.ibq import IBQ as Tokenizer
    from models.ursa import URSA, qwen3

    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = qwen3(64, vocab_size=128, head_dim=16, num_key_value_heads=1, **SMALL)
        vq, table = Tokenizer(IBQ), torch.randn(64, 8)
    settings = {"path": "metric", "alpha": 0.7, "c": 5.0, "shift": 2.0, "power": 1}
    layout = dict(grid=(1, 4, 4), bov_id=62, pad_id=61, codebook=table, path_settings=settings)
    URSA(backbone, tokenizer(URSA_IDS, 64, None), vq, **layout).save(path)
    (path / "policy.json").unlink()
    return path


def janus_vq() -> dict[str, torch.Tensor]:
    """Random tensors of Janus's image tokenizer under the released names: 64 codes of 2 x 2 pixels."""
    from transformers import JanusVQVAE, JanusVQVAEConfig

    from models.janus_vq import RENAME

    sizes = dict(embed_dim=8, num_embeddings=64, latent_channels=4)
    widths = dict(base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = JanusVQVAE(JanusVQVAEConfig(**sizes, **widths)).state_dict()
    named = {}
    for name, value in state.items():
        for ours, theirs in RENAME.items():
            name = name.replace(theirs, ours)
        named[f"gen_vision_model.{name}"] = value
    return named


def fudoki(path: Path) -> Path:
    """FUDOKI with text ids up to the one of the empty prompt, 64 image codes of 2 x 2 pixels, and tensors of
    the half that understands images."""
    from transformers import LlamaConfig

    from models.fudoki import Backbone

    with torch.random.fork_rng():
        torch.manual_seed(0)
        backbone = Backbone(LlamaConfig(vocab_size=100016, **SMALL), codes=64, code_dim=8, head_dim=24)
    state = backbone.state_dict() | janus_vq()
    table = state["gen_vision_model.quantize.embedding.weight"]
    state |= {"vision_model.x": torch.zeros(1), "aligner.x": torch.zeros(1)}
    state |= {"language_model.lm_head.weight": torch.zeros(1)}
    state |= {"gen_vision_model.quantize.codebook_used": torch.zeros(8)}
    path.mkdir(parents=True, exist_ok=True)
    save_file(state, path / "model.safetensors")
    tokenizer(FUDOKI_IDS, 64, None).save_pretrained(path)
    (path / "config.json").write_text(json.dumps(backbone.released()))
    torch.save(nn.Embedding.from_pretrained(table), path / "image_embedding.pt")
    return path
