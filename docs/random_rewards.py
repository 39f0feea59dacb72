"""Rewards of a tiny random CLIP: they mean nothing, and stand for reward models in a run through a server."""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

from tiny_rewards import save_clip  # noqa: E402

from eval import clip_score, pickscore  # noqa: E402

CHECKPOINT = save_clip(Path(tempfile.mkdtemp()))
_clip, _pickscore = (
    clip_score.reward(model=CHECKPOINT),
    pickscore.reward(model=CHECKPOINT, processor=CHECKPOINT),
)


def random_clip(rows, images):
    return {"random_clip": _clip(rows, images)["clip"]}


def random_pickscore(rows, images):
    return {"random_pickscore": _pickscore(rows, images)["pickscore_raw"]}
