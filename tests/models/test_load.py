"""models.load: where checkpoints are found, what is refused, how much memory loading takes."""

import fnmatch
import gc
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import released_standins
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

import models
from models import tiny, weights

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def released(tmp_path):
    return released_standins.llada(tmp_path / "llada")


def test_importing_models_does_not_import_transformers():
    code = "import sys, models; sys.exit(any(m in sys.modules for m in ('transformers', 'peft', 'datasets')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_hub_id_is_the_snapshot_of_its_files(released, monkeypatch):
    asked = []

    def snapshot(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(released)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    policy = models.load("GSAI-ML/LLaDA-8B-Instruct")
    assert policy.mask_id == 255
    ((name, patterns),) = asked
    assert name == "GSAI-ML/LLaDA-8B-Instruct" and {"*.json", "*.safetensors"} <= set(patterns)
    assert not any(fnmatch.fnmatch("modeling_llada.py", pattern) for pattern in patterns)  # no remote code


def test_what_the_hub_does_not_give_is_one_sentence(monkeypatch):
    def snapshot(name, allow_patterns):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ValueError, match="--model nobody/nothing: no such directory, and the hub did not"):
        models.load("nobody/nothing")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/here", "/nowhere/here"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(name):
    with pytest.raises(ValueError, match=f"--model {name}: no such directory"):
        models.load(name)


def test_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="kind 'gpt2' is not supported, only llada, mmada"):
        models.load(tmp_path)


def test_a_task_of_another_modality_is_refused(released):
    with pytest.raises(ValueError, match="llada makes text, the task asks for image"):
        models.load(released, modality="image")


OWN = """
from models.policy import Policy

class Mine(Policy):
    length, vocab_size = 4, 12
    def encode(self, texts): ...
    def decode(self, x_0): ...
    def save(self, path, state=None): ...

def policy():
    return Mine()
"""


def test_flags_that_a_file_of_ones_own_would_not_see_are_refused(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert models.load(str(file)).length == 4
    for given in ("length", "max_prompt", "vq"):
        with pytest.raises(ValueError, match=f"--{given.replace('_', '-')}: --model .*own.py says it itself"):
            models.load(str(file), **{given: 8})


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("return Mine()", "return None", "gives a NoneType, no models.policy.Policy"),
        ("length, vocab_size = 4, 12", "length = 4", "Mine lacks vocab_size"),
        ("    def save(self, path, state=None): ...", "", "Mine lacks save"),
        ("return Mine()", "return {}['gone']", "own.py: cannot be loaded .KeyError: 'gone'"),
    ],
)
def test_a_file_of_ones_own_must_hold_what_the_scripts_need(tmp_path, old, new, message):
    (tmp_path / "own.py").write_text(OWN.replace(old, new))
    with pytest.raises(ValueError, match=message):
        models.load(f"{tmp_path}/own.py")


@pytest.mark.parametrize("path", ["mask", "mixture"])
def test_an_image_tokenizer_of_other_codes_is_refused(tmp_path, path):
    tiny.build("tiny-geneval", path=path).save(tmp_path)
    assert models.load(tmp_path, vq="tiny:1").vq.source == "tiny:1"
    with pytest.raises(ValueError, match="98"):
        models.load(tmp_path, vq="tiny:2")


def test_an_image_tokenizer_for_text_is_refused(released):
    with pytest.raises(ValueError, match="--vq x/y: --model .* makes text here"):
        models.load(released, vq="x/y")


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("config.json", None, "config.json: no such file"),
        ("config.json", b"{", "config.json: not JSON"),
        ("config.json", b"[]", "config.json: a JSON object is expected, not a list"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", b"{}", "cannot be loaded"),
        ("model.safetensors", None, "no weights"),
        ("model.safetensors", b"cut", "model.safetensors: cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence_that_names_the_file(released, name, damage, message):
    (released / name).unlink()
    if damage is not None:
        (released / name).write_bytes(damage)
    with pytest.raises(ValueError, match=message):
        models.load(released)


def test_a_missing_shard_is_named(tmp_path):
    path = released_standins.llada(tmp_path, shards=2)
    (path / "model-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00001.safetensors"):
        models.load(path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_weights_are_in_memory_once(tmp_path, monkeypatch, stored):
    """When a tensor is read, nothing lives but the model so far, this tensor, and its predecessor."""
    tensors = {n: t.to(stored) for n, t in released_standins.tensors(released_standins.LLADA).items()}
    path = released_standins.llada(tmp_path, weights=tensors)
    sizes = {name: t.numel() * 4 for name, t in tensors.items()}
    del tensors
    live, read = [], weights.tensors
    gc.collect()
    gc.freeze()  # what lives already is not counted

    def alive() -> int:
        found = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and t.device.type == "cpu"
        }
        return sum(found.values())

    def watched(*args):
        so_far = 0
        for name, tensor in read(*args):
            live.append(alive() - so_far - sizes[name])
            so_far += sizes[name]
            yield name, tensor

    monkeypatch.setattr(weights, "tensors", watched)
    try:
        models.load(path)
    finally:
        gc.unfreeze()
    assert len(live) == len(sizes) and max(live) <= max(sizes.values())


def test_tensors_come_from_either_file_name(tmp_path):
    path = released_standins.llada(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.safetensors")
    assert models.load(path).mask_id == 255
