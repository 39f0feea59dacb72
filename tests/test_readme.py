"""The README keeps its word: its examples run as they stand, its lines and files exist."""

import re
from pathlib import Path

import pytest
import torch

import maskgrpo
from models import load, tiny

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def example(name: str, directory: Path) -> Path:
    """The Python block after the README's mention of ``name``, as a file."""
    block = re.search(rf"`{name}`.*?```python\n(.*?)```", README, re.DOTALL)[1]
    path = directory / name
    path.write_text(block)
    return path


def moved(before: torch.nn.Module, after: dict) -> float:
    return max((after[k] - v).abs().max().item() for k, v in before.state_dict().items())


def test_own_reward_trains(tmp_path):
    reward = example("my_reward.py", tmp_path)
    tiny.build("tiny-math").save(tmp_path / "base")
    flags = f"--model {tmp_path}/base --reward correct=1,{reward}:brevity=0.2 --iterations 1 --prompts 2"
    maskgrpo.main([*flags.split(), "--out", str(tmp_path / "run")])
    assert moved(load(str(tmp_path / "base")), load(str(tmp_path / "run/model")).state_dict()) > 0
    assert '"reward/brevity"' in (tmp_path / "run/metrics.jsonl").read_text()


def test_own_model_trains_on_own_task(tmp_path):
    task, model = example("my_task.py", tmp_path), example("my_model.py", tmp_path)
    flags = f"--model {model} --task {task} --steps 4 --block 4 --iterations 2 --prompts 4 --lr 1e-3"
    torch.manual_seed(0)  # the example's model is torch's own, with torch's initialisation
    maskgrpo.main([*flags.split(), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run/model/mine.pt").exists()
    assert '"score"' in (tmp_path / "run/eval.jsonl").read_text()


def test_lines_of_the_equation_tables_stand_in_the_named_function():
    rows = re.findall(r"^\| [^|]+ \| `(\w+\.py)` `(\w+)` \| `(.+)` \|$", README, re.MULTILINE)
    assert len(rows) >= 15
    for file, function, line in rows:
        source = (ROOT / file).read_text()
        pattern = rf"^(?:def|class) {function}\b.*?(?=^\S(?<!\)))|\Z"
        body = re.search(pattern, source, re.DOTALL | re.MULTILINE)[0]
        assert line.replace("\\|", "|") in body, f"{file} {function}: {line}"


def test_files_and_pictures_that_the_readme_names_exist():
    for name in re.findall(r"\]\((docs/[\w./-]+)\)", README) + re.findall(
        r"`((?:tests|eval|models)/[\w/]+\.py)`", README
    ):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("script", ["maskgrpo.py", "rebrl.py", "udm_grpo.py", "sft.py"])
def test_flags_in_the_commands_of_the_readme_are_accepted(script):
    source = "".join((ROOT / f).read_text() for f in (script, "flags.py"))
    for command in re.findall(rf"^(?:    |`).*?{re.escape(script)} (.+)$", README, re.MULTILINE):
        for flag in re.findall(r"(?<!\S)(--[a-z][\w-]*)", command.split("#")[0].split("`")[0]):
            assert f'"{flag}"' in source, f"{script} {flag}"
