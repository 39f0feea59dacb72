"""``clip``: cosine between a picture and its caption in CLIP's space (Radford et al., 2021), -1..1."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from eval.reward_model import batched, pretrained, pretrained_model

MODEL = "openai/clip-vit-large-patch14"


def load_clip(model: str, processor: str, device: str) -> tuple[Callable[[list[str], list], Tensor], float]:
    """``cosine(prompts, PIL images) -> [b]`` of a CLIP checkpoint, and its exp(logit scale).

    ``processor`` is where tokenizer and image processor lie. A caption longer than the text encoder is cut.
    """
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

    clip = pretrained_model(CLIPModel, model).to(device)
    tokenizer = pretrained(AutoTokenizer, processor)
    # The PIL backend resizes as the authors did, and alike with and without torchvision.
    preprocess = pretrained(AutoImageProcessor, processor, backend="pil")
    limit = clip.config.text_config.max_position_embeddings

    def cosine(prompts: list[str], pictures: list) -> Tensor:
        text = tokenizer(prompts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        out = clip(
            input_ids=text["input_ids"].to(device),
            attention_mask=text["attention_mask"].to(device),
            pixel_values=preprocess(pictures, return_tensors="pt")["pixel_values"].to(device),
        )
        return (out.image_embeds * out.text_embeds).sum(-1)  # both are of length 1

    return cosine, clip.logit_scale.exp().item()


def reward(
    device: str = "cpu", model: str = MODEL, batch: int = 64
) -> Callable[[list[dict], list], dict[str, np.ndarray]]:
    """``clip`` of rows and uint8 images [3, H, W]. Raises ValueError when the weights do not load or fit."""
    cosine, _ = load_clip(model, model, device)
    scores = batched(cosine, batch)
    return lambda rows, images: {"clip": scores(rows, images)}
