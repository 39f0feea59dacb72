"""Tiny checkpoints laid out as the released ones, with random weights unless given."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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
