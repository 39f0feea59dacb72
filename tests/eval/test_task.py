"""What is no task, or gives no rows, is said in one sentence when it is loaded or asked."""

import pytest

from eval.task import load_task

TASK = """
from eval.task import Task

def rows(split, data):
    return {rows}

def task({arguments}):
    return {task}
"""
TOY = 'Task("toy", "text", rows, None, {}, "")'
ROWS = '[{"prompt": "1 2"}]'


def write(path, rows=ROWS, arguments="protocol=None", task=TOY) -> str:
    file = path / "my_task.py"
    file.write_text(TASK.format(rows=rows, arguments=arguments, task=task))
    return str(file)


def test_a_task_of_a_file_is_what_the_file_gives(tmp_path):
    found = load_task(write(tmp_path))
    assert (found.name, found.modality, found.reward) == ("toy", "text", None)
    assert found.rows("test", None) == [{"prompt": "1 2"}]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"arguments": ""}, r"task\(\) must take one argument, the protocol \(too many"),
        ({"arguments": "a, b"}, r"task\(\) must take one argument, the protocol \(missing.* 'b'"),
        ({"task": "rows"}, r"task\(\) gives a function, no eval.task.Task"),
        ({"task": "None"}, r"task\(\) gives a NoneType, no eval.task.Task"),
        ({"rows": "[]"}, r"rows\('test'\) must give a list with at least one row"),
        ({"rows": "None"}, r"rows\('test'\) must give a list with at least one row"),
        (
            {"rows": ROWS + '+ [{"question": "q"}]'},
            r"rows\('test'\)\[1\] is no dictionary with a text as prompt",
        ),
        ({"rows": '[{"prompt": 3}]'}, r"rows\('test'\)\[0\] is no dictionary with a text as prompt"),
        ({"rows": '["1 2"]'}, r"rows\('test'\)\[0\] is no dictionary with a text as prompt"),
    ],
)
def test_a_file_that_is_no_task_is_refused_in_one_sentence(tmp_path, wrong, says):
    file = write(tmp_path, **wrong)
    with pytest.raises(ValueError, match=f"^--task {file}: {says}"):
        load_task(file).rows("test", None)
