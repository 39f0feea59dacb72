"""Pictures with captions as base data of an image policy, encoded once and cached.

Read are webdataset tars and parquet files as of BLIP3o, and jsonl: a file, or a directory of them.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eval.jsonl import read_jsonl

CAPTIONS = ("caption", "prompt", "text", "txt")  # names of the caption, in a row or as an extension in a tar
PICTURES = ("image", "jpg", "jpeg", "png", "webp")
BATCH = 64  # pictures that are encoded at once


def load_pairs(path: str | Path, policy, cache_dir: str | Path) -> tuple[list[str], Tensor]:
    """(captions, x_0 [n, L]): the picture of each caption as response ids of ``policy``, on the CPU.

    A picture is resized to cover the size that the policy paints, and cropped in the middle. The codes of a
    file are kept in ``cache_dir`` under a name made of the file (path, size, date) and the image tokenizer:
    what is encoded once is only read again. Files are in order of name, pairs in order of file. Raises
    ValueError, naming file and row, for a pair without a caption or with a picture that cannot be read.
    """
    with torch.no_grad():
        device = next(policy.parameters()).device
        any_codes = torch.zeros(1, policy.length, dtype=torch.long, device=device)
        height, width = policy.decode(any_codes).shape[-2:]
    captions, codes = [], []
    for file in files(Path(path)):
        cached = Path(cache_dir) / f"{key(file, policy, height, width)}.safetensors"
        if not cached.exists():
            encode(file, policy, (height, width), cached)
        texts, x_0 = read(cached)
        captions += texts
        codes.append(x_0)
    return captions, torch.cat(codes)


def files(path: Path) -> list[Path]:
    """The file, or those of a directory, by name. Raises ValueError where there is none of the kinds read."""
    found = sorted(p for p in path.iterdir() if p.suffix in READERS) if path.is_dir() else [path]
    if not found or found[0].suffix not in READERS or not found[0].is_file():
        raise ValueError(f"--data {path}: no {', '.join(READERS)} of picture-caption pairs there")
    return found


def key(file: Path, policy, height: int, width: int) -> str:
    """Name in the cache: other pictures, another image tokenizer or size is another name."""
    state, vq = file.stat(), getattr(policy, "vq", None)
    what = (str(file.resolve()), state.st_size, state.st_mtime_ns, type(vq).__name__)
    what += (str(getattr(vq, "source", "")), policy.vocab_size, policy.length, height, width)
    return f"{file.stem}-{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"


def encode(file: Path, policy, size: tuple[int, int], cached: Path) -> None:
    """Write the codes of all pairs of a file, with their captions, to ``cached``: whole or not at all."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    captions, codes, batch = [], [], []
    for where, caption, picture in tqdm(
        READERS[file.suffix](file), desc=f"encode {file.name}", mininterval=5
    ):
        captions.append(caption)
        batch.append(pixels(picture, size, where))
        if len(batch) == BATCH:
            codes.append(policy.respond(batch).cpu())
            batch = []
    if batch:
        codes.append(policy.respond(batch).cpu())
    if not codes:
        raise ValueError(f"{file}: holds no pair of a picture and a caption")
    cached.parent.mkdir(parents=True, exist_ok=True)
    temporary = cached.with_name(f"{cached.name}.{os.getpid()}")
    save_file({"x_0": torch.cat(codes).int()}, temporary, metadata={"captions": json.dumps(captions)})
    os.replace(temporary, cached)


def read(cached: Path) -> tuple[list[str], Tensor]:
    from safetensors import safe_open

    with safe_open(cached, "pt") as stored:
        return json.loads(stored.metadata()["captions"]), stored.get_tensor("x_0").long()


def pixels(picture: bytes, size: tuple[int, int], where: str) -> Tensor:
    """An encoded picture as uint8 [3, *size]: turned as its EXIF says, resized to cover, cropped in the
    middle."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ImportError("pictures as base data need pillow: pip install -r requirements.txt") from None
    try:
        with Image.open(io.BytesIO(picture)) as image:
            image = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{where}: a picture that cannot be read ({error})") from None
    image = ImageOps.fit(image, size[::-1], Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


# ---- The kinds of file: each yields (where, caption, encoded picture)

Pairs = Iterator[tuple[str, str, bytes]]


def read_tar(file: Path) -> Pairs:
    """Webdataset: the members of a sample follow each other and share their name up to its first dot, as in
    000.jpg, 000.txt; the caption may also stand in 000.json."""
    try:
        with tarfile.open(file) as tar:
            name, sample = None, {}
            for member in tar:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                if f"{folder}/{stem}" != name:
                    if sample:
                        yield pair(sample, f"{file}: {name}")
                    name, sample = f"{folder}/{stem}", {}
                content = tar.extractfile(member).read()
                if extension.lower() == "json":
                    sample = json.loads(content) | sample
                else:
                    sample[extension.lower()] = content.decode() if extension.lower() in CAPTIONS else content
            if sample:
                yield pair(sample, f"{file}: {name}")
    except (tarfile.TarError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not a webdataset tar ({error})") from None


def read_parquet(file: Path) -> Pairs:
    """A column of pictures, plain bytes or {bytes, path} as ``datasets`` stores them, and one of captions."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError("--data *.parquet needs pyarrow: pip install -r requirements.txt") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{file}: not parquet ({error})") from None
    columns = [c for c in table.schema_arrow.names if c in (*CAPTIONS, *PICTURES)]
    number = 0
    for batch in table.iter_batches(BATCH, columns=columns):
        for row in batch.to_pylist():
            number += 1
            yield pair(row, f"{file}: row {number}")


def read_lines(file: Path) -> Pairs:
    """jsonl whose picture is the path of a file, relative to that of the jsonl."""
    for number, row in enumerate(read_jsonl(str(file)), start=1):
        yield pair(row, f"{file}: row {number}", file.parent)


def pair(row: dict, where: str, folder: Path | None = None) -> tuple[str, str, bytes]:
    """(where, caption, encoded picture) of a row: the first field of CAPTIONS and of PICTURES that it has."""
    caption = next((row[name] for name in CAPTIONS if isinstance(row.get(name), str)), None)
    picture = next((row[name] for name in PICTURES if row.get(name) is not None), None)
    if isinstance(picture, dict):
        picture = picture.get("bytes")
    if isinstance(picture, str) and folder is not None:
        try:
            picture = (folder / picture).read_bytes()
        except OSError as error:
            raise ValueError(f"{where}: {picture}: {error.strerror}") from None
    if caption is None or not isinstance(picture, bytes):
        lacks = "caption" if caption is None else "picture"
        raise ValueError(
            f"{where}: no {lacks}; accepted are {', '.join(CAPTIONS)} with {', '.join(PICTURES)}"
        )
    return where, caption.strip(), picture


READERS = {".tar": read_tar, ".parquet": read_parquet, ".jsonl": read_lines}
