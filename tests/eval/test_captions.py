"""Plain prompt lists."""

import pytest
from conftest import shared

from eval.captions import rows, split_file, task


@pytest.mark.parametrize(
    "name, n", [("pickscore_test_prompts.txt", 500), ("hpsv2_eval_prompts.jsonl", 600),
                ("hpsv3_eval_sample.jsonl", 500), ("dpg_bench_prompts.jsonl", 1065)]
)  # fmt: skip
def test_prompts_of_the_usual_files(name, n):
    found = rows("test", str(shared(f"data/{name}")))
    assert len(found) == n and all(row["prompt"].strip() for row in found)


def test_other_fields_of_a_row_are_kept(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"caption": "a lake", "category": "Nature"}\n')
    assert rows("train", str(path)) == [{"caption": "a lake", "category": "Nature", "prompt": "a lake"}]


def test_blank_lines_are_no_prompts(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa lake\r\n\r\n  a hill \n".encode())
    assert [row["prompt"] for row in rows("train", str(path))] == ["a lake", "a hill"]


def test_a_directory_gives_each_split_its_file(tmp_path):
    (tmp_path / "train.txt").write_text("a")
    (tmp_path / "test_metadata.jsonl").write_text('{"prompt": "b"}')
    assert [rows(split, str(tmp_path))[0]["prompt"] for split in ("train", "test")] == ["a", "b"]
    (tmp_path / "test.txt").write_text("c")
    with pytest.raises(ValueError, match="one file test.* expected, found test.txt, test_metadata.jsonl"):
        split_file(str(tmp_path), "test")


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_it(tmp_path, content, message):
    path = tmp_path / "p.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"p.txt: {message}"):
        rows("train", str(path))


def test_a_row_without_a_prompt_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="p.jsonl: row 2 lacks a prompt or caption"):
        rows("train", str(path))


def test_captions_have_no_reward_and_no_source_of_their_own():
    found = task()
    assert (found.weights, found.score, found.reward([{}], [None])) == ({}, "", {})
    with pytest.raises(ValueError, match="--task captions: give --data PATH"):
        found.rows("train", None)
    with pytest.raises(ValueError, match="--protocol x"):
        task("x")
