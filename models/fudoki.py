"""FUDOKI: images by uniform diffusion, a bidirectional Llama with an embedding and a head for image codes."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import weights
from models.image import ImagePolicy
from models.janus_vq import PREFIX, JanusVQ
from models.policy import Prompt

# constants of the public code: alpha, c, and a distance that is squared twice
PATH = {"path": "metric", "alpha": 0.9, "c": 3.0, "power": 2, "shift": 1.0}
UNCONDITIONAL = 100015  # the token that stands for each word of an empty prompt
SPECIAL = ("bos_id", "begin_id", "end_id", "pad_id", "uncond_id")
# the half that understands images, and the image tokenizer
NOT_USED = ("vision_model.", "aligner.", "language_model.lm_head.", PREFIX)


class FUDOKI(ImagePolicy):
    """Images of L codes out of K; x_t holds codes, noise or not: there is no [M].

    The row is ``[pad..] <bos> User: text, Assistant: <begin_of_image>`` (the prompt), the codes and
    ``<end_of_image>``. Padding is hidden and takes no position, so it may stand on either side; the public
    code puts it on the right. Codes have their own embedding; the state before a token predicts it.

    backbone: a ``Backbone``. ``save`` needs the vq's ``state()``, or a ``source`` that begins with "tiny".
    max_text: bound on the tokens that are not codes, the one after them included.
    """

    VQ = JanusVQ

    def __init__(
        self,
        backbone: "Backbone",
        tokenizer,
        vq,
        *,
        bos_id: int,
        begin_id: int,
        end_id: int,
        pad_id: int,
        codebook: Tensor,
        uncond_id: int = UNCONDITIONAL,
        length: int = 576,
        max_text: int = 500,
        path_settings: dict | None = None,
    ) -> None:
        super().__init__(backbone, tokenizer, vq, codebook)
        self.bos_id, self.begin_id, self.end_id = bos_id, begin_id, end_id
        self.pad_id, self.uncond_id = pad_id, uncond_id
        self.length, self.max_text = length, max_text
        self.vocab_size = backbone.gen_embed.num_embeddings
        self.path_settings = dict(PATH if path_settings is None else path_settings)

    def hidden(self, prompt: Prompt, x_t: Tensor) -> Tensor:
        embed = self.backbone.get_input_embeddings()
        end = embed(x_t.new_full((len(x_t), 1), self.end_id))
        image = self.backbone.gen_aligner(self.backbone.gen_embed(x_t))
        mask = F.pad(prompt.mask, (0, x_t.shape[1] + 1), value=True)
        states = self.backbone.get_decoder()(
            inputs_embeds=torch.cat([embed(prompt.ids), image, end], 1),
            attention_mask=None if mask.all() else mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return states[:, -2 - x_t.shape[1] : -2]

    def encode(self, texts: list[str]) -> Prompt:
        """Left-padded to the longest; ValueError for one that is too long."""
        rows = [self._tokens(text) for text in texts]
        width = max(map(len, rows))
        if width + 2 > self.max_text:
            text = next(text for text, row in zip(texts, rows, strict=True) if len(row) == width)
            raise ValueError(
                f"--max-prompt: a prompt has {width} tokens, at most {self.max_text - 2} are accepted "
                f"(it begins {text[:60]!r})"
            )
        return self.left_padded(rows, width)

    def _tokens(self, text: str) -> list[int]:
        tokens = self.tokenizer(f"User: {text.strip()}\n\nAssistant:")["input_ids"]
        return [self.bos_id] * (tokens[:1] != [self.bos_id]) + tokens + [self.begin_id]

    def unconditional(self, prompt: Prompt) -> Prompt:
        """``uncond_id`` for every token between the first and the begin of the image."""
        words = prompt.mask & (prompt.mask.cumsum(1) > 1)
        words[:, -1] = False
        return Prompt(torch.where(words, self.uncond_id, prompt.ids), prompt.mask)

    def settings(self) -> dict:
        source = str(getattr(self.vq, "source", ""))
        names = (*SPECIAL, "length", "max_text", "path_settings")
        return {"kind": "fudoki", "vq": source if source.startswith("tiny") else ""} | {
            name: getattr(self, name) for name in names
        }

    def save(self, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """The released layout without the understanding half, and policy.json; ``state`` is the backbone's
        gathered state dict, where its own parameters are sharded."""
        from huggingface_hub import save_torch_state_dict

        path, settings = Path(path), self.settings()
        path.mkdir(parents=True, exist_ok=True)
        state = dict(self.backbone.state_dict() if state is None else state)
        if not settings["vq"]:
            state |= {name: value.to(self.backbone.device) for name, value in self.vq.state().items()}
        save_torch_state_dict(state, path)
        torch.save({"weight": self.codebook.cpu()}, path / "image_embedding.pt")
        self.tokenizer.save_pretrained(path)
        (path / "config.json").write_text(json.dumps(self.backbone.released(), indent=1))
        (path / "policy.json").write_text(json.dumps(settings, indent=1))

    @staticmethod
    def read(directory: Path, dtype: torch.dtype, device: str) -> dict:
        from transformers import AutoTokenizer, PreTrainedConfig

        # a config of its own: of config.json, whose model_type transformers does not know, it would warn
        tokenizer = AutoTokenizer.from_pretrained(directory, config=PreTrainedConfig())
        return {
            "backbone": load_backbone(directory, dtype, device),
            "tokenizer": tokenizer,
            "codebook": read_table(directory / "image_embedding.pt").to(device),
        }

    @staticmethod
    def released_settings(directory: Path, parts: dict) -> dict:
        tokenizer = parts["tokenizer"]
        begin, end = tokenizer.convert_tokens_to_ids(["<begin_of_image>", "<end_of_image>"])
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        ids = {"bos_id": tokenizer.bos_token_id, "begin_id": begin, "end_id": end, "pad_id": pad}
        absent = [name for name, value in ids.items() if value is None]
        if absent:
            raise ValueError(f"{directory}: the tokenizer has no {', '.join(absent)} (Janus's image tokens)")
        return {"vq": ""} | ids  # the checkpoint itself holds it

    @staticmethod
    def sizes(length: int | None, max_prompt: int | None) -> dict:
        return {"length": length, "max_text": max_prompt and max_prompt + 2}


class Backbone(nn.Module):
    """A LlamaModel with an embedding, aligner and head for image codes, under the released names. codes: K;
    code_dim: width of their embedding; head_dim: of the head's inner layer."""

    def __init__(self, config, codes: int, code_dim: int, head_dim: int) -> None:
        super().__init__()
        from transformers import LlamaModel

        self.config, width = config, config.hidden_size
        self.language_model = nn.Module()
        self.language_model.model = LlamaModel(config)
        self.gen_embed = nn.Embedding(codes, code_dim)
        self.gen_aligner = Aligner(code_dim, width)
        self.gen_head = Head(width, head_dim, codes)

    @property
    def device(self) -> torch.device:
        return self.gen_embed.weight.device

    def get_decoder(self) -> nn.Module:
        return self.language_model.model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.language_model.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.gen_head

    def released(self) -> dict:
        """config.json as FUDOKI's."""
        llama, (codes, code_dim) = self.config, self.gen_embed.weight.shape
        head_dim = self.gen_head.output_mlp_projector.out_features
        sizes = {name: getattr(llama, name) for name in SIZES}
        return {
            "model_type": "multi_modality",
            "language_config": sizes | {"rope_theta": llama.rope_parameters["rope_theta"]},
            "gen_vision_config": {"params": {"image_token_size": codes, "n_embed": code_dim}},
            "gen_head_config": {"params": {"image_token_embed": head_dim}},
        }


class Aligner(nn.Module):
    def __init__(self, code_dim: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(code_dim, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Head(nn.Module):
    def __init__(self, width: int, inner: int, codes: int) -> None:
        super().__init__()
        self.output_mlp_projector = nn.Linear(width, inner)
        self.vision_head = nn.Linear(inner, codes)

    def forward(self, h: Tensor) -> Tensor:
        return self.vision_head(F.gelu(self.output_mlp_projector(h)))


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


def load_backbone(directory: Path, dtype: torch.dtype, device: str) -> Backbone:
    """The generating half of a released checkpoint."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    path = directory / "config.json"
    released = weights.read_json(path)
    try:
        llama = released["language_config"]
        vision = released["gen_vision_config"]["params"]
        sizes = (vision["image_token_size"], vision["n_embed"])
        inner = released["gen_head_config"]["params"]["image_token_embed"]
    except KeyError as error:
        raise ValueError(f"{path}: {error} missing, which FUDOKI's config has") from None
    rope = {"rope_type": "default", "rope_theta": float(llama.get("rope_theta", 10000.0))}
    known = {name: llama[name] for name in SIZES if name in llama}
    config = LlamaConfig(rope_parameters=rope, is_causal=False, tie_word_embeddings=False, **known)
    with torch.device("meta"):
        backbone = Backbone(config, *sizes, inner)
    weights.fill(backbone, directory, dtype, device, lambda n: None if n.startswith(NOT_USED) else n)
    backbone.language_model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)  # in no checkpoint
    return backbone.eval()


def read_table(path: Path) -> Tensor:
    """The metric path's table [K, d], stored as an nn.Embedding, its state or a tensor and nothing else."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; FUDOKI's release has its table of image embeddings there")
    return weights.read_table(path, "weight")
