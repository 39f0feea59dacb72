"""Rows of a jsonl file or a hub data set, with errors that name the file and the line."""

import json
from collections.abc import Callable
from pathlib import Path

Check = Callable[[dict], None]  # raises ValueError for a row that a task cannot use


def read_jsonl(path: str, required: tuple[str, ...] = (), check: Check | None = None) -> list[dict]:
    """The objects of a jsonl file, one a line; blank lines are skipped.

    Raises ValueError naming ``path:line`` for a line that is no JSON object, lacks a required field or fails
    ``check``, and naming the path when there is no such file, it is not UTF-8 text, or it holds no row.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text; expected jsonl, one JSON object a line") from None
    rows = []
    # Not splitlines(): it also breaks at U+2028 and the like, which JSON allows inside a string.
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        rows.append(_checked(row, f"{path}:{number}", required, check))
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    return rows


def read_hub(
    repo: str,
    split: str,
    config: str | None = None,
    required: tuple[str, ...] = (),
    check: Check | None = None,
) -> list[dict]:
    """The rows of a data set of the Hugging Face hub, through ``datasets`` (downloaded once, then cached).

    Raises ValueError when it cannot be had, or naming the row that is malformed.
    """
    from datasets import load_dataset

    try:
        rows = list(load_dataset(repo, config, split=split))
    except Exception as error:  # offline, no such data set, no access: datasets has no common class for them
        reason = str(error).split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{repo} ({split}) cannot be loaded: {reason}; or give a jsonl file by --data"
        ) from error
    return [_checked(row, f"{repo} ({split}) row {i}", required, check) for i, row in enumerate(rows)]


def check_texts(row: dict, fields: tuple[str, ...]) -> None:
    """Raises ValueError unless each field is a text that is not blank."""
    for field in fields:
        if not isinstance(row[field], str) or not row[field].strip():
            raise ValueError(f"{field} is not a text")


def _checked(row, where: str, required: tuple[str, ...], check: Check | None) -> dict:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    missing = [field for field in required if field not in row]
    if missing:
        raise ValueError(f"{where}: lacks the field {', '.join(missing)}")
    if check:
        try:
            check(row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return row
