"""``imagereward``: BLIP reads the caption with the picture in sight (Xu et al., 2023).

BLIP ViT-L at 224 pixels, caption cut at 35 tokens, text encoder with cross-attention, state of [CLS] into
five linear layers without activations, then (x - 0.16717) / 1.03334. So 0 is an average picture, scores below
0 are nothing wrong, and there is no bound.
"""

import json
import re
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from eval.reward_model import batched, fetch, fill, pretrained

MODEL = "THUDM/ImageReward"  # ImageReward.pt and med_config.json
TOKENIZER = "google-bert/bert-base-uncased"
TOKENS = 35
MEAN, STD = 0.16717362830052426, 1.0333394966054072
HEAD_WIDTH = 64  # of every attention head of ViT-B and ViT-L

# Released names (regular expressions) -> transformers' names.
RENAMES = (
    (r"^blip\.text_encoder\.", "text."),
    (r"^blip\.visual_encoder\.", "vision."),
    (r"^mlp\.layers\.", "mlp."),
    (r"^vision\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^vision\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^vision\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^vision\.norm\.", "vision.post_layernorm."),
    (r"^vision\.blocks\.(\d+)\.norm(\d)\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^vision\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"^vision\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^vision\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
)
# BLIP's contrastive projections and a constant that transformers builds itself: the score does not use them.
UNUSED = re.compile(r"^blip\.(vision_proj|text_proj)\.|\.position_ids$")


class ImageReward(nn.Module):
    """Vision encoder, text encoder and head, sized by the released weights and BLIP's med_config.json."""

    def __init__(self, state: dict[str, Tensor], med_config: dict):
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        width, _, patch, _ = state["vision.embeddings.patch_embedding.weight"].shape
        patches = state["vision.embeddings.position_embedding"].shape[1] - 1
        vision = BlipVisionConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=len({key.split(".")[3] for key in state if key.startswith("vision.encoder.")}),
            num_attention_heads=width // HEAD_WIDTH,
            image_size=round(patches**0.5) * patch,
            patch_size=patch,
            layer_norm_eps=1e-6,  # transformers' own default is 1e-5
        )
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "layer_norm_eps",
        )
        text = BlipTextConfig(
            **{size: med_config[size] for size in sizes},
            encoder_hidden_size=width,
            is_decoder=True,  # transformers' word for "has cross-attention"; nothing here is causal
        )
        self.image_size = vision.image_size
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        self.mlp = nn.Sequential(  # dropout keeps the released numbering; there are no activations
            nn.Linear(text.hidden_size, 1024),
            nn.Dropout(0.2),
            nn.Linear(1024, 128),
            nn.Dropout(0.2),
            nn.Linear(128, 64),
            nn.Dropout(0.1),
            nn.Linear(64, 16),
            nn.Linear(16, 1),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        """Standardised scores [B] of token ids [B, T] and pixels [B, 3, S, S]."""
        picture = self.vision(pixel_values=pixel_values).last_hidden_state
        caption = self.text(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=picture,
            encoder_attention_mask=picture.new_ones(picture.shape[:2], dtype=torch.long),
        ).last_hidden_state
        return (self.mlp(caption[:, 0]).squeeze(-1) - MEAN) / STD


def load(model: str = MODEL) -> ImageReward:
    """The released model; ValueError names the tensors that are missing, unexpected or of another shape."""
    released = torch.load(fetch(model, "ImageReward.pt"), map_location="cpu", weights_only=True)
    med_config = json.loads(fetch(model, "med_config.json").read_text())
    state = {_rename(name): value for name, value in released.items() if not UNUSED.search(name)}
    try:
        blank = ImageReward(state, med_config)
    except KeyError as error:
        raise ValueError(f"{model}: not an ImageReward checkpoint, {error} is missing") from error
    return fill(blank, state, model)


def reward(
    device: str = "cpu", model: str = MODEL, tokenizer: str = TOKENIZER, batch: int = 32
) -> Callable[[list[dict], list], dict[str, np.ndarray]]:
    """``imagereward`` of rows and uint8 images [3, H, W].

    Raises ValueError when the weights do not load or fit.
    """
    from transformers import AutoTokenizer, CLIPImageProcessorPil

    scorer = load(model).to(device)
    tokens = pretrained(AutoTokenizer, tokenizer)
    side = scorer.image_size  # shorter side, then the middle square; mean and deviation are CLIP's
    preprocess = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )

    def score(prompts: list[str], pictures: list) -> Tensor:
        text = tokens(prompts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt")
        return scorer(
            text["input_ids"].to(device),
            text["attention_mask"].to(device),
            preprocess(pictures, return_tensors="pt")["pixel_values"].to(device),
        )

    scores = batched(score, batch)
    return lambda rows, images: {"imagereward": scores(rows, images)}


def _rename(name: str) -> str:
    for pattern, ours in RENAMES:
        name = re.sub(pattern, ours, name)
    return name
