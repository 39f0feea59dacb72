"""URSA: images by uniform diffusion, a bidirectional Qwen3 with rotary positions in three axes."""

import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from models import weights
from models.ibq import IBQ
from models.image import ImagePolicy
from models.policy import Prompt

PIXELS = 512  # side of the released IBQ512 images; --length gives another
# released field -> Qwen3Config's
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
PATH = ("alpha", "c", "shift")  # fields of the scheduler file


class URSA(ImagePolicy):
    """Images of L = T H W codes out of K; x_t holds codes, noise or not: there is no [M].

    The row is ``[pad..] text`` (``text_length`` positions; the padding is attended, as it was in training),
    the begin-of-visual token, then the codes, row by row. Position l - 1 predicts code l. Code k is row
    ``text_vocab`` + k of the embedding.

    backbone: a ``Qwen3ForCausalLM`` whose ``lm_head`` has K rows, see ``qwen3``. vq: takes codes [B, H, W];
    ``save`` needs its ``save(path)``, or a ``source`` that begins with "tiny". grid: T, H, W, None for the
    released square. path_settings: what the checkpoint says of its path (``path``, ``alpha``, ``c``,
    ``power``, ``shift``), empty where it says nothing.
    """

    VQ = IBQ

    def __init__(
        self,
        backbone,
        tokenizer,
        vq,
        *,
        bov_id: int,
        pad_id: int,
        grid: tuple[int, int, int] | None = None,
        text_length: int = 320,
        text_vocab: int | None = None,
        path_settings: dict | None = None,
        codebook: Tensor | None = None,
    ) -> None:
        super().__init__(backbone, tokenizer, vq, codebook)
        self.grid = tuple(grid or square((PIXELS // vq.stride) ** 2))
        self.length = math.prod(self.grid)
        self.vocab_size = backbone.get_output_embeddings().out_features
        self.text_vocab = backbone.config.vocab_size - self.vocab_size if text_vocab is None else text_vocab
        self.bov_id, self.pad_id, self.text_length = bov_id, pad_id, text_length
        self.path_settings = dict(path_settings or {})
        config, table = backbone.config, positions(text_length, self.grid)
        rotary = Rotary(table, config.head_dim, config.rope_parameters["rope_theta"])
        backbone.get_decoder().rotary_emb = rotary.to(backbone.device)

    def hidden(self, prompt: Prompt, x_t: Tensor) -> Tensor:
        bov = x_t.new_full((len(x_t), 1), self.bov_id)
        ids = torch.cat([prompt.ids, bov, x_t + self.text_vocab], 1)
        states = self.backbone.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return states[:, -1 - x_t.shape[1] : -1]

    def encode(self, texts: list[str]) -> Prompt:
        """Left-padded to text_length; a longer text keeps its head."""
        rows = [self.tokenizer(text)["input_ids"][: self.text_length] for text in texts]
        return self.left_padded(rows, self.text_length)

    def decode(self, x_0: Tensor) -> Tensor:
        """codes [B, L] -> uint8 images [B, 3, h, w]; ValueError for more than one frame."""
        if self.grid[0] != 1:
            raise ValueError(f"URSA: a grid of {self.grid[0]} frames is a video, only images are decoded")
        return super().decode(x_0.view(len(x_0), *self.grid[1:]))

    def settings(self) -> dict:
        names = ("grid", "bov_id", "pad_id", "text_length", "text_vocab", "path_settings")
        source = str(getattr(self.vq, "source", ""))
        return {"kind": "ursa", "vq": source if source.startswith("tiny") else "vae"} | {
            name: getattr(self, name) for name in names
        }

    def save(self, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
        """The released layout (transformer, vae, tokenizer, scheduler) and policy.json; ``state`` is the
        backbone's gathered state dict, where its own parameters are sharded."""
        from huggingface_hub import save_torch_state_dict

        path, settings = Path(path), self.settings()
        for name in ("transformer", "scheduler"):
            (path / name).mkdir(parents=True, exist_ok=True)
        if settings["vq"] == "vae":
            self.vq.save(path / "vae")
        self.tokenizer.save_pretrained(path / "tokenizer")
        qwen = self.backbone.config
        config = {
            "_class_name": "URSATransformer3DModel",
            **{name: getattr(qwen, name) for name in (*SIZES, "head_dim", "rms_norm_eps")},
            "rope_theta": qwen.rope_parameters["rope_theta"],
            "lm_vocab_size": self.text_vocab,
            "lm_head_size": self.vocab_size,
            "bov_token_id": self.bov_id,
        }
        (path / "transformer/config.json").write_text(json.dumps(config, indent=1))
        state = self.backbone.state_dict() if state is None else state
        save_torch_state_dict(
            state, path / "transformer", filename_pattern="diffusion_pytorch_model{suffix}.safetensors"
        )
        if self.path_settings:
            scheduler = {"_class_name": "KineticOptimalScheduler"}
            scheduler |= {name: self.path_settings[name] for name in PATH if name in self.path_settings}
            if self.path_settings.get("path") == "mixture":
                scheduler["alpha"] = None
            (path / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler, indent=1))
        if self.codebook is not None:
            torch.save({"path.emb": self.codebook.cpu()}, path / "scheduler/scheduler_model.pth")
        (path / "model_index.json").write_text(json.dumps({"_class_name": "URSAPipeline"}))
        (path / "policy.json").write_text(json.dumps(settings, indent=1))

    @staticmethod
    def read(directory: Path, dtype: torch.dtype, device: str) -> dict:
        from transformers import AutoTokenizer

        backbone = load_qwen3(directory / "transformer", dtype, device)
        tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
        table = directory / "scheduler/scheduler_model.pth"
        codebook = weights.read_table(table, "path.emb").to(device) if table.exists() else None
        return {"backbone": backbone, "tokenizer": tokenizer, "codebook": codebook}

    @staticmethod
    def released_settings(directory: Path, parts: dict) -> dict:
        config = weights.read_json(directory / "transformer/config.json")
        return {
            "vq": "vae",
            "bov_id": config.get("bov_token_id", 151652),
            "text_vocab": config["lm_vocab_size"],
            "pad_id": parts["tokenizer"].pad_token_id,
            "path_settings": scheduler_settings(directory / "scheduler"),
        }

    @staticmethod
    def sizes(length: int | None, max_prompt: int | None) -> dict:
        return {"grid": length and square(length), "text_length": max_prompt}


class Rotary(nn.Module):
    """Rotary angles of triples (T, H, W) in place of Qwen3's: position_ids are rows of ``table`` [S, 3].

    Of the head_dim / 2 frequencies the first 3 (head_dim // 8) turn with T, H, W in turn, the rest with H, W.
    """

    def __init__(self, table: Tensor, head_dim: int, base: float) -> None:
        super().__init__()
        if head_dim % 16:
            raise ValueError(f"URSA: head_dim {head_dim} must be a multiple of 16 for three rotary axes")
        self.head_dim, self.base = head_dim, base
        thirds = head_dim // 8
        axis = torch.tensor([0, 1, 2] * thirds + [1, 2] * ((head_dim // 2 - 3 * thirds) // 2))
        # integers: a cast of the model to bfloat16 leaves them alone
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, S, head_dim], of the dtype of x."""
        j = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32)
        angle = self.table[position_ids][..., self.axis] * self.base ** (-j / self.head_dim)
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def positions(text_length: int, grid: tuple[int, int, int]) -> Tensor:
    """[S, 3]: (i, i, i) of text and begin-of-visual, then (text_length + 1 + t, h, w) of the codes."""
    text = torch.arange(text_length + 1).unsqueeze(-1).expand(-1, 3)
    codes = torch.cartesian_prod(*(torch.arange(n) for n in grid))
    return torch.cat([text, codes + torch.tensor([text_length + 1, 0, 0])])


def qwen3(codes: int, **sizes):
    """A ``Qwen3ForCausalLM`` whose head predicts ``codes`` image codes only; sizes: fields of Qwen3Config."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(tie_word_embeddings=False, is_causal=False, **sizes)
    backbone = Qwen3ForCausalLM(config)
    backbone.lm_head = nn.Linear(config.hidden_size, codes, bias=False)
    backbone._init_weights(backbone.lm_head)
    return backbone


def load_qwen3(directory: Path, dtype: torch.dtype, device: str):
    """The transformer of a released checkpoint. Where its config has no head_dim it is 128: the public class
    does not pass one on."""
    released = weights.read_json(directory / "config.json")
    needed = (*SIZES, "rope_theta", "lm_head_size", "lm_vocab_size")
    absent = [name for name in needed if name not in released]
    if absent:
        raise ValueError(f"{directory / 'config.json'}: {', '.join(absent)} missing, which URSA's config has")
    with torch.device("meta"):
        backbone = qwen3(
            released["lm_head_size"],
            **{name: released[name] for name in SIZES},
            head_dim=released.get("head_dim", 128),
            rms_norm_eps=released.get("rms_norm_eps", 1e-6),
            rope_parameters={"rope_type": "default", "rope_theta": float(released["rope_theta"])},
        )
    weights.fill(backbone, directory, dtype, device)
    return backbone.eval()


def scheduler_settings(directory: Path) -> dict:
    """What the scheduler file says. An alpha of null is the mixture, as in the public class; no alpha says
    nothing of the path. {} where there is no file."""
    path = directory / "scheduler_config.json"
    if not path.exists():
        return {}
    released = weights.read_json(path)
    settings = {name: released[name] for name in PATH if released.get(name) is not None}
    if "alpha" in released:
        settings |= {"path": "mixture" if released["alpha"] is None else "metric", "power": 1}
    return settings


def square(length: int) -> tuple[int, int, int]:
    side = round(length**0.5)
    if side * side != length:
        raise ValueError(f"--length {length}: must be the codes of a square image, such as 1024 (32 x 32)")
    return 1, side, side
