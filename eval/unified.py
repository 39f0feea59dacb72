"""``unified``: UnifiedReward (Wang et al., 2025), a VLM that writes a mark, 1 to 5, after ``Final Score:``.

Question and rule are those of Flow-GRPO: the mark over 5, and 0 where no mark is found. The judge is the
OpenAI-compatible endpoint that $UNIFIED_URL names (http://host:port/v1; $UNIFIED_MODEL is the name it serves,
$UNIFIED_KEY its key, if any), else a local transformers model, $UNIFIED_MODEL or LOCAL.
"""

import os
import re
from collections.abc import Callable

import numpy as np

from eval.reward_model import pil_images
from eval.vlm import endpoint_judge, local_judge

SERVED = "UnifiedReward-7b-v1.5"  # LLaVA-NeXT format, which SGLang serves and transformers does not load
LOCAL = (
    "CodeGoat24/UnifiedReward-qwen-7b"  # the same authors' Qwen2.5-VL model: its marks are not those of v1.5
)
SIDE = 512  # pixels; the judge sees every picture at this size

# The judge's input format, word for word as Flow-GRPO sends it to UnifiedReward-7b-v1.5 (both MIT): in other
# words, or without the line breaks, the marks would not be those of the papers.
QUESTION = (
    "You are given a text caption and a generated image based on that caption. Your task is to evaluate this "
    "image based on two key criteria:\n"
    "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider "
    "the accuracy of depicted objects, their relationships, and attributes as described in the caption.\n"
    "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail "
    "preservation, color accuracy, and overall aesthetic appeal.\n"
    "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
    "Your task is provided as follows:\nText Caption: [{prompt}]"
)
IMAGE_MARK = "<image>\n"  # stands before the question where it goes to an endpoint
MARK = re.compile(r"Final Score:\s*([1-5](?:\.\d+)?)(?!\d)")


def mark(answer: str) -> float:
    """The mark, 1..5, after the first ``Final Score:`` of an answer; 0 where there is none."""
    found = MARK.search(answer)
    return min(float(found[1]), 5.0) if found else 0.0


def reward(
    device: str = "cpu",
    *,
    url: str | None = None,
    model: str | None = None,
    key: str | None = None,
    question: str = QUESTION,
    **judge_options,
) -> Callable[[list[dict], list], dict[str, np.ndarray]]:
    """``unified``, mark / 5, and ``unified_unread``, 1 where an answer has no mark, of rows and uint8 images.

    ``question`` holds ``{prompt}``; ``judge_options`` go to eval.vlm. Raises ValueError when the model does
    not load, RewardServersDown when the endpoint does not answer.
    """
    from PIL import Image

    url = url or os.environ.get("UNIFIED_URL")
    model = model or os.environ.get("UNIFIED_MODEL") or (SERVED if url else LOCAL)
    if url:
        key = key or os.environ.get("UNIFIED_KEY")
        judge = endpoint_judge(url, model, key=key, **judge_options)
        question = IMAGE_MARK + question
    else:
        judge = local_judge(model, device, **judge_options)

    def score(rows: list[dict], images: list) -> dict[str, np.ndarray]:
        questions = [question.replace("{prompt}", row["prompt"]) for row in rows]
        pictures = [picture.resize((SIDE, SIDE), Image.BICUBIC) for picture in pil_images(images)]
        marks = np.array([mark(answer) for answer in judge(questions, pictures)], dtype=np.float64)
        return {"unified": marks / 5, "unified_unread": (marks == 0).astype(np.float64)}

    return score
