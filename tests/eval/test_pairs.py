"""Image-caption pairs: every kind of file gives the same codes, once."""

import io
import json
import os
import tarfile

import pytest
import torch
from PIL import Image

from eval import pairs, tiny_geneval
from eval.pairs import load_pairs
from models import tiny

ROWS = tiny_geneval.base_rows(70, seed=0)  # more than one batch
CAPTIONS = [row["prompt"] for row in ROWS]


@pytest.fixture(scope="module")
def policy():
    return tiny.build("tiny-geneval")


def encoded(image: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(stream, "PNG")
    return stream.getvalue()


def write_tar(path, rows, caption="txt"):
    with tarfile.open(path, "w") as tar:
        for i, row in enumerate(rows):
            text = json.dumps({"caption": row["prompt"], "id": i}) if caption == "json" else row["prompt"]
            for extension, content in (("png", encoded(row["completion"])), (caption, text.encode())):
                member = tarfile.TarInfo(f"shard/{i:05}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def write_parquet(path, rows, nested):
    import pyarrow
    import pyarrow.parquet

    pictures = [encoded(row["completion"]) for row in rows]
    pictures = [{"bytes": b, "path": None} for b in pictures] if nested else pictures
    table = pyarrow.table(
        {"image": pictures, "caption": [row["prompt"] for row in rows], "score": [0.5] * len(rows)}
    )
    pyarrow.parquet.write_table(table, path)
    return path


def write_jsonl(path, rows):
    lines = []
    for i, row in enumerate(rows):
        (path.parent / f"{i}.png").write_bytes(encoded(row["completion"]))
        lines.append(json.dumps({"prompt": row["prompt"], "image": f"{i}.png"}))
    path.write_text("\n".join(lines))
    return path


WRITERS = {
    "a.tar": write_tar,
    "b.tar": lambda path, rows: write_tar(path, rows, "json"),
    "a.parquet": lambda path, rows: write_parquet(path, rows, True),
    "b.parquet": lambda path, rows: write_parquet(path, rows, False),
    "a.jsonl": write_jsonl,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_captions_and_codes_in_order(policy, tmp_path, name):
    file = WRITERS[name](tmp_path / name, ROWS)
    captions, x_0 = load_pairs(file, policy, tmp_path / "cache")
    assert captions == CAPTIONS
    assert torch.equal(x_0, policy.respond([row["completion"] for row in ROWS])) and x_0.dtype == torch.int64


def test_pictures_are_encoded_once(policy, tmp_path, monkeypatch):
    write_tar(tmp_path / "0.tar", ROWS[:3])
    first = load_pairs(tmp_path, policy, tmp_path / "cache")
    encoded, encode = [], pairs.encode
    monkeypatch.setattr(pairs, "encode", lambda file, *a: encoded.append(file.name) or encode(file, *a))
    again = load_pairs(tmp_path, policy, tmp_path / "cache")
    assert encoded == [] and again[0] == first[0] and torch.equal(again[1], first[1])
    write_tar(tmp_path / "1.tar", ROWS[3:5])
    both = load_pairs(tmp_path, policy, tmp_path / "cache")
    assert encoded == ["1.tar"] and both[0] == CAPTIONS[:5] and len(both[1]) == 5
    write_tar(tmp_path / "0.tar", ROWS[5:8])
    os.utime(tmp_path / "0.tar", (1, 1))  # other pictures under the same name
    assert load_pairs(tmp_path, policy, tmp_path / "cache")[0] == CAPTIONS[5:8] + CAPTIONS[3:5]
    load_pairs(tmp_path / "0.tar", tiny.build("tiny-geneval", variants=4), tmp_path / "cache")
    assert encoded == ["1.tar", "0.tar", "0.tar"]  # codes of another image tokenizer are other codes


def test_an_interrupted_encoding_leaves_nothing_behind(policy, tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    (tmp_path / "2.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="a.jsonl: row 3: a picture that cannot be read"):
        load_pairs(file, policy, tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


def test_picture_is_cropped_in_the_middle_to_the_size_that_the_policy_paints(policy, tmp_path):
    shown = ROWS[0]["completion"]
    side = shown.shape[-1]
    wide = torch.zeros(3, side // 2, side, dtype=torch.uint8)
    wide[:, :, side // 4 : -side // 4] = shown[:, ::2, ::2]  # half its size, between two black bars
    picture = pairs.pixels(encoded(wide), (side, side), "here")
    assert picture.shape == (3, side, side) and picture.dtype == torch.uint8
    blurred = (picture.int() - shown.int()).abs().float()
    assert blurred.mean() < 6  # no bar is left in it
    assert policy.decode(torch.zeros(1, policy.length, dtype=torch.long)).shape[-2:] == (side, side)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "no .tar, .parquet, .jsonl of picture-caption pairs"),
        ("a.tar", b"not a tar", "a.tar: not a webdataset tar"),
        ("a.parquet", b"not parquet", "a.parquet: not parquet"),
        ("a.jsonl", b'{"prompt": "a"}', "a.jsonl: row 1: no picture"),
        ("a.jsonl", b'{"image": "x.png", "caption": "a"}', "a.jsonl: row 1: x.png: No such file"),
        ("b.jsonl", b'{"label": 3}', "b.jsonl: row 1: no caption; accepted are caption, prompt, text, txt"),
    ],
)
def test_wrong_data_ends_in_one_sentence(policy, tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        load_pairs(tmp_path / name, policy, tmp_path / "cache")


def test_missing_path_is_named(policy, tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        load_pairs(tmp_path / "nowhere.tar", policy, tmp_path / "cache")
