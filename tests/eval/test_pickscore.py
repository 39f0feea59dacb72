import math

import numpy as np
import pytest
import torch
from tiny_rewards import picture, save_clip

from eval import clip_score, pickscore


def test_pickscore_reports_raw_and_trains_on_a_26th(monkeypatch):
    """K13: cosine .22 at scale 100 is reported as 22.0 and trained on as 0.846."""
    cosine = lambda prompts, pictures: torch.full((len(prompts),), 0.22)  # noqa: E731
    monkeypatch.setattr(pickscore, "load_clip", lambda *_: (cosine, 100.0))
    scores = pickscore.reward()([{"prompt": "a cat"}], [picture(8, 8)])
    assert list(scores) == ["pickscore", "pickscore_raw"]
    assert scores["pickscore_raw"] == pytest.approx([22.0])
    assert scores["pickscore"] == pytest.approx([0.846], abs=5e-4)


def test_pickscore_advantages_are_equal_for_raw_and_reward():
    """K13: the division is monotone, so the group advantage (Eq. 4) does not see it beyond its epsilon."""
    raw = np.array([20.1, 21.7, 22.4, 19.8])
    advantage = lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-5)  # noqa: E731
    np.testing.assert_allclose(advantage(raw), advantage(raw / pickscore.SCALE), atol=1e-3)


def test_pickscore_is_scale_times_cosine_of_the_checkpoint(tmp_path):
    from transformers import CLIPModel

    checkpoint = save_clip(tmp_path)
    rows = [{"prompt": "a red cat"}, {"prompt": "two dogs"}, {"prompt": "x"}]
    images = [picture(32, 32), picture(48, 64, 5), picture(40, 33, 7)]
    scale = math.exp(CLIPModel.from_pretrained(checkpoint).logit_scale.item())
    cosine = clip_score.reward(model=checkpoint)(rows, images)["clip"]
    scores = pickscore.reward(model=checkpoint, processor=checkpoint, batch=2)(rows, images)
    np.testing.assert_allclose(scores["pickscore_raw"], scale * cosine, atol=1e-5)
    np.testing.assert_allclose(scores["pickscore"], scale * cosine / 26, atol=1e-6)
