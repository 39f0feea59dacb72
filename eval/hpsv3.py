"""``hpsv3``: human preference as read by a Qwen2-VL (Ma et al., 2025). Unbounded, higher is better.

The picture, at about 256 x 28 x 28 pixels, and an instruction with the caption go through the language model.
The state at ``<|Reward|>`` goes through a small float32 head with two outputs, mean and spread of the
preference: the mean is the score.
"""

import ast
import hashlib
import importlib.metadata
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from eval.reward_model import batched, fetch, fill, pretrained, pretrained_model
from eval.vlm import chat, encode, plain

MODEL = "MizzenAI/HPSv3"  # HPSv3.safetensors, all tensors under the names of transformers 4.45
BASE = "Qwen/Qwen2-VL-7B-Instruct"  # config, tokenizer, image processor
PIXELS = 256 * 28 * 28
TOKEN = "<|Reward|>"
INSTRUCTION_SHA256 = "f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c"


def released_instruction() -> str:
    """The instruction the weights were trained with, ``{text_prompt}`` in place of the caption.

    It is read, not run, from the authors' package (MIT). Raises ValueError where that is absent or another.
    """
    needs = "hpsv3 needs the instruction its weights were trained with: pip install --no-deps hpsv3==1.0.0"
    try:
        files = importlib.metadata.files("hpsv3") or []
        source = next(file for file in files if file.name == "data_collator_qwen.py").read_text()
    except (importlib.metadata.PackageNotFoundError, StopIteration, OSError):
        raise ValueError(needs) from None
    texts = {
        node.targets[0].id: node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    text = texts.get("INSTRUCTION", "") + texts.get("prompt_with_special_token", "")
    if hashlib.sha256(text.encode()).hexdigest() != INSTRUCTION_SHA256:
        raise ValueError(f"{needs} (the installed one has another instruction)")
    return text


def load(model: str, base: str, tokenizer, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Qwen2-VL without its output layer, and the head; ValueError names the tensors that do not fit."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, Qwen2VLModel

    backbone, head = {}, {}
    for name, value in load_file(fetch(model, "HPSv3.safetensors")).items():
        part, _, rest = name.partition(".")
        if part == "rm_head":
            head[rest] = value.float()
        elif part == "model":
            backbone[f"language_model.{rest}"] = value
        elif part != "lm_head":
            backbone[name] = value
    config = pretrained(AutoConfig, base)
    config.text_config.vocab_size = len(tokenizer)  # the released embedding is cut to it, TOKEN included
    width = config.text_config.hidden_size
    body = pretrained_model(Qwen2VLModel, None, config=config, state_dict=backbone, dtype=dtype)
    mlp = nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    return body, fill(mlp, head, f"{model} rm_head")


def reward(
    device: str = "cpu",
    model: str = MODEL,
    base: str = BASE,
    instruction: str | None = None,
    batch: int = 8,
    dtype: torch.dtype | None = None,
) -> Callable[[list[dict], list], dict[str, np.ndarray]]:
    """``hpsv3`` of rows and uint8 images [3, H, W].

    instruction: None takes the released one; another must hold ``{text_prompt}`` and ``<|Reward|>``. dtype of
    the backbone: bfloat16 (as released) on a GPU, float32 elsewhere. Raises ValueError when the weights do
    not load or fit.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    instruction = instruction or released_instruction()
    tokenizer = pretrained(AutoTokenizer, base)
    tokenizer.add_tokens([TOKEN], special_tokens=True)
    token_id = tokenizer.convert_tokens_to_ids(TOKEN)
    size = {"shortest_edge": PIXELS, "longest_edge": PIXELS}
    image_processor = pretrained(AutoImageProcessor, base, backend="pil", size=size)
    dtype = dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    body, head = (part.to(device) for part in load(model, base, tokenizer, dtype))

    def score(prompts: list[str], pictures: list) -> Tensor:
        texts = [
            chat(instruction.replace("{text_prompt}", plain(prompt, tokenizer)), tokenizer)
            for prompt in prompts
        ]
        inputs = encode(texts, pictures, tokenizer, image_processor, body, "right")
        ids = inputs["input_ids"]
        # The released model counts positions along the row in all three axes, picture included: the forward
        # pass of transformers 4.45 gave a picture no positions of its own (its generate did).
        positions = torch.arange(ids.shape[1], device=device).expand(3, *ids.shape)
        state = body(**inputs, position_ids=positions).last_hidden_state[ids == token_id]  # [b, D]
        return head(state.float())[:, 0]

    scores = batched(score, batch)
    return lambda rows, images: {"hpsv3": scores(rows, images)}
