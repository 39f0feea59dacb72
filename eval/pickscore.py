"""``pickscore``: CLIP-H tuned on what people picked (Kirstain et al., 2023).

What papers report is ``pickscore_raw`` = exp(logit scale) x cosine, mostly 17..24. The reward divides it by
26, as Flow-GRPO does, to lie near 1; group advantages are the same for both.
"""

from collections.abc import Callable

import numpy as np

from eval.clip_score import load_clip
from eval.reward_model import batched

MODEL = "yuvalkirstain/PickScore_v1"
PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the authors take tokenizer and preprocessing from here
SCALE = 26.0


def reward(
    device: str = "cpu", model: str = MODEL, processor: str = PROCESSOR, batch: int = 64
) -> Callable[[list[dict], list], dict[str, np.ndarray]]:
    """``pickscore`` and ``pickscore_raw`` of rows and uint8 images [3, H, W].

    Raises ValueError when the weights do not load or fit.
    """
    cosine, scale = load_clip(model, processor, device)
    scores = batched(cosine, batch)

    def score(rows: list[dict], images: list) -> dict[str, np.ndarray]:
        raw = scale * scores(rows, images)
        return {"pickscore": raw / SCALE, "pickscore_raw": raw}

    return score
