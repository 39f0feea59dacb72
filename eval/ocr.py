"""Text in pictures: the prompt quotes a text, the reward is how close a recogniser's reading comes to it.

The rule is that of Flow-GRPO and UDM-GRPO. They read with PaddleOCR, here it is rapidocr-onnxruntime, whose
wheel holds models of PaddleOCR as ONNX files, so nothing is downloaded.
"""

import functools
import os
import re
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor

from eval.captions import read_lines, split_file
from eval.task import Task

QUOTES = re.compile('["“”]')


def task(protocol: str | None = None) -> Task:
    """Prompts with a quoted text, out of ``--data``, with component ``ocr``.

    Raises ValueError for any protocol: there is but one.
    """
    if protocol is not None:
        raise ValueError(f"--protocol {protocol}: --task ocr has none")

    def lazy_reward(rows: list[dict], images: list[Tensor]) -> dict[str, np.ndarray]:
        return scores(rows, images, load_reader() if rows else None)

    lazy_reward.load = load_reader  # as in eval/geneval.py
    return Task("ocr", "image", rows, lazy_reward, {"ocr": 1.0}, "ocr")


def rows(split: str, data: str | None) -> list[dict]:
    """The lines of ``data``, a text file, or a directory with train.txt and test.txt.

    Raises ValueError naming the file and the line of a prompt that quotes nothing.
    """
    if data is None:
        raise ValueError(
            "--task ocr: the prompts are on no data hub; give --data PATH, a text file with one prompt "
            "a line, such as dataset/ocr/test.txt of yifan123/flow_grpo"
        )
    path = split_file(data, split)
    lines = read_lines(path)
    for number, prompt in lines:
        if not target(prompt):
            raise ValueError(f"{path}:{number}: no text in double quotes, which the picture should show")
    return [{"prompt": prompt} for _, prompt in lines]


def reward(device: str = "cpu"):
    """``ocr`` in 0..1, 0 for prompts that quote nothing; the recogniser runs on the CPU in any case."""
    read = load_reader()
    return lambda rows, images: scores(rows, images, read)


def target(prompt: str) -> str:
    """What is to be read: from the first double quote to the second, less spaces, lower case; "" if none."""
    return _plain("".join(QUOTES.split(prompt)[1:2]))


def closeness(prompt: str, lines: list[tuple[str, float]]) -> float:
    """1 - distance / length of the target, in 0..1, of the (text, score) lines that were read.

    Lines of score 0 do not count; the others are joined in order. The distance is 0 where the target is part
    of what was read, however much else there is, else Levenshtein's, the target's length at most.
    """
    from rapidfuzz.distance import Levenshtein

    wanted = target(prompt)
    read = _plain("".join(text for text, score in lines if score > 0))
    if not wanted or not read:
        return 0.0
    distance = 0 if wanted in read else min(Levenshtein.distance(read, wanted), len(wanted))
    return 1 - distance / len(wanted)


def scores(rows: list[dict], images: list[Tensor], read) -> dict[str, np.ndarray]:
    """``ocr`` [n], and ``ocr_errors`` [n]: 1 where ``read(picture [H, W, 3])`` raised, which scores 0."""

    def attempt(picture: np.ndarray) -> list[tuple[str, float]] | Exception:
        try:
            return read(picture)
        except Exception as error:
            return error

    pictures = [image.permute(1, 2, 0).contiguous().cpu().numpy() for image in images]
    found, errors = np.zeros(len(images)), np.zeros(len(images))
    for i, (row, lines) in enumerate(zip(rows, _readers().map(attempt, pictures), strict=True)):
        if isinstance(lines, Exception):
            warnings.warn(f"ocr: a picture could not be read ({lines!r}); it scores 0", stacklevel=2)
            errors[i] = 1
        else:
            found[i] = closeness(row["prompt"], lines)
    return {"ocr": found, "ocr_errors": errors}


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count())


@functools.cache
def load_reader():
    """``read(picture)``: uint8 [H, W, 3] RGB to (text, score) lines from the top; one engine a thread.

    SystemExit if it is not installed: an exception would count as a bad picture and let the run go on.
    """
    try:
        import rapidfuzz  # noqa: F401  needed by ``closeness``
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise SystemExit(f"ocr: pip install rapidocr-onnxruntime rapidfuzz ({error})") from None
    engine_of = functools.partial(RapidOCR, intra_op_num_threads=1, inter_op_num_threads=1)
    mine = threading.local()
    mine.engine = engine_of()  # a broken installation shows now, not as pictures that cannot be read

    def read(picture: np.ndarray) -> list[tuple[str, float]]:
        if not hasattr(mine, "engine"):
            mine.engine = engine_of()
        lines, _ = mine.engine(picture[..., ::-1])  # as OpenCV has it: BGR
        return [(text, float(score)) for _, text, score in lines or []]

    return read


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()
