"""Checkpoints on disk or on the hub: found, read tensor by tensor, and put into a model strictly."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

FILES = ("model.safetensors", "pytorch_model.safetensors", "diffusion_pytorch_model.safetensors")

# codebooks of the metric path: URSA's, FUDOKI's
WANTED = ["*.json", "*.txt", "*.safetensors", "*scheduler_model.pth", "image_embedding.pt"]


def find(name: str | Path, flag: str = "--model") -> Path:
    """The local directory of a checkpoint: ``name`` itself, or the snapshot of a hub id."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_absolute() or path.exists() or str(name).count("/") != 1 or str(name).startswith("."):
        raise ValueError(f"{flag} {name}: no such directory, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{flag} {name}: no such directory, and the hub did not give it ({type(error).__name__}: "
            f"{str(error).strip().splitlines()[0]})"
        ) from error


def read_json(path: Path) -> dict:
    """The object in a JSON file; a missing or malformed file is a ValueError that names it."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a JSON object is expected, not a {type(found).__name__}")
    return found


def tensors(directory: Path, device: torch.device | str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor), one at a time, of the single or sharded safetensors of a directory."""
    from safetensors import SafetensorError, safe_open

    indexes = [directory / f"{name}.index.json" for name in FILES]
    index = next((path for path in indexes if path.exists()), None)
    if index:
        files = sorted(set(read_json(index)["weight_map"].values()))
    else:
        files = [name for name in FILES if (directory / name).exists()][:1]
    if not files:
        raise ValueError(f"{directory}: no weights; {' or '.join(FILES)}, single or sharded, is read")
    for file in files:
        try:
            with safe_open(directory / file, framework="pt", device=str(device)) as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    yield name, shard.get_tensor(name)
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{directory / file}: cannot be read ({error})") from None


def read_table(path: Path, name: str) -> Tensor:
    """The matrix [K, d] in a torch file, float32: itself, an nn.Embedding's weight, or ``name`` of a dict.
    Nothing else is unpickled; any other file is a ValueError that names it."""
    import collections

    try:
        with torch.serialization.safe_globals([nn.Embedding, collections.OrderedDict, set]):
            table = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, pickle and zipfile each have their own
        kind = type(error).__name__
        raise ValueError(f"{path}: cannot be read as a torch file of nothing but tensors ({kind})") from error
    table = table.weight if isinstance(table, nn.Embedding) else table
    table = table.get(name) if isinstance(table, dict) else table
    if not isinstance(table, Tensor) or table.dim() != 2:
        raise ValueError(f"{path}: expected a matrix of codes [K, d], itself or as {name!r} of a dict")
    return table.detach().float()


def fill(
    model: nn.Module,
    directory: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    rename: Callable[[str], str | None] = lambda name: name,
) -> None:
    """Put every tensor of ``directory`` into ``model`` (built on meta), cast to ``dtype`` one by one.

    ``rename`` maps a stored name to the model's, None leaves the tensor out. ValueError names what is
    missing, unexpected or of another shape.
    """
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    missing, unexpected = set(shapes), []
    for stored, value in tensors(directory, device):
        name = rename(stored)
        if name is None:
            continue
        if name not in shapes:
            unexpected.append(stored)
        elif tuple(value.shape) != shapes[name]:
            raise ValueError(f"{directory}: {stored} is {tuple(value.shape)}, the config asks {shapes[name]}")
        else:
            # assigned, not copied: the weights are in memory once
            model.load_state_dict({name: value.to(dtype)}, strict=False, assign=True)
            missing.discard(name)
    if missing or unexpected:
        raise ValueError(
            f"{directory}: missing tensors {some(missing)}, unexpected tensors {some(unexpected)}"
        )


def some(names: Collection[str]) -> str:
    """The first three, and how many there are where there are more."""
    more = f", ... ({len(names)})" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more or "none"
