import pytest

from eval.jsonl import check_texts, read_hub, read_jsonl


def write(tmp_path, data: bytes) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    return str(path)


def test_rows_come_in_order_and_blank_lines_are_skipped(tmp_path):
    path = write(tmp_path, '\ufeff{"a": 1}\r\n\n{"a": "x\u2028y"}\n'.encode())
    assert read_jsonl(path, ("a",)) == [{"a": 1}, {"a": "x\u2028y"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "not JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"b": 1}', "lacks the field a"),
    ],
)
def test_a_malformed_row_names_file_and_line(tmp_path, line, message):
    path = write(tmp_path, b'{"a": 1}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=message) as error:
        read_jsonl(path, ("a",))
    assert str(error.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(("data", "message"), [(b"\xff\xfe{}", "not UTF-8"), (b"\n \n", "holds no rows")])
def test_a_file_without_rows_is_refused(tmp_path, data, message):
    with pytest.raises(ValueError, match=message):
        read_jsonl(write(tmp_path, data))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none.jsonl: cannot be read"):
        read_jsonl(str(tmp_path / "none.jsonl"))


def test_a_row_that_a_task_cannot_use_names_file_and_line(tmp_path):
    def check(row):
        if row["a"] < 0:
            raise ValueError("a is negative")

    path = write(tmp_path, b'{"a": 1}\n{"a": -1}')
    with pytest.raises(ValueError, match=r"rows.jsonl:2: a is negative$"):
        read_jsonl(path, ("a",), check)


def test_a_hub_row_that_lacks_a_field_is_named(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: [{"a": 1}, {}])
    with pytest.raises(ValueError, match=r"^owner/set \(test\) row 1: lacks the field a$"):
        read_hub("owner/set", "test", required=("a",))


@pytest.mark.parametrize("value", [3, None, "", " \n"])
def test_a_field_that_is_no_text_is_named(value):
    check_texts({"question": "q", "answer": "a"}, ("question", "answer"))
    with pytest.raises(ValueError, match="answer is not a text"):
        check_texts({"question": "q", "answer": value}, ("question", "answer"))
