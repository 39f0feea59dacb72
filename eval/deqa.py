"""``deqa``: DeQA-Score (You et al., 2025), picture quality alone, without the caption.

``deqa_raw``, 1..5, is what papers report; the reward is a fifth of it, as in Flow-GRPO. mPLUG-Owl2 is not in
transformers: the released code of the model runs on transformers 4.36 only, so this module serves it from an
environment of its own, ``python -m eval.reward_server --reward deqa``, and training names that server:
``--reward http://host:8000/deqa=1``.
"""

from collections.abc import Callable

import numpy as np

from eval.reward_model import pil_images

MODEL = "zhiyuanyou/DeQA-Score-Mix3"


def components(raw) -> dict[str, np.ndarray]:
    """``deqa``, 0.2..1, and ``deqa_raw`` of raw scores; ValueError for a score that is not within 1..5."""
    raw = np.asarray([float(value) for value in raw], dtype=np.float64)
    if not ((raw >= 1 - 1e-3) & (raw <= 5 + 1e-3)).all():  # half precision; NaN fails both
        raise ValueError(f"deqa: scores within 1..5 expected, got {raw.tolist()}")
    return {"deqa": raw / 5, "deqa_raw": raw}


def reward(
    device: str = "cpu", model: str = MODEL, batch: int = 16
) -> Callable[[list[dict], list], dict[str, np.ndarray]]:
    """``deqa`` and ``deqa_raw`` of uint8 images [3, H, W].

    Runs the code that the model's repository holds. Raises ValueError on transformers 5, which cannot run it.
    """
    import torch
    import transformers

    if int(transformers.__version__.split(".")[0]) >= 5:
        raise ValueError(
            f"deqa does not run on transformers {transformers.__version__}: start `python -m "
            "eval.reward_server --reward deqa` in an environment with transformers 4.36.1, and name it here: "
            "--reward http://host:8000/deqa=1"
        )
    from transformers import AutoModelForCausalLM

    scorer = AutoModelForCausalLM.from_pretrained(
        model,
        trust_remote_code=True,
        attn_implementation="eager",
        torch_dtype=torch.float16 if device.startswith("cuda") else torch.float32,
    )
    scorer = scorer.to(device).eval()

    @torch.no_grad()
    def score(rows: list[dict], images: list) -> dict[str, np.ndarray]:
        raw = []
        for i in range(0, len(images), batch):
            raw += scorer.score(pil_images(images[i : i + batch])).tolist()
        return components(raw)

    return score
