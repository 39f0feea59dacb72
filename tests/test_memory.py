"""--dry-run: its arithmetic against the bytes of models that are really built, trained and sampled from."""

import argparse
import fnmatch
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn

import common
import maskgrpo
import memory
import samplers
import sft
import udm_grpo
from eval import udm_diagnostics
from eval.task import load_task
from models import load, lora, tiny
from models.fudoki import FUDOKI, Backbone
from models.policy import Policy, Prompt
from scale import load_policy

LLADA = "--model GSAI-ML/LLaDA-8B-Instruct --task gsm8k"
LORA = "--lora-rank 4 --lora-alpha 8 --lr 3e-3"
ONE = common.World(0, 1, torch.device("cpu"))


def fudoki() -> FUDOKI:
    """As wide as the built-in models, weights from a seed."""
    from transformers import LlamaConfig

    words, vq = tiny.tokenizer(("red", "cat"), tiny.IMAGE_SPECIAL), tiny.Patches()
    special = zip(
        ("bos_id", "begin_id", "end_id", "pad_id"), ("<begin>", "<soi>", "<eoi>", "<pad>"), strict=True
    )
    ids = {name: words.convert_tokens_to_ids(token) for name, token in special}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(words), max_position_embeddings=128, **tiny.SIZE)
        backbone = Backbone(config, len(vq.codebook), 8, 48)
    return FUDOKI(backbone, words, vq, codebook=vq.codebook, length=16, uncond_id=0, **ids)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Path]:
    """A directory of each kind; URSA's keys and values are shared by two heads each."""
    root = tmp_path_factory.mktemp("stored")
    tiny.build("tiny-math").save(root / "llada")
    tiny.build("tiny-geneval").save(root / "mmada")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.SIZE, "num_key_value_heads", 2)
        tiny.build("tiny-geneval", path="metric").save(root / "ursa")
    fudoki().save(root / "fudoki")
    return {path.name: path for path in root.iterdir()}


def test_dry_run_prints_the_table_and_loads_nothing(stored, capsys, monkeypatch):
    monkeypatch.setattr("models.load", None)
    monkeypatch.setattr("models.weights.tensors", None)
    uniform = f"--model {stored['ursa']} --task geneval --data x"
    pairs = f"--model {stored['fudoki']} --task captions --data x"
    asked = [
        (maskgrpo, LLADA),
        (maskgrpo, f"{LLADA} --lora-rank 0 --shard fsdp"),
        (udm_grpo, uniform),
        (sft, pairs),
    ]
    for script, flags in asked:
        with pytest.raises(SystemExit) as stopped:
            script.flags([*flags.split(), "--dry-run"])
        assert not stopped.value.code
    said = capsys.readouterr().out
    assert said.count("| GB a GPU | 1 GPU | 4 GPUs | 8 GPUs |") == said.count("| **sum** |") == 4
    assert "LoRA rank 128, --shard ddp" in said and "all weights trained, --shard fsdp" in said
    assert "prompts of 12 tokens, responses of 16" in said and said.count("| states |") == 1


def test_memory_of_llada_counts_its_eight_billion_weights():
    args = maskgrpo.flags(LLADA.split())
    model = memory.model_of("GSAI-ML/LLaDA-8B-Instruct", "text")
    used = memory.memory(args, model, 1)
    adapter = 32 * 128 * (4 * 2 * 4096 + 3 * (4096 + 12288))
    assert used["weights"] == pytest.approx(2 * 8.015e9 + 4 * adapter, rel=1e-3)
    assert used["optimizer"] == 8 * adapter
    full = argparse.Namespace(**vars(args) | {"lora_rank": 0, "shard": "fsdp"})
    assert memory.memory(full, model, 8)["optimizer"] == pytest.approx(8 * 8.015e9 / 8, rel=1e-3)


@pytest.mark.parametrize("kind", ["llada", "mmada", "ursa", "fudoki"])
def test_the_config_alone_says_the_sizes(stored, kind, tmp_path):
    """Without weights and tokenizer; URSA and FUDOKI without policy.json too, as they are released."""
    policy = load(str(stored[kind]))
    modality = "text" if kind == "llada" else "image"
    shutil.copytree(
        stored[kind],
        tmp_path,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"),
    )
    model = memory.model_of(str(tmp_path), modality)
    assert all(p.is_meta for p in model.backbone.parameters())
    assert (model.K, model.length) == (policy.vocab_size, policy.length)
    shapes = {name: p.shape for name, p in policy.backbone.named_parameters()}
    assert {name: p.shape for name, p in model.backbone.named_parameters()} == shapes
    if kind in ("ursa", "fudoki"):
        (tmp_path / "policy.json").unlink()
        model = memory.model_of(str(tmp_path), modality)
        assert {name: p.shape for name, p in model.backbone.named_parameters()} == shapes
        assert (model.K, model.length) == (policy.vocab_size, {"ursa": 1024, "fudoki": 576}[kind])


def test_of_a_hub_id_the_config_is_fetched_alone(stored, monkeypatch):
    def snapshot(name, allow_patterns):
        if name != "BAAI/URSA-1.7B-IBQ512":
            raise LocalEntryNotFoundError("no connection")
        files = [str(f.relative_to(stored["ursa"])) for f in stored["ursa"].rglob("*") if f.is_file()]
        given = {f for f in files if any(fnmatch.fnmatch(f, pattern) for pattern in allow_patterns)}
        assert "transformer/config.json" in given and not any("safetensors" in f for f in given)
        return str(stored["ursa"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert memory.model_of("BAAI/URSA-1.7B-IBQ512", "image").K == 49
    message = "--model nobody/nothing is no directory, and the hub did not give its config .LocalEntryNot"
    with pytest.raises(ValueError, match=message):
        memory.model_of("nobody/nothing", "image")


def test_what_the_arithmetic_does_not_know_is_one_sentence(stored, tmp_path):
    with pytest.raises(ValueError, match="--model ./no/where is no directory, and the hub did not give"):
        memory.model_of("./no/where", "text")
    with pytest.raises(ValueError, match="ursa makes image, the task asks for text"):
        memory.model_of(str(stored["ursa"]), "text")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "multi_modality", "language_config": {}}))
    with pytest.raises(ValueError, match=f"the config of --model {tmp_path} has no 'gen_vision_config'"):
        memory.model_of(str(tmp_path), "image")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="kind 'gpt2' is not supported"):
        memory.model_of(str(tmp_path), "text")


def parsed(stored: Path, flags: str = "", script=udm_grpo, task: str = "tiny-geneval") -> argparse.Namespace:
    return script.flags(["--model", str(stored), "--task", task, *flags.split()])


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("kind", ["ursa", "fudoki"])
@pytest.mark.parametrize("flags", ["", LORA, f"--dtype bfloat16 {LORA}"])
def test_weights_gradients_and_optimizer_are_those_of_the_built_model(stored, kind, flags):
    """To the byte: after a step of the policy as the script loads it."""
    args = parsed(stored[kind], flags)
    policy, reference = load_policy(args, ONE, load_task("tiny-geneval"))
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    x_1 = torch.zeros(2, policy.length, dtype=torch.int64)
    policy(policy.encode(["a red cat"] * 2), x_1, target=x_1).sum().backward()
    optimizer.step()
    moments = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    copy = [p for n, p in policy.named_parameters() if f".{lora.REFERENCE}." in n]
    used = memory.memory(args, memory.model_of(args.model, "image"), 1)
    assert used["weights"] == nbytes(policy.parameters()) - nbytes(copy)
    assert used["gradients"] == nbytes(p.grad for p in trained)
    assert used["optimizer"] == nbytes(moments)
    assert used["reference"] == (nbytes(copy) if flags else nbytes(reference.policy.parameters()))


@pytest.mark.parametrize("kind", ["llada", "ursa", "fudoki"])
@pytest.mark.parametrize("flags", ["", LORA, "--dtype bfloat16 --shard fsdp", f"--dtype bfloat16 {LORA}"])
def test_activations_are_what_autograd_keeps(stored, kind, flags):
    """The arithmetic against the bytes that a block of the tiny model really saves."""
    args = parsed(stored[kind], flags, maskgrpo)
    policy = load(str(stored[kind]), dtype=getattr(torch, args.dtype))
    if args.lora_rank:
        lora.add(policy, str(stored[kind]), args.lora_rank, args.lora_alpha)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    decoder, dtype, held = policy.backbone.get_decoder(), getattr(torch, args.dtype), []
    layers, tokens = decoder.layers, 8 * 24
    for n in (1, len(layers)):  # the difference leaves out what is kept once
        kept.clear()
        decoder.layers = layers[:n]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = decoder(inputs_embeds=torch.zeros(8, 24, 64, dtype=dtype, requires_grad=True))
        held.append(sum(kept.values()))
        del out
    model = memory.model_of(args.model, "text" if kind == "llada" else "image")
    block = model.backbone.get_decoder().layers[0]
    each = memory.saved_per_token(block, torch.finfo(dtype).bits // 8, args.lora_rank)
    assert (held[1] - held[0]) / ((len(layers) - 1) * tokens) == pytest.approx(each, rel=0.02)


class Wide(Policy):
    """Nothing but a head: what is allocated is logits."""

    length, end_ids = 64, ()

    def __init__(self, K: int, mask_id: int | None, dtype: torch.dtype):
        super().__init__()
        self.vocab_size, self.mask_id = K, mask_id
        self.out = nn.Linear(1, K, bias=False, dtype=dtype).requires_grad_(False)

    def hidden(self, prompt, x_t):
        return x_t.unsqueeze(-1).to(self.out.weight.dtype).requires_grad_()

    def head(self, h):
        return self.out(h)

    def unconditional(self, prompt):
        return prompt


def most_alive(work) -> int:
    """Bytes of what ``work()`` allocates, when they are most."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = [0]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive.append(alive[-1] + event.nbytes())
    return max(alive)


B, K = 4, 4096
PROMPT = Prompt(torch.zeros(B, 2, dtype=torch.int64), torch.ones(B, 2, dtype=torch.bool))


@pytest.mark.parametrize("cfg", [0.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [64, 2048])  # of a chunk of the head: four chunks, one
def test_logits_of_an_update_are_what_is_allocated(monkeypatch, cfg, dtype, rows):
    monkeypatch.setattr("models.policy.CHUNK", rows)
    policy, x = Wide(K, None, getattr(torch, dtype)), torch.zeros(B, 64, dtype=torch.int64)
    held = most_alive(lambda: policy(PROMPT, x, target=x, null=PROMPT, cfg=cfg).sum().backward())
    args = sft.flags([])
    assert memory.logits(args, K, 64, B, 4, cfg > 0) == pytest.approx(held, rel=0.02)


SETTINGS = {
    "semi_autoregressive": (7, dict(block=16, eos_rule="none", steps=8)),
    "maskgit": (K, dict(schedule_name="cosine", steps=8)),
    "emerge": (7, dict(schedule_name="linear", steps=1)),
    "euler": (
        None,
        dict(path=common.MetricPath(torch.eye(K, 4), 0.9, 3.0), shift=1.0, rate="integrated", steps=3),
    ),
}


@pytest.mark.parametrize("cfg", [0.0, 2.0])
@pytest.mark.parametrize("sampler", SETTINGS)
@pytest.mark.parametrize("rows", [16, 2048])  # of a chunk, of the head and of probabilities
def test_logits_of_rollout_and_update_are_bounded(monkeypatch, cfg, sampler, rows):
    """Of either, and of the entropy that UDM-GRPO measures: never more than said, and not much less."""
    for name, size in (("models.policy", rows), ("samplers", rows * K), ("common", rows * K)):
        monkeypatch.setattr(f"{name}.CHUNK", size)
    mask_id, own = SETTINGS[sampler]
    policy = Wide(K, mask_id, torch.float32)
    settings = {"sampler": sampler, "temperature": 1.0, "cfg": cfg, "cfg_until": 1.0} | own

    def work():
        generators = [torch.Generator().manual_seed(b) for b in range(B)]
        x_t = samplers.sample(policy, PROMPT, generators, settings).x_0
        policy(PROMPT, x_t, target=x_t).sum().backward()
        if sampler == "euler":
            null = PROMPT if cfg else None
            udm_diagnostics.entropy(policy, PROMPT, x_t, null, cfg)

    held = most_alive(work)
    script = udm_grpo if sampler == "euler" else maskgrpo
    args = argparse.Namespace(**vars(script.flags([])) | {"sampler": sampler, "cfg": cfg, "block": 16})
    assert 1.02 * memory.logits(args, K, 64, B, 4, False) >= held
    assert memory.logits(args, K, 64, B, 4, False) < 1.5 * held


def test_states_of_udm_grpo_are_those_that_an_iteration_holds(stored):
    """To the byte: trajectory, draws, the order in which tokens came, x_1; then x_t, log p twice."""
    args = parsed(stored["ursa"])
    policy = load(str(stored["ursa"]))
    prompt = policy.encode(["a red cat"] * B)
    path, shift = common.uniform_path(policy)
    generators = [torch.Generator().manual_seed(b) for b in range(B)]
    drawn = samplers.sample(
        policy, prompt, generators, samplers.settings_of(args, policy.length, path, shift), True
    )
    held = [x for x, _ in drawn.trajectory] + drawn.x_1 + [drawn.x_0, drawn.revealed, drawn.x_0.clone()]
    for k in udm_grpo.trained_steps(args, 0):
        held.append(udm_grpo.state_at(args, "forward", k, 0.5, [drawn], path, 0, list(range(B))))
        held += [torch.zeros(B, policy.length), torch.zeros(B, policy.length)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    alone = argparse.Namespace(**vars(args) | {"prompts": 1, "group_size": B})
    model = memory.model_of(args.model, "image")
    assert memory.memory(alone, model, 1)["states"] == sum(storages.values())
