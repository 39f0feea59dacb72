"""LLaDA's and MMaDA's released layout: config fields and tensor names, and transformers' for them."""

import json
from pathlib import Path

from torch import Tensor

from models import weights

# released field -> LlamaConfig's
SIZES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "embedding_size": "vocab_size",  # the rows there are; the field vocab_size may be smaller
    "rms_norm_eps": "rms_norm_eps",
    "eos_token_id": "eos_token_id",
}
# what makes the network the one that transformers' Llama computes; a config that says otherwise is refused
NETWORK = {
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "embedding_dropout": 0.0,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "multi_query_attention": None,
    "residual_dropout": 0.0,
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
    "weight_tying": False,
}
# the rest of a released config, which does not change what is computed
REST = {
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModel": "modeling_llada.LLaDAModelLM",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "flash_attention": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "layer_norm_with_affine": True,
    "mlp_ratio": 4,
    "model_type": "llada",
    "precision": "amp_bf16",
    "use_cache": False,
}
CODE = {"llada": "GSAI-ML/LLaDA-8B-Instruct", "mmada": "Gen-Verse/MMaDA-8B-Base"}  # where auto_map points
BLOCK = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
}
OUTSIDE = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}


def names(layers: int) -> dict[str, str]:
    """Released tensor name -> transformers' name, for a model of that many layers."""
    blocks = {
        f"model.transformer.blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
        for i in range(layers)
        for ours, theirs in BLOCK.items()
    }
    return OUTSIDE | blocks


def read_config(path: Path):
    """A released config.json as a LlamaConfig that keeps the original in ``.released``."""
    return config(weights.read_json(path), path)


def config(released: dict, path: Path | str):
    """The same from its fields; ``path`` is what an error names."""
    from transformers import LlamaConfig

    filled = {"n_kv_heads": released.get("n_heads"), "embedding_size": released.get("vocab_size")}
    filled |= {name: value for name, value in released.items() if value is not None}
    absent = [name for name in (*SIZES, "rope_theta") if filled.get(name) is None]
    if absent:
        raise ValueError(
            f"{path}: {', '.join(absent)} missing, which every released LLaDA or MMaDA config has"
        )
    for name, value in NETWORK.items():
        if filled.get(name, value) != value and (filled[name] or value):  # None is False in these files
            raise ValueError(f"{path}: {name} is {filled[name]!r}, only {value!r} is supported")
    return LlamaConfig(
        **{theirs: filled[ours] for ours, theirs in SIZES.items()},
        rope_parameters={"rope_type": "default", "rope_theta": filled["rope_theta"]},
        pad_token_id=None,
        bos_token_id=None,
        tie_word_embeddings=False,
        is_causal=False,
        released=released,
    )


def write(
    path: str | Path, backbone, tokenizer, mask_id: int, state: dict[str, Tensor] | None = None
) -> None:
    """A LlamaForCausalLM in the released layout: config.json, safetensors, tokenizer.

    The config is the one it was loaded with, else LLaDA's with this model's sizes. state: the backbone's
    gathered state dict, where its own parameters are sharded.
    """
    from huggingface_hub import save_torch_state_dict

    path, config = Path(path), backbone.config
    released = getattr(config, "released", None)
    if released is None:
        released = NETWORK | REST | {ours: getattr(config, theirs) for ours, theirs in SIZES.items()}
        released |= {"vocab_size": config.vocab_size, "rope_theta": config.rope_parameters["rope_theta"]}
        released |= {"mask_token_id": mask_id, "pad_token_id": config.eos_token_id}
    state = backbone.state_dict() if state is None else state
    renamed = {ours: state[theirs] for ours, theirs in names(config.num_hidden_layers).items()}
    # a class named without a repository would be looked for beside the weights, where its code is not
    classes = {
        name: value if "--" in value else f"{CODE[released['model_type']]}--{value}"
        for name, value in released.get("auto_map", {}).items()
    }
    dtype = {"torch_dtype": str(renamed["model.transformer.wte.weight"].dtype).removeprefix("torch.")}
    released = released | dtype | ({"auto_map": classes} if classes else {})
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(released, indent=2, sort_keys=True))
    save_torch_state_dict(renamed, path)
