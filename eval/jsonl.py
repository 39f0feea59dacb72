"""One reader of jsonl rows, with errors that name the file and the line."""

import json
from pathlib import Path


def read_jsonl(path: str, required: tuple[str, ...] = ()) -> list[dict]:
    """The objects of a jsonl file, one a line; blank lines are skipped.

    Raises ValueError naming ``path:line`` for a line that is no JSON object or lacks a required field, and
    naming the path when there is no such file, it is not UTF-8 text, or it holds no row.
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
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        missing = [field for field in required if field not in row]
        if missing:
            raise ValueError(f"{path}:{number}: lacks the field {', '.join(missing)}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no rows")
    return rows
