"""samplers.py: LLaDA's, MaskGIT's and the emerge sampler against the recorded runs, by enumeration, and the
mistakes that others report."""

import itertools
import json
import math
from pathlib import Path

import pytest
import released_standins
import torch
from conftest import shared
from safetensors.torch import load_file
from toys import Pairwise, golden_llada

import models
import samplers
from models.policy import Prompt
from samplers import (
    check_blocks,
    confidence_of,
    draw,
    emerge,
    emerge_probability,
    maskgit,
    maskgit_length,
    maskgit_remask,
    most_confident,
    sample,
    schedule,
    semi_autoregressive,
    transfer_schedule,
)

GOLDEN = Path(__file__).parent / "golden"
RECORDED = json.loads((GOLDEN / "maskgrpo_formulas.json").read_text())
TENSORS = load_file(GOLDEN / "maskgrpo_formulas.safetensors")
TRACE = load_file(GOLDEN / "maskgit_trace.safetensors")
N, K = 16, 64  # image tokens, codes of mmada_tiny
IMAGE, IDS = slice(14, 30), 190  # where the image lies in a recorded row, and the id of code 0
MASK = 180
SAMPLERS = {
    "semi_autoregressive": dict(steps=8, block=4, temperature=1.0),
    "maskgit": dict(steps=5, temperature=1.0),
    "emerge": dict(steps=5, temperature=1.0),
}


class Fake:
    """A policy whose logits at call n are ``logits(n, x_t)`` [B, L, K]."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, logits, length, vocab_size, mask_id=None, end_ids=()):
        self.logits, self.length, self.vocab_size, self.end_ids = logits, length, vocab_size, end_ids
        self.mask_id = vocab_size if mask_id is None else mask_id
        self.calls = 0

    def __call__(self, prompt, x_t, where=None, null=None, cfg=0.0):
        self.calls += 1
        return self.logits(self.calls - 1, x_t)[where]


def prompts(n):
    return Prompt(torch.zeros(n, 1, dtype=torch.long), torch.ones(n, 1, dtype=torch.bool))


def generators(n, first=0):
    return [torch.Generator().manual_seed(first + i) for i in range(n)]


def a_policy(K=5, L=8, seed=0, **options):
    """Logits that depend on everything shown."""
    policy = Pairwise(K, L, seed, **options)
    policy.requires_grad_(False)
    return policy


def run(name, policy, n, first=0, **options):
    sampler = getattr(samplers, name)
    return sampler(policy, prompts(n), generators(n, first), keep_trajectory=True, **SAMPLERS[name] | options)


# ---- Schedules and single steps


@pytest.mark.parametrize("name", ["cosine", "linear", "pow2", "sigmoid"])
def test_schedules_equal_the_public_ones(name):
    """Golden schedules; theirs ends at 1e-6 or -4e-8, ours at 0."""
    case = RECORDED["schedules"]
    assert schedule(name, torch.tensor(case["t"])).tolist() == pytest.approx(case[name], abs=2e-6)


def test_an_unknown_schedule_is_an_error_that_names_the_accepted_ones():
    with pytest.raises(ValueError, match="--schedule square: accepted are cosine, linear, pow2, sigmoid"):
        schedule("square", 0.5)


@pytest.mark.parametrize(
    "case", RECORDED["num_transfer_tokens"]["cases"], ids=lambda c: str(c["mask_counts"])
)
def test_transfer_schedule_equals_the_public_one(case):
    """Golden num_transfer_tokens."""
    assert [transfer_schedule(n, case["steps"]) for n in case["mask_counts"]] == case["transfer"]


def test_blocks_that_do_not_divide_are_an_error_that_names_both():
    """C9: length 8, block 3; and the shares of 10 and of 3 tokens over 4 steps."""
    with pytest.raises(ValueError, match="--block 3 must divide --length 8"):
        run("semi_autoregressive", a_policy(), 1, block=3)
    with pytest.raises(ValueError, match="--steps 3 must be a multiple of the 2 blocks"):
        check_blocks(8, 4, 3)
    with pytest.raises(ValueError, match="--steps 16 is more than the 8 tokens"):
        check_blocks(8, 4, 16)
    with pytest.raises(ValueError, match="--block 0"):
        check_blocks(8, 0, 8)
    assert transfer_schedule(10, 4) == [3, 3, 2, 2] and transfer_schedule(3, 4) == [1, 1, 1, 0]


@pytest.mark.parametrize("case", RECORDED["emerge_schedule"], ids=lambda c: f"{c['schedule']}-{c['T']}")
def test_emerge_probability_is_one_minus_the_public_probability_to_stay_masked(case):
    """Golden emerge_schedule."""
    ours = [1 - emerge_probability(s, case["T"], case["schedule"]) for s in range(case["T"])]
    assert ours[:-1] == pytest.approx(case["p_mask"], abs=1e-6)
    assert ours[-1] == 0


@pytest.mark.parametrize("name", [k for k in TENSORS if k.startswith("emerge_synthetic.T")])
def test_emerge_draws_from_the_public_probabilities(name):
    """Golden emerge_synthetic: appearing and the token that appears are one categorical of K + 1 classes.

    Our step is a function of one uniform, so its distribution is read off a fine grid of them.
    """
    steps, step = (int(part[1:]) for part in name.split(".")[1:])
    logits = TENSORS["emerge_synthetic.logits"][0]  # [4, 8]
    appear, n = emerge_probability(step, steps), 20_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for z, recorded in zip(logits, TENSORS[name][0], strict=True):
        tokens = draw(z.expand(int((u < appear).sum()), -1), u[u < appear] / appear)
        share = torch.cat([torch.bincount(tokens, minlength=8), (u >= appear).sum()[None]]) / n
        torch.testing.assert_close(share, recorded, rtol=0, atol=1.1 / n)


@pytest.mark.parametrize("case", RECORDED["maskgit_mask_len"], ids=lambda c: f"{c['N']}-{c['T']}")
def test_maskgit_length_equals_the_public_one(case):
    """Golden maskgit_mask_len: each step's unknown count is the last step's mask length."""
    unknown, lengths = case["N"], []
    for step in range(case["T"]):
        unknown = maskgit_length(case["N"], torch.tensor([unknown]), (step + 1) / case["T"]).item()
        lengths.append(unknown)
    assert lengths == case["mask_len"]


@pytest.mark.parametrize("temperature", RECORDED["topk"]["temperatures"])
def test_maskgit_masks_again_what_the_public_code_does(temperature):
    """Golden topk."""
    p, gumbel, length = (TENSORS[f"topk.{name}"] for name in ("probs", "gumbel", "mask_len"))
    again = maskgit_remask(p, gumbel, temperature, length.flatten().long())
    assert torch.equal(again, TENSORS[f"topk.masking.t{temperature}"].bool())


def test_draws_of_large_logits_have_the_right_shares():
    """C3: exp overflows float32 at 100; 20,000 draws between [100, 101] take the second in 0.731 +- 0.012 of
    the cases, half the temperature sharpens, temperature 0 is the argmax."""
    logits = torch.tensor([[100.0, 101.0]]).expand(20_000, 2)
    u = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert draw(logits, u).float().mean().item() == pytest.approx(0.731, abs=0.012)
    assert draw(logits, u, 0.5).float().mean().item() == pytest.approx(1 / (1 + math.exp(-2)), abs=0.012)
    assert draw(logits, u, 0).all()


def test_a_draw_never_takes_what_has_no_probability():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(4, 5)
    u = torch.tensor([0.0, 0.4999999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, u).tolist() == [1, 1, 3, 3]


def test_large_vocabularies_keep_their_tail():
    """C3: of 126,464 equal logits each is drawn, in chunks of rows too; and a token of probability 2e-9
    behind one of nearly 1, which a float32 sum cannot tell from its neighbours."""
    size = 126_464
    u = (torch.tensor([0, 1, size - 1]) + 0.5).double() / size
    many = draw(torch.zeros(300, size), u.repeat(100))  # more than 2^24 probabilities: several chunks
    assert many.tolist() == [0, 1, size - 1] * 100
    logits = torch.zeros(1, 1000)
    logits[0, 0] = 20.0
    u = (math.exp(20) + 516.5) / (math.exp(20) + 999)
    assert draw(logits, torch.tensor([u], dtype=torch.float64)).item() == 517


def test_confidence_is_the_raw_probability_of_the_drawn_token():
    """C4: logits [2, 0], token 1: 0.119 at any temperature (tempered with 0.5 it would be 0.018)."""
    assert confidence_of(torch.tensor([[2.0, 0.0]]), torch.tensor([1])).item() == pytest.approx(
        0.1192, abs=1e-4
    )
    # [M] has a row here and counts: it is barred from the draw only
    logits = torch.tensor([[2.0, 0.0, 5.0]])
    assert draw(samplers.without_mask(logits, 2), torch.tensor([0.99])).item() == 1
    expected = 1 / (math.exp(2) + 1 + math.exp(5))
    assert confidence_of(logits, torch.tensor([1])).item() == pytest.approx(expected)


def test_rows_without_masked_tokens_stay_while_others_go_on():
    """C2: row 0 has no mask left, row 1 has three: one step leaves it two."""
    where = torch.tensor([[False] * 4, [True, True, True, False]])
    reveal = most_confident(torch.tensor([[9.0] * 4, [1.0, 3.0, 2.0, 9.0]]), where, 1)
    assert reveal.tolist() == [[False] * 4, [False, True, False, False]]
    assert most_confident(torch.rand(2, 4), where, 9).equal(where)
    canvas = torch.tensor([[1, 2, 3, 4, 0, 1, 2, 3], [1, 5, 5, 4, 5, 1, 2, 3]]).repeat(20, 1)
    known = canvas < 5
    for name in ("maskgit", "emerge"):
        out = run(name, a_policy(), 40, canvas=canvas)
        assert (out.x_0 < 5).all()
        for x_t in (*(x_t for x_t, _ in out.trajectory), out.x_0):
            assert torch.equal(x_t[known], canvas[known])


# ---- LLaDA


@pytest.mark.parametrize("i", range(13))
def test_semi_autoregressive_is_llada_token_for_token(tmp_path, i):
    """Golden gen.*, gen_padded.*: every state of the public generate.py at temperature 0, with guidance and
    left padding; padding is hidden as a key only."""
    ref = load_file(shared("golden/maskgrpo_estimator.safetensors"))
    case = json.loads(shared("golden/maskgrpo_estimator.json").read_text())["llada_generate"][i]
    policy = golden_llada(tmp_path, case["gen_length"])
    ids = ref[f"{case['prefix']}.prompt"]
    mask = ref["gen_padded.attention_mask"].bool() if case["padded"] else torch.ones_like(ids).bool()
    prompt = Prompt(ids, mask)
    out = semi_autoregressive(
        policy,
        prompt,
        generators(3),
        steps=case["steps"],
        block=case["block_length"],
        null=policy.unconditional(prompt),
        cfg=case["cfg_scale"],
        keep_trajectory=True,
    )
    name = f"{case['prefix']}.{case['index']}"
    assert torch.equal(out.x_0, ref[f"{name}.final"][:, 7:])
    states = torch.stack([x_t for x_t, _ in out.trajectory])
    assert torch.equal(states, ref[f"{name}.states"][:, :, 7:])


@pytest.mark.parametrize("end", [4, 5])
def test_end_ids_are_revealed_last_under_the_eos_rule(end):
    """B1: confidence, not logits, is lowered, and after the draw: a sure end waits, then it is revealed.
    The public switch writes into logits that were drawn from already."""
    logits = torch.full((1, 2, 7), -20.0)
    logits[0, 0, end] = 5
    logits[0, 1, 1] = 0.0
    logits[0, 1, 2] = -0.1
    order = {}
    for rule in ("none", "last"):
        policy = Fake(lambda n, x_t: logits, 2, 7, mask_id=6, end_ids=(4, 5))
        out = semi_autoregressive(policy, prompts(1), generators(1), steps=2, block=2, eos_rule=rule)
        assert out.x_0.tolist() == [[end, 1]]
        order[rule] = out.revealed.tolist()
    assert order == {"none": [[0, 1]], "last": [[1, 0]]}


def test_random_remasking_does_not_look_at_the_logits():
    """C5: two models, the same noise: the same order, though low confidence tells them apart."""
    orders = {
        kind: [run("semi_autoregressive", a_policy(seed=s), 4, remasking=kind).revealed for s in (0, 1)]
        for kind in ("random", "low_confidence")
    }
    assert torch.equal(*orders["random"]) and not torch.equal(*orders["low_confidence"])
    assert sorted(orders["random"][0][0].tolist()) == list(range(8))


def test_blocks_are_done_from_left_to_right():
    out = run("semi_autoregressive", a_policy(), 3)
    assert (out.revealed[:, :4] < 4).all() and (out.revealed[:, 4:] >= 4).all()


# ---- MaskGIT


def recorded_uniforms(p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The u in the middle of what inverse CDF maps to the recorded tokens [...], p [..., K]."""
    cdf = p.double().cumsum(-1) / p.double().sum(-1, keepdim=True)
    upper = cdf.gather(-1, tokens[..., None])[..., 0]
    return upper - p.double().gather(-1, tokens[..., None])[..., 0] / 2


def codes(ids: torch.Tensor) -> torch.Tensor:
    """A recorded row [..., 31] -> x_t [..., 16]."""
    return torch.where(ids[..., IMAGE] == MASK, K, ids[..., IMAGE] - IDS)


def mmada(path, monkeypatch):
    monkeypatch.setattr("models.mmada.MMaDA.load_vq", lambda source, device: None)
    config = json.loads(shared("golden/mmada_tiny/config.json").read_text())
    weights = load_file(shared("golden/mmada_tiny/model.safetensors"))
    return models.load(str(released_standins.mmada(path, config=config, weights=weights)), max_prompt=12)


def prompt_and_null(row, null_row):
    """The text part of recorded rows; [iPAD] is 171."""
    return [Prompt(ids[:, :13], ids[:, :13] != 171) for ids in (row, null_row)]


NULL = torch.tensor([[171] * 10 + [166, 160, 161]]).expand(2, 13)


@pytest.mark.parametrize("model", ["recorded", "real"])
@pytest.mark.parametrize(
    "name, cfg, start", [("cfg3_T6", 3.0, 1.0), ("nocfg_T4", 0.0, 1.0), ("cfg1.5_T4_half", 1.5, 0.5)]
)
def test_maskgit_is_the_public_one_step_by_step(tmp_path, monkeypatch, name, cfg, start, model):
    """Golden maskgit_trace: the recorded draws and Gumbel noise are put in place of ours; then every canvas,
    mask length and final code is theirs. With the recorded probabilities, and with the model itself."""
    ref = {k.removeprefix(name + "."): v for k, v in TRACE.items() if k.startswith(name)}
    steps = len(ref["masking"])
    noise = torch.empty(2, steps, 2, N, dtype=torch.float64)
    noise[:, :, 0] = recorded_uniforms(ref["probs"], ref["sampled_raw"]).transpose(0, 1)
    noise[:, :, 1] = torch.exp(-torch.exp(-ref["gumbel"].double())).transpose(0, 1)
    monkeypatch.setattr(samplers, "uniform", lambda *_, **__: noise)
    prompt, null = prompt_and_null(ref["input_ids"], NULL)
    policy = (
        Fake(lambda n, x_t: ref["probs"][n].log(), N, K)
        if model == "recorded"
        else mmada(tmp_path, monkeypatch)
    )
    canvas = codes(ref["input_ids"])
    out = maskgit(
        policy,
        prompt,
        [None] * 2,
        steps=steps,
        temperature=start,
        null=null,
        cfg=cfg,
        canvas=canvas,
        keep_trajectory=True,
    )
    assert torch.equal(out.x_0, ref["final"])
    fed = [canvas] + [
        torch.where(ref["masking"][s].bool(), K, ref["sampled_raw"][s]) for s in range(steps - 1)
    ]  # masked again, drawn or, below, known before
    for s, (x_t, _) in enumerate(out.trajectory):
        assert torch.equal(x_t == K, fed[s] == K if s else canvas == K)
        new = (x_t != K) & (out.trajectory[s - 1][0] == K) if s else torch.zeros_like(x_t, dtype=torch.bool)
        assert torch.equal(x_t[new], fed[s][new])


@pytest.mark.parametrize("name, start", [("cfg3_T6", 1.0), ("nocfg_T4", 1.0), ("cfg1.5_T4_half", 0.5)])
def test_maskgit_anneals_cumulatively_as_the_public_code(name, start):
    """Golden maskgit_trace: temperature, length and decision of each step, from its recorded confidence."""
    ref = {k.removeprefix(name + "."): v for k, v in TRACE.items() if k.startswith(name)}
    steps, temperature = len(ref["masking"]), start
    unknown = (codes(ref["input_ids"]) == K).sum(-1)
    for s in range(steps):
        temperature *= 1 - (s + 1) / steps
        assert temperature == pytest.approx(ref["temperature"][s].item(), abs=1e-6)
        length = maskgit_length(N, unknown, (s + 1) / steps)
        assert torch.equal(length, ref["mask_len"][s].long())
        again = maskgit_remask(ref["selected_probs"][s], ref["gumbel"][s], temperature, length)
        assert torch.equal(again, ref["masking"][s].bool())
        unknown = again.sum(-1)


# ---- Emerge


@pytest.mark.parametrize("model", ["recorded", "real"])
@pytest.mark.parametrize("name, cfg", [("cfg3.5_T6", 3.5), ("nocfg_T4", 0.0)])
def test_emerge_is_the_public_one_step_by_step(tmp_path, monkeypatch, name, cfg, model):
    """Golden emerge_hidden: the recorded draws are put in as uniforms; every canvas fed to the model and the
    final codes are theirs. With the recorded probabilities, and with the model itself, whose padding is
    hidden (in the public code it is visible: golden emerge_t2i)."""
    ref = {
        k.removeprefix(f"emerge_hidden.{name}."): v
        for k, v in TENSORS.items()
        if k.startswith(f"emerge_hidden.{name}.")
    }
    fed = ref["model_inputs"]  # [T, rows, 31], unconditional rows last
    steps = len(fed)
    p = torch.stack(
        [ref[f"probs_with_mask.{s}"][..., :K] for s in range(steps - 1)] + [ref[f"probs.{steps - 1}"]]
    )
    drawn = torch.stack([ref[f"sampled.{s}"] for s in range(steps)])  # [T, 2, 16], K stays masked
    appear = torch.tensor([emerge_probability(s, steps) for s in range(steps)], dtype=torch.float64)[
        :, None, None
    ]
    u = torch.where(drawn == K, (1 + appear) / 2, appear * recorded_uniforms(p, drawn.clamp(max=K - 1)))
    monkeypatch.setattr(samplers, "uniform", lambda *_, **__: u.transpose(0, 1))
    prompt, null = prompt_and_null(fed[0, :2], NULL)
    policy = Fake(lambda n, x_t: p[n].log(), N, K) if model == "recorded" else mmada(tmp_path, monkeypatch)
    out = emerge(policy, prompt, [None] * 2, steps=steps, null=null, cfg=cfg, keep_trajectory=True)
    assert torch.equal(torch.stack([x_t for x_t, _ in out.trajectory]), codes(fed[:, :2]))
    assert torch.equal(out.x_0, codes(ref["final_ids"]))
    if model == "recorded":
        return
    for s, (x_t, _) in enumerate(out.trajectory):  # the probabilities too, of every masked position
        ours = policy(prompt, x_t, null=null, cfg=cfg).softmax(-1).view(2, N, K) * appear[s].item()
        torch.testing.assert_close(ours[x_t == K], p[s][x_t == K], rtol=0, atol=2e-5)
    visible = load_file(shared("golden/maskgrpo_estimator.safetensors"))[f"emerge.{name}.probs_with_mask.0"]
    assert (visible[..., :K] - p[0]).abs().max() > 1e-3  # a fault: the public model sees padding


def test_emerge_probabilities_are_normalised_for_text_too(tmp_path):
    """A fault, golden emerge_text: the public text sampler weighs tokens with k_t - k_s and staying with
    k_s / k_t, whose sum is not 1; ours divides by k_t, and does not give [M] a share of what appears."""
    ref = load_file(shared("golden/maskgrpo_estimator.safetensors"))
    case = json.loads(shared("golden/maskgrpo_estimator.json").read_text())["emerge_text"]
    policy = golden_llada(tmp_path, case["gen_length"])
    prompt = Prompt(ref["emerge_text.prompt"], torch.ones_like(ref["emerge_text.prompt"]).bool())
    for step in range(3):  # of the 4 of a block
        x_t = ref["emerge_text.model_inputs"][step][:, 6:]
        k_t, k_s = (schedule("linear", r).item() for r in (step / 4, (step + 1) / 4))
        p = policy(prompt, x_t).softmax(-1).view(2, 8, 256)
        public = ref[f"emerge_text.probs.{step}"]
        masked = x_t == policy.mask_id
        masked[:, 4:] = False  # the other block waits
        torch.testing.assert_close(
            public[masked][:, :255], (p * (k_t - k_s))[masked][:, :255], rtol=0, atol=2e-5
        )
        appear = emerge_probability(step, 4, "linear")
        right = (p / (1 - p[..., 255:]))[masked][:, :255] * appear
        assert right.sum(-1).tolist() == pytest.approx([1 - k_s / k_t] * len(right), abs=1e-5)
        if step:  # at step 0 k_t is 1
            assert (public[masked].sum(-1) < 0.95).all()
            assert (public[masked][:, :255] / right - k_t).abs().max() < 0.01


def test_emerge_reveals_each_token_with_the_stated_probability():
    """Of the tokens still masked, step s reveals (alpha_s - alpha_t) / (1 - alpha_t): within 4 standard
    errors, and independently of each other. The last step reveals all."""
    steps, B, L = 5, 400, 8
    revealed = run("emerge", a_policy(), B).revealed
    for s in range(steps):
        left = revealed >= s
        appear = emerge_probability(s, steps)
        share = (revealed == s).sum() / left.sum()
        assert share.item() == pytest.approx(
            appear, abs=4 * math.sqrt(appear * (1 - appear) / left.sum().item()) + 1e-9
        )
    first = (revealed == 0).double().sum(-1)  # a binomial count: no fixed number of tokens a step
    p = emerge_probability(0, steps)
    assert first.var().item() == pytest.approx(L * p * (1 - p), rel=0.3)


def test_emerge_draws_from_the_joint_distribution_of_its_steps():
    """By enumeration: two tokens of two codes, three steps; all 4 outcomes within 4 standard errors."""
    policy, steps, B = a_policy(K=2, L=2), 3, 20_000
    chance = {(2, 2): 1.0}
    for s in range(steps):
        appear, after = (
            emerge_probability(s, steps),
            dict.fromkeys(itertools.product(range(3), repeat=2), 0.0),
        )
        for state, mass in chance.items():
            p = policy(prompts(1), torch.tensor([state])).double().softmax(-1)
            options = [
                [(v, 1.0)]
                if v < 2
                else [(2, 1 - appear), (0, appear * p[k, 0].item()), (1, appear * p[k, 1].item())]
                for k, v in enumerate(state)
            ]
            for (a, pa), (b, pb) in itertools.product(*options):
                after[a, b] += mass * pa * pb
        chance = after
    x_0 = emerge(policy, prompts(B), generators(B), steps=steps).x_0
    for outcome in itertools.product(range(2), repeat=2):
        p = chance[outcome]
        share = (x_0 == torch.tensor(outcome)).all(-1).double().mean().item()
        assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / B))


# ---- Promises of all


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sample_does_not_depend_on_its_batch(name):
    """I1, L11: each row has its own noise; alone, in a batch, or in another order it is the same."""
    policy = a_policy()
    together, alone = run(name, policy, 6), [run(name, policy, 1, first=i) for i in range(6)]
    assert torch.equal(together.x_0, torch.cat([a.x_0 for a in alone]))
    assert torch.equal(together.revealed, torch.cat([a.revealed for a in alone]))
    assert len({tuple(row) for row in together.x_0.tolist()}) > 1  # rows of one prompt differ


@pytest.mark.parametrize("name", SAMPLERS)
def test_shown_tokens_are_never_touched_again(name):
    """C6, the opposite: none of these samplers masks a token again that a step has shown. (MaskGIT masks the
    less confident of what it has just drawn; those were never shown to the model.)"""
    out = run(name, a_policy(), 20)
    states = [x_t for x_t, _ in out.trajectory] + [out.x_0]
    for before, after in itertools.pairwise(states):
        shown = before != 5
        assert torch.equal(before[shown], after[shown])
    assert (states[-1] != 5).all() and states[0].eq(5).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_revealed_is_the_step_whose_input_had_the_token_masked_last(name):
    out = run(name, a_policy(), 20)
    masked_last = torch.stack([x_t == 5 for x_t, _ in out.trajectory]).sum(0) - 1
    assert torch.equal(out.revealed, masked_last)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_trajectory_is_exactly_what_the_model_was_fed(name):
    fed = []
    policy = a_policy()
    policy.register_forward_pre_hook(lambda _, inputs: fed.append(inputs[1].clone()))
    out = run(name, policy, 3)
    assert len(fed) == len(out.trajectory) == SAMPLERS[name]["steps"]
    assert all(torch.equal(a, b) for a, (b, _) in zip(fed, out.trajectory, strict=True))
    times = [t for _, t in out.trajectory]
    assert times[0] == 1 and all(a > b > 0 for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_mask_id_is_never_an_answer_though_it_has_a_row(name):
    """The head of a text model has a row for [M], here the likeliest by far."""
    logits = torch.zeros(4, 8, 6)
    logits[..., 5] = 50.0
    policy = Fake(lambda n, x_t: logits, 8, 6, mask_id=5)
    assert (run(name, policy, 4).x_0 < 5).all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_guidance_stops_where_cfg_until_says(name):
    weights = []
    policy = a_policy()
    policy.register_forward_pre_hook(lambda _, args, kw: weights.append(kw["cfg"]), with_kwargs=True)
    steps = SAMPLERS[name]["steps"]
    run(name, policy, 1, null=prompts(1), cfg=2.0, cfg_until=0.5)
    assert weights == [2.0 if s / steps < 0.5 else 0.0 for s in range(steps)]


def test_a_sample_holds_no_probability_that_a_trainer_could_take_for_an_old_one():
    """E2: old log-probabilities are recomputed; the sampler hands on none."""
    assert set(vars(run("emerge", a_policy(), 1))) == {"x_0", "revealed", "trajectory", "x_1"}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sample_is_the_one_entry_point(name):
    policy = a_policy()
    settings = dict(sampler=name, cfg=1.0, cfg_until=1.0, schedule_name="cosine", eos_rule="none", block=4)
    settings |= SAMPLERS[name]
    out = sample(policy, prompts(2), generators(2), settings)
    own = run(name, policy, 2, null=policy.unconditional(prompts(2)), cfg=1.0)
    assert torch.equal(out.x_0, own.x_0)
