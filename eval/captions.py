"""Plain prompts for pictures (PickScore's, HPS's, your own); they have no reward, so give ``--reward``."""

from pathlib import Path

from eval.jsonl import read_jsonl
from eval.task import Task


def task(protocol: str | None = None) -> Task:
    """Prompts out of ``--data``: the lines of a text file, or ``prompt`` or ``caption`` of jsonl rows.

    Raises ValueError for any protocol: there is but one.
    """
    if protocol is not None:
        raise ValueError(f"--protocol {protocol}: --task captions has none")
    return Task("captions", "image", rows, lambda rows, images: {}, weights={}, score="")


def rows(split: str, data: str | None) -> list[dict]:
    """The prompts of ``data``, a file (the same for both splits), or a directory with train and test files.

    Other fields of a jsonl row are kept. Raises ValueError naming the file and the row without a prompt.
    """
    if data is None:
        raise ValueError("--task captions: give --data PATH, a text file with one prompt a line, or jsonl")
    path = split_file(data, split)
    if not path.endswith(".jsonl"):
        return [{"prompt": line} for _, line in read_lines(path)]
    found = []
    for row in read_jsonl(path):
        prompt = row.get("prompt", row.get("caption"))
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{path}: row {len(found) + 1} lacks a prompt or caption")
        found.append(row | {"prompt": prompt})
    return found


def split_file(data: str, split: str) -> str:
    """``data`` itself, or when it is a directory the one file in it that is named after the split.

    So Flow-GRPO's directories work (``train.txt``, ``test_metadata.jsonl``). ValueError unless one file fits.
    """
    if not Path(data).is_dir():
        return data
    found = [p for p in sorted(Path(data).glob(f"{split}*")) if p.suffix in (".txt", ".jsonl")]
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise ValueError(f"--data {data}: one file {split}*.txt or {split}*.jsonl expected, found {names}")
    return str(found[0])


def read_lines(path: str) -> list[tuple[int, str]]:
    """(line number from 1, text without surrounding blanks) of the lines that hold any.

    Raises ValueError naming the path when it cannot be read as UTF-8 or has no such line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; expected one prompt a line") from None
    found = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ValueError(f"{path}: holds no prompt")
    return found
