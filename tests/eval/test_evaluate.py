"""eval/evaluate.py: scores that depend on the items alone, each done once, from any form of a model."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import released_standins
import torch
from conftest import shared
from toys import Pairwise

import maskgrpo
import models
import rebrl
import samplers
from common import World, generator
from eval import evaluate
from eval.rewards import Rewards
from eval.task import Task, load_task
from models import lora, tiny
from run import config_hash

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = "--length 8 --steps 4 --block 4 --micro-batch 2".split()


@pytest.fixture(scope="module")
def llada(tmp_path_factory) -> Path:
    """A random LLaDA as released, with room for a GSM8K prompt."""
    path = tmp_path_factory.mktemp("models") / "llada"
    return released_standins.llada(path, config=released_standins.LLADA | {"max_sequence_length": 2048})


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The first five problems of GSM8K's test set."""
    path = tmp_path_factory.mktemp("data") / "gsm8k.jsonl"
    path.write_text("".join(shared("data/gsm8k_test.jsonl").read_text().splitlines(True)[:5]))
    return path


def call(model: Path, data: Path, out: Path, *more: str) -> dict:
    return evaluate.main(
        ["--model", str(model), "--task", "gsm8k", "--data", str(data), "--out", str(out), *SETTINGS, *more]
    )


def items(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def scored(llada, data, tmp_path_factory) -> tuple[dict, Path]:
    """(result, directory) of the whole path on one process."""
    out = tmp_path_factory.mktemp("out") / "one"
    return call(llada, data, out), out


def test_gsm8k_through_torchrun_gives_the_items_of_one_process(llada, data, scored, tmp_path):
    """Report M12 with real prompts: two processes, every item once, order restored, the same verdicts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    own = ["--model", str(llada), "--task", "gsm8k", "--data", str(data), "--out", str(tmp_path / "two")]
    done = subprocess.run(
        [*command, "-m", "eval.evaluate", *own, *SETTINGS],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = items(scored[1]), items(tmp_path / "two")
    assert [i["item"] for i in two] == [0, 1, 2, 3, 4]
    assert one == two
    assert json.loads((tmp_path / "two/result.json").read_text()) == scored[0]
    assert "5/5" in done.stderr or "3/3" in done.stderr  # the progress bar of rank 0


def test_result_says_all_that_fixes_it(scored):
    """Reports B2, E9, L7: whoever reads a score can tell how, of what and on what it was measured."""
    result = json.loads((scored[1] / "result.json").read_text())
    assert result["scored_by"] == "correctness"
    asked = "sampler gen_length steps block_length temperature cfg eos_rule"  # B2
    machine = "device_name torch cuda transformers dtype"  # E9
    for key in f"{asked} {machine} score se n samples model model_hash task protocol data_hash seed".split():
        assert key in result, key
    assert (result["sampler"], result["gen_length"], result["steps"]) == ("semi_autoregressive", 8, 4)
    assert (result["block_length"], result["temperature"], result["protocol"]) == (4, 0.0, "default")
    assert (result["n"], result["samples"], result["pass@1"]) == (5, 1, result["score"])
    assert evaluate.mean_and_error(np.array([1.0, 1, 1, 0] * 330)[:1319], [None] * 1319)[1] == pytest.approx(
        0.0119, abs=5e-5
    )


def test_item_holds_prompt_completion_extracted_answer_and_verdict(scored):
    for item in items(scored[1]):
        assert item.keys() >= {"prompt", "completion", "extracted", "verdict", "components", "length"}
        assert "<reasoning>" in item["prompt"] and item["verdict"] in (0.0, 1.0)


def test_preset_is_named_in_the_result(llada, data, tmp_path):
    """Report L7: d1's and MaskGRPO's protocols are two presets, and a result says which it is."""
    named = [
        call(llada, data, tmp_path / p, "--protocol", p, "--limit", "1")["protocol"] for p in ("d1", "llada")
    ]
    assert named == ["d1", "llada"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_ten_items_on_three_ranks_are_each_done_once(llada, data, tmp_path, ranks):
    """Report M12."""
    policy, task = models.load(str(llada), length=8), load_task("gsm8k")
    rows = task.rows("test", str(data)) * 2
    args = SimpleNamespace(micro_batch=2, seed=0)
    settings = dict(sampler="semi_autoregressive", steps=4, block=4, temperature=0.0, cfg=0.0, cfg_until=1.0)
    settings |= dict(eos_rule="none")
    wanted = [(i, 0) for i in range(10)]
    for rank in range(ranks):
        world = World(rank, ranks, torch.device("cpu"))
        share = wanted[rank::ranks]
        evaluate.complete(policy, task, Rewards(task), rows, share, settings, args, tmp_path, world, None)
    lines = [line for part in tmp_path.glob("items.*") for line in part.read_text().split("\n") if line]
    assert len(lines) == 10
    assert evaluate.summarize(tmp_path, {}, task, rows, wanted)["n"] == 10
    assert [i["item"] for i in items(tmp_path)] == list(range(10))


def test_killed_evaluation_redoes_no_item(llada, data, scored, tmp_path, monkeypatch):
    """Three items are done and a fourth is half written: two batches of one are left, and nothing differs."""
    done = items(scored[1])
    (tmp_path / "settings.json").write_text((scored[1] / "settings.json").read_text())
    lines = [json.dumps(item) for item in done[1:4]]
    (tmp_path / "items.0.jsonl").write_text("\n".join([*lines, json.dumps(done[0])[:40]]))
    sampled, original = [], samplers.sample
    monkeypatch.setattr(
        samplers,
        "sample",
        lambda p, prompt, *a, **k: sampled.append(len(prompt)) or original(p, prompt, *a, **k),
    )
    assert call(llada, data, tmp_path) == scored[0]
    assert sum(sampled) == 2 and items(tmp_path) == done
    call(llada, data, tmp_path)
    assert sum(sampled) == 2


def test_directory_of_another_evaluation_is_refused(llada, data, scored):
    with pytest.raises(SystemExit, match="holds items of another evaluation: seed"):
        call(llada, data, scored[1], "--seed", "1")


def test_more_samples_of_a_prompt_differ_and_give_pass_at_k(llada, data, tmp_path):
    first = call(llada, data, tmp_path, "--limit", "2", "--samples", "2", "--temperature", "1")
    assert (first["n"], first["samples"]) == (2, 2) and {"pass@1", "pass@2"} <= first.keys()
    call(llada, data, tmp_path, "--limit", "2", "--samples", "4", "--temperature", "1")
    found = items(tmp_path)
    assert [(i["item"], i["sample"]) for i in found] == list(itertools.product(range(2), range(4)))
    assert len({i["completion"] for i in found}) > 2


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one():
    verdicts = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=float)
    for k in (1, 2, 3, 4):
        draws = [[any(row[list(c)]) for c in itertools.combinations(range(4), k)] for row in verdicts]
        assert evaluate.pass_at(verdicts, k) == pytest.approx(np.mean(draws))


# ---- Pictures


@pytest.fixture(scope="module")
def drawer(tmp_path_factory) -> Path:
    """An untrained model of the picture world."""
    path = tmp_path_factory.mktemp("drawer")
    tiny.build("tiny-geneval").save(path)
    return path


DRAW = "--task tiny-geneval --limit 3 --samples 2 --steps 2 --micro-batch 2".split()


def draw(drawer: Path, out: Path, *more: str) -> dict:
    return evaluate.main(["--model", str(drawer), *DRAW, "--out", str(out), *more])


def stored(folder: Path) -> dict[str, bytes]:
    """What a folder holds in the numbered folders of its prompts."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("0*/**/*.*")}


@pytest.fixture(scope="module")
def drawn(drawer, tmp_path_factory) -> tuple[Path, Path]:
    """(directory, folder of pictures) of two pictures of each of three prompts."""
    path = tmp_path_factory.mktemp("drawn")
    draw(drawer, path / "out", "--save-images", str(path / "images"))
    return path / "out", path / "images"


def test_pictures_stand_in_genevals_layout_with_the_row_of_each_prompt(drawn):
    rows = load_task("tiny-geneval").rows("test", None)
    names = ["metadata.jsonl", "samples/0000.png", "samples/0001.png"]
    assert sorted(stored(drawn[1])) == [f"{n:05}/{name}" for n in range(3) for name in names]
    for n in range(3):
        assert json.loads((drawn[1] / f"{n:05}/metadata.jsonl").read_text()) == rows[n]
    for item in items(drawn[0]):
        place = drawn[1] / f"{item['item']:05}/samples/{item['sample']:04}.png"
        assert (drawn[0] / item["completion"]).resolve() == place.resolve()
    assert not (drawn[0] / "images").exists()


def test_two_processes_save_the_pictures_of_one(drawer, drawn, tmp_path):
    """Each rank writes its own; the two pictures of a prompt fall to different ranks."""
    command = "-m torch.distributed.run --standalone --nproc_per_node 2 -m eval.evaluate".split()
    own = ["--model", str(drawer), *DRAW, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, *command, *own, "--save-images", str(tmp_path / "images")],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert stored(tmp_path / "images") == stored(drawn[1])
    assert [i | {"completion": ""} for i in items(tmp_path / "out")] == [
        i | {"completion": ""} for i in items(drawn[0])
    ]


def test_killed_evaluation_saves_the_pictures_that_are_missing(drawer, drawn, tmp_path, monkeypatch):
    """Killed in the third batch of two, then called again, then for a picture that was lost."""
    sampled, original = [], samplers.sample

    def sample(policy, prompt, *args):
        sampled.append(len(prompt))
        if sum(sampled) == 6 and len(sampled) == 3:
            raise KeyboardInterrupt
        return original(policy, prompt, *args)

    monkeypatch.setattr(samplers, "sample", sample)
    images = tmp_path / "images"
    with pytest.raises(KeyboardInterrupt):
        draw(drawer, tmp_path / "out", "--save-images", str(images))
    assert len(list(images.rglob("*.png"))) == 4
    draw(drawer, tmp_path / "out", "--save-images", str(images))
    assert sampled == [2, 2, 2, 2] and stored(images) == stored(drawn[1])
    (images / "00001/samples/0001.png").unlink()
    draw(drawer, tmp_path / "out", "--save-images", str(images))
    assert sampled[4:] == [1] and stored(images) == stored(drawn[1])


def test_pictures_that_are_there_are_copied_and_not_drawn_again(drawer, drawn, tmp_path, monkeypatch):
    first = draw(drawer, tmp_path / "out")
    assert stored(tmp_path / "out/images") == stored(drawn[1])
    (tmp_path / "out/images/00002/samples/0000.png").unlink()
    draw(drawer, tmp_path / "out", "--save-images", str(tmp_path / "all"))
    assert stored(tmp_path / "all") == stored(drawn[1])
    monkeypatch.setattr(samplers, "sample", lambda *args: pytest.fail("drawn again"))
    assert draw(drawer, tmp_path / "out", "--save-images", str(tmp_path / "kept")) == first
    assert stored(tmp_path / "kept") == stored(drawn[1])


def test_a_folder_with_other_pictures_is_refused(drawer, drawn, data, llada, tmp_path):
    """A mixture of two evaluations would be scored as one."""
    with pytest.raises(SystemExit, match="--save-images .* holds items of another evaluation: seed"):
        draw(drawer, tmp_path / "out", "--save-images", str(drawn[1]), "--seed", "1")
    (tmp_path / "theirs/00000/samples").mkdir(parents=True)
    with pytest.raises(SystemExit, match="--save-images .* holds pictures already"):
        draw(drawer, tmp_path / "out", "--save-images", str(tmp_path / "theirs"))
    with pytest.raises(SystemExit, match="--save-images: --task gsm8k completes text"):
        call(llada, data, tmp_path / "text", "--save-images", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_prompts_without_a_reward_are_scored_by_the_one_that_is_named(drawer, tmp_path):
    (tmp_path / "prompts.txt").write_text("a red square\na blue circle\n")
    own = f"--model {drawer} --task captions --data {tmp_path}/prompts.txt --sampler emerge --steps 2".split()
    with pytest.raises(SystemExit, match="--task captions has no reward of its own: name one"):
        evaluate.main([*own, "--out", str(tmp_path / "none")])
    result = evaluate.main([*own, "--out", str(tmp_path / "out"), "--reward", "edges"])
    assert 0 < result["score"] == result["components"]["edges"]
    assert result["scored_by"] == result["reward"] == "edges"
    assert "luminance" in result["components"] and (tmp_path / "out/images/00001/samples/0000.png").exists()
    with pytest.raises(SystemExit, match="holds items of another evaluation: reward"):
        evaluate.main([*own, "--out", str(tmp_path / "out"), "--reward", "edges=2"])


# ---- From any form of a model


def test_every_entry_point_samples_by_the_same_function():
    """Report L8."""
    assert maskgrpo.sample is rebrl.sample is evaluate.samplers.sample


def test_rollout_with_the_settings_of_evaluation_gives_its_tokens(llada, data, scored):
    """Report L11: at temperature 0 a rollout's completions are those that the evaluation stored."""
    flags = ["--model", str(llada), "--task", "gsm8k", *SETTINGS, "--temperature", "0"]
    args = maskgrpo.flags(flags)
    policy = models.load(str(llada), length=args.length)
    rows = load_task("gsm8k").rows("test", str(data))
    noise = [generator("rollout", 0, 0, n) for n in range(len(rows))]
    prompt = policy.encode([row["prompt"] for row in rows])
    out = maskgrpo.sample(policy, prompt, noise, samplers.settings_of(args, policy.length))
    assert policy.decode(out.x_0) == [i["completion"] for i in items(scored[1])]


@pytest.fixture(scope="module")
def adapted(llada, tmp_path_factory) -> Path:
    """A LoRA checkpoint of ``llada`` in adapter/, the same merged in released/."""
    path = tmp_path_factory.mktemp("adapted")
    policy = models.load(str(llada))
    lora.add(policy, str(llada), 4, 8.0)
    lora.save(policy, path / "zero", policy.backbone.state_dict())
    for i, (_, layer) in enumerate(lora.layers(policy)):
        B = layer.lora_B[lora.POLICY].weight.data
        B.copy_(torch.randn(B.shape, generator=torch.Generator().manual_seed(i)) * 0.2)
    lora.save(policy, path / "adapter", policy.backbone.state_dict())
    policy.export_llada(path / "released", lora.merged_state(policy, policy.backbone.state_dict()))
    return path


def test_adapter_export_and_hub_id_score_alike(llada, data, scored, adapted, tmp_path, monkeypatch):
    """Report L8: an adapter with B = 0 is its base; one that was trained is its own merged export."""
    base = [i["completion"] for i in items(scored[1])]
    found = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(adapted / "released"))
    for name in ("zero", "adapter", "released"):
        call(adapted / name, data, tmp_path / name)
        found[name] = [i["completion"] for i in items(tmp_path / name)]
    call("someone/llada", data, tmp_path / "hub")
    assert found["zero"] == base
    assert found["adapter"] == found["released"] == [i["completion"] for i in items(tmp_path / "hub")] != base


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of one iteration."""
    path = tmp_path_factory.mktemp("run")
    tiny.build("tiny-math").save(path / "base")
    flags = "--prompts 2 --group-size 2 --mu 1 --iterations 1 --eval-prompts 4 --steps 4 --block 8"
    maskgrpo.main(["--model", str(path / "base"), *flags.split(), "--out", str(path / "run")])
    return path / "run"


def test_run_directory_brings_its_model_and_settings(finished, monkeypatch):
    result = evaluate.main(["--model", str(finished), "--limit", "4"])
    assert (result["task"], result["steps"], result["block_length"]) == ("tiny-math", 4, 8)
    last = json.loads((finished / "eval.jsonl").read_text().splitlines()[-2])
    assert (last["mode"], last["score"], last["length"]) == ("greedy", result["score"], result["length"])
    assert len(list(finished.glob("eval/*/result.json"))) == 1
    inside = evaluate.main(["--model", str(finished / "model"), "--limit", "4", "--out", str(finished / "e")])
    assert inside["score"] == result["score"] and inside["steps"] == 4


def test_run_that_had_another_image_tokenizer_is_scored_with_it(drawer, tmp_path):
    """An adapter's base says the tokenizer that its run replaced, here one of as many codes."""
    other = json.loads((drawer / "policy.json").read_text()) | {"vq": "./nowhere"}
    shutil.copytree(drawer, tmp_path / "base")
    (tmp_path / "base/policy.json").write_text(json.dumps(other))
    policy = models.load(str(tmp_path / "base"), vq="tiny:1")
    lora.add(policy, str(tmp_path / "base"), 4, 8.0)
    lora.save(policy, tmp_path / "model", policy.backbone.state_dict())
    with pytest.raises(SystemExit, match="nowhere"):
        draw(tmp_path / "model", tmp_path / "out")
    assert draw(tmp_path / "model", tmp_path / "out", "--vq", "tiny:1")["vq"] == "tiny:1"
    config = {"task": "tiny-geneval", "vq": "tiny:1"}
    trained = {"config": config, "config_hash": config_hash(config)}
    (tmp_path / "model/training.json").write_text(json.dumps(trained))
    assert draw(tmp_path / "model", tmp_path / "of_the_run")["vq"] == "tiny:1"
    assert stored(tmp_path / "of_the_run/images") == stored(tmp_path / "out/images")


def test_model_of_another_run_is_warned_of_by_the_flag_that_differs(finished):
    """Report L9: a stored model says of which step and flags it is, and what it scored."""
    stored = finished / "model/training.json"
    trained = json.loads(stored.read_text())
    assert trained["step"] == 1 and trained["config_hash"] == config_hash(trained["config"])
    assert {s["mode"] for s in trained["scores"]} == {"greedy", "sampled"}
    other = trained["config"] | {"gamma": 0.1}
    stored.write_text(json.dumps(trained | {"config": other, "config_hash": config_hash(other)}))
    try:
        with pytest.warns(UserWarning, match="other flags than its run: gamma"):
            evaluate.find(str(finished))
    finally:
        stored.write_text(json.dumps(trained))


def test_unfinished_run_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has not finished"):
        evaluate.find(str(tmp_path))


@pytest.mark.parametrize("key, other", [("protocol", "d1"), ("steps", 128), ("task", "mbpp")])
def test_results_that_cannot_be_compared_are_no_table(scored, key, other):
    """Report L6."""
    assert "| 0." in evaluate.compare([scored[0], scored[0]])
    with pytest.raises(ValueError, match=f"different {key}"):
        evaluate.compare([scored[0], scored[0] | {key: other}])


def test_unsafe_exec_is_passed_on_and_refused_where_no_code_runs():
    assert load_task("mbpp", unsafe_exec=True).reward.keywords == {"unsafe_exec": True}
    with pytest.raises(ValueError, match="--unsafe-exec: --task gsm8k runs no code"):
        load_task("gsm8k", unsafe_exec=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--task gsm8k", "--model is needed"),
        ("--model nowhere/at-all --task nope", "--model nowhere/at-all"),
        ("--model {llada}", "--task is needed"),
        ("--model {llada} --task nope", "--task nope: unknown"),
        (
            "--model {llada} --task gsm8k --data {data} --length 8 --block 3",
            "--block 3 must divide --length 8",
        ),
        ("--model {llada} --task gsm8k --samples 0", "--samples 0: must be a number, at least 1"),
        ("--model {llada} --task gsm8k --limit 0", "--limit 0: must be a number, at least 1"),
        ("--model {llada} --task gsm8k --schedule linear", "--schedule: no effect with --sampler semi_auto"),
        ("--model {llada} --task gsm8k --path-c 2", "--path-c: no effect with --sampler semi_auto"),
        ("--model {llada} --task gsm8k --cfg-until 0.5", "--cfg-until: no effect with --cfg 0.0"),
        (
            "--model {llada} --task gsm8k --sampler emerge --block 4 --eos-rule last",
            "--block, --eos-rule: no effect with --sampler emerge",
        ),
        ("--compare {data}", "gsm8k.jsonl: not JSON (Extra data"),
        ("--compare nowhere.json", "nowhere.json: no such file"),
        ("--compare {llada}/config.json", "config.json: no result.json, it lacks task, protocol"),
    ],
)
def test_wrong_flag_ends_in_one_sentence(llada, data, capsys, monkeypatch, wrong, says):
    def offline(*a, **k):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(wrong.format(llada=llada, data=data).split())
    assert says in f"{stopped.value} {capsys.readouterr().err}"


# ---- evaluate, evaluate_run

ALONE = World(0, 1, torch.device("cpu"))
EMERGE = dict(sampler="emerge", steps=4, temperature=1.0, cfg=0.0, cfg_until=1.0, schedule_name="cosine")
ROWS = [{"prompt": prompt, "kind": len(prompt)} for prompt in ("1 2 3", "4", "2 2", "3 1", "1")]


def share_of_ones(rows, completions):
    return {"ones": np.array([c.split().count("1") / 6 for c in completions])}


TASK = Task("toy", "text", None, share_of_ones, {"ones": 1.0}, "ones")


@pytest.fixture
def policy():
    return Pairwise(K=4, L=6, scale=0.3, end_ids=(0,))


def test_every_item_is_scored_once_whatever_the_micro_batch(policy):
    """L11: the sampler and the noise of an item are the same in any batch."""
    together, apart = (
        evaluate.evaluate(policy, TASK, ROWS, EMERGE, seed=1, world=ALONE, micro_batch=n) for n in (5, 2)
    )
    assert together.completions == apart.completions and len(apart.completions) == 5
    assert together.summary == apart.summary and together.summary["n"] == 5
    other = evaluate.evaluate(policy, TASK, ROWS, EMERGE, seed=2, world=ALONE, micro_batch=5)
    assert other.completions != together.completions


def test_a_score_over_categories_is_the_mean_of_their_means_with_its_error():
    values = np.array([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    score, se = evaluate.mean_and_error(values, ["a", "a", "b", "b", "b", "b"])
    assert score == pytest.approx((0.5 + 0.75) / 2)
    assert se == pytest.approx(np.sqrt(0.5 / 2 + 0.25 / 4) / 2)
    score, se = evaluate.mean_and_error(np.array([1.0] * 75 + [0.0] * 25), [None] * 100)
    assert (score, se) == (0.75, pytest.approx(0.0435, abs=1e-4))


class Log:
    """What ``evaluate_run`` asks of a run."""

    def __init__(self, path):
        self.world, self.dir, self.lines = ALONE, path, []
        (path / "samples").mkdir()

    def score(self, step, task, mode, result):
        self.lines.append({"step": step, "mode": mode, **result})

    def scores(self):
        return self.lines

    def gather_rewards(self, rewards, rows, completions, n):
        return rewards.components(rows, completions)


def test_a_run_killed_between_two_scores_of_a_step_makes_the_other_on_resume(tmp_path, policy):
    """And makes none twice: the table at the end needs both modes of the first and of the last step."""
    args = dict(iterations=4, eval_every=2, eval_prompts=3, eval_steps=None, temperature=1.0)
    args = SimpleNamespace(**args, seed=0, micro_batch=8)
    whole = Log(tmp_path)
    for step in range(5):
        evaluate.evaluate_run(whole, step, policy, TASK, Rewards(TASK), ROWS, EMERGE, args)
    expected = [(step, mode) for step in (0, 2, 4) for mode in ("greedy", "sampled")]
    assert [(line["step"], line["mode"]) for line in whole.lines] == expected
    before = list(whole.lines)
    del whole.lines[1:]
    for step in (0, 0, 2, 4):
        evaluate.evaluate_run(whole, step, policy, TASK, Rewards(TASK), ROWS, EMERGE, args)
    assert whole.lines == before
    assert (tmp_path / "samples/step_000004.txt").read_text().count("[") == 3
