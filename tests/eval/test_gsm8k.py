import json
import re
from pathlib import Path

import numpy as np
import pytest
import released_standins
import torch
from conftest import shared

import models
from eval import gsm8k
from eval.task import load_task

GOLDEN = Path(__file__).parents[1] / "golden"
SLICE = str(GOLDEN / "gsm8k_slice.jsonl")
FORMATS = json.loads((GOLDEN / "format_rewards.json").read_text())
CLEAR = [case for case in FORMATS["cases"] if not case["ambiguous"]]
ANSWERS = json.loads((GOLDEN / "gsm8k_answers.json").read_text())["cases"]

QUESTION = (
    "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her "
    "friends every day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck "
    "egg. How much in dollars does she make every day at the farmers' market?"
)
EXPERT = (
    "You are a math expert. You will be given a question to solve. Solve it step by step. "
    "Wrap the final answer in a \\boxed{}. \nRespond in the following format:\n"
)
PROMPTS = {
    ("d1", "train"): "\nRespond in the following format:\n<reasoning>\n...\n</reasoning>\n"
    + "<answer>\n...\n</answer>\n\n\n"
    + QUESTION,
    ("d1", "test"): EXPERT
    + "<reasoning>\nYour reasoning here\n</reasoning>\n<answer>\n\\boxed{...}\n</answer>\n\n"
    + QUESTION,
    ("maskgrpo", "train"): EXPERT
    + "<reasoning>\nYour reasoning here\n</reasoning>\n\\boxed{...}\n\nQuestion:"
    + QUESTION
    + "\n",
    ("maskgrpo", "test"): EXPERT
    + "<reasoning>\nYour reasoning here\n</reasoning>\n\\boxed{...}\n\n"
    + QUESTION,
}


def reward(text: str, answer: str = "42", protocol: str | None = None) -> dict[str, float]:
    scores = load_task("gsm8k", protocol).reward([{"answer": answer}], [text])
    return {name: float(value[0]) for name, value in scores.items()}


@pytest.mark.parametrize(("protocol", "split"), PROMPTS)
def test_the_first_prompt_of_a_protocol_is_pinned(protocol, split):
    """L7."""
    assert load_task("gsm8k", protocol).rows(split, SLICE)[0]["prompt"] == PROMPTS[protocol, split]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_first_prompt_of_llada_is_its_four_shot_one(split):
    """L7: LLaDA's own evaluation, four worked examples before the question."""
    prompt = load_task("gsm8k", "llada").rows(split, SLICE)[0]["prompt"]
    assert prompt.startswith("Question: Angelo and Melanie want to plan how many hours over the next week")
    assert prompt.count("\nLet's think step by step\nAnswer:") == 5
    assert re.findall(r"The answer is (\d+)\n", prompt) == ["4", "201", "140", "146"]
    assert prompt.endswith(f"The answer is 146\nQuestion: {QUESTION}\nLet's think step by step\nAnswer:")


def test_the_default_prompts_are_those_of_d1():
    for split in ("train", "test"):
        assert load_task("gsm8k").rows(split, SLICE) == load_task("gsm8k", "d1").rows(split, SLICE)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A tiny LLaDA whose tokens are single characters."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set("".join(PROMPTS.values()) + "user assistant 0123456789*=+<>/"))
    ids = released_standins.LLADA_IDS
    words = Tokenizer(WordLevel({c: i for i, c in enumerate(characters)} | ids, unk_token=characters[0]))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens(list(ids))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = released_standins.CHAT
    path = tmp_path_factory.mktemp("llada")
    released_standins.write(path, released_standins.LLADA | {"max_sequence_length": 2048}, fast)
    return models.load(str(path), length=128)


def test_token_ids_of_the_first_prompt_are_those_of_the_chat_template(policy):
    """L5: one user message in LLaDA's turns, then the assistant's header; nothing else."""
    prompt = load_task("gsm8k").rows("test", SLICE)[0]["prompt"]
    special = released_standins.LLADA_IDS
    ids = policy.encode([prompt]).ids[0].tolist()
    spell = policy.tokenizer.convert_tokens_to_ids
    user, assistant, lines = spell(list("user")), spell(list("assistant")), spell(["\n", "\n"])
    start, end = special["<|start_header_id|>"], special["<|end_header_id|>"]
    expected = [special["<|startoftext|>"], start, *user, end, *lines, *spell(list(prompt.strip()))]
    expected += [special["<|eot_id|>"], start, *assistant, end, *lines]
    assert ids == expected


def test_nothing_after_the_end_of_text_changes_a_reward(policy):
    """K1b: the canvas behind the end is not read."""
    text = "<reasoning>\n6*7=42\n</reasoning>\n<answer>\n42\n</answer>"
    ids = policy.tokenizer.convert_tokens_to_ids(list(text))
    end, nine = released_standins.LLADA_IDS["<|eot_id|>"], policy.tokenizer.convert_tokens_to_ids("9")
    canvas = [ids + [end] + [end] * (127 - len(ids)), ids + [end] + [nine] * (127 - len(ids))]
    clean, tail = policy.decode(torch.tensor(canvas))
    assert clean == tail == text
    for protocol in (None, *gsm8k.PROTOCOLS):
        assert reward(clean, protocol=protocol) == reward(tail, protocol=protocol)


@pytest.mark.parametrize("protocol", ["d1", "maskgrpo"])
def test_terms_of_a_recipe_are_the_right_ones(protocol):
    used = FORMATS["used_in_training"][f"{protocol} gsm8k"]
    task = load_task("gsm8k", protocol)
    assert task.weights == dict.fromkeys(used, 1.0)
    scores = task.reward([{"answer": case["gold"]} for case in CLEAR], [case["completion"] for case in CLEAR])
    for name in used:
        expected = np.array([case["right"][protocol][name] for case in CLEAR])
        np.testing.assert_allclose(scores[name], expected, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("protocol", [None, "d1", "maskgrpo"])
def test_the_score_is_the_one_verdict(protocol):
    task = load_task("gsm8k", protocol)
    cases = [case for case in ANSWERS if not case["ambiguous"]]
    rows = [{"answer": f"steps\n#### {case['gold']}"} for case in cases]
    score = task.reward(rows, [case["completion"] for case in cases])[task.score]
    assert score.tolist() == [float(case["right"]["correct"]) for case in cases]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("protocol", [None, "d1", "maskgrpo", "llada"])
def test_the_example_answer_of_the_prompt_earns_the_full_format_reward(protocol, split):
    """K2."""
    prompt = load_task("gsm8k", protocol).rows(split, SLICE)[0]["prompt"]
    if protocol == "llada":
        example = prompt.split("Answer:")[1].split("Question:")[0]
    else:
        example = prompt[prompt.index("<reasoning>") :].split("\n\n")[0]
    scores = reward(example, protocol=protocol)
    full = {
        None: {"format": 1.0},
        "d1": {"xmlcount": 0.5, "soft_format": 0.5, "strict_format": 0.5},
        "maskgrpo": {"soft_format": 0.5},
        "llada": {"format": 1.0},
    }[protocol]
    assert {name: scores[name] for name in full} == full


def test_format_needs_no_final_line_feed_and_allows_several_lines():
    """K1a, K1c."""
    text = "<reasoning>\nr\n</reasoning>\n<answer>\n5\n</answer>"
    for completion in (text, text.replace("\nr\n", "\nr\ns\n\nt\n")):
        scores = reward(completion, "5", "d1")
        assert scores["strict_format"] == scores["soft_format"] == 0.5
        assert scores["xmlcount"] == 0.5  # no tail penalty; as published, 0.047 for the 47 characters
    assert reward(text + "\nBye", "5", "d1")["xmlcount"] == pytest.approx(0.5 - 2 * 0.003)


def test_our_terms_lie_within_0_and_1_whatever_follows_the_answer():
    text = "<reasoning>\nr\n</reasoning>\n<answer>\n5\n</answer>\n" + "x" * 5_000
    assert all(0 <= value <= 1 for value in reward(text, "5").values())
    assert reward(text, "5")["correctness"] == 1


def test_strict_and_flexible_are_both_reported():
    """K4."""
    text = "So the answer is $18 per day."
    for protocol in (None, "d1", "maskgrpo"):
        task, scores = load_task("gsm8k", protocol), reward(text, "18", protocol)
        assert (scores[task.score], scores["flexible"]) == (0, 1)
        assert "flexible" not in task.weights
    scores = reward(text, "18", "llada")  # its own evaluation takes the last number
    assert (scores["verdict"], scores["correctness"]) == (0, 1)


def test_llada_does_not_read_a_question_that_the_model_went_on_to_write():
    text = "The answer is 18\nQuestion: Tom has 7 pens."
    assert reward(text, "18", "llada")["correctness"] == 1


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [("$1,234.00", "1234", 1), ("12345", "1234", 0), ("70,000.", "70000", 1), ("-3", "−3", 1)],
)
def test_answers_are_compared_as_numbers(answer, gold, right):
    """K6."""
    assert reward(f"<answer>{answer}</answer>", gold)["correctness"] == right


def test_an_empty_batch_has_every_component():
    for protocol in (None, *gsm8k.PROTOCOLS):
        task = load_task("gsm8k", protocol)
        scores = task.reward([], [])
        assert set(scores) >= {*task.weights, task.score}
        assert all(value.shape == (0,) for value in scores.values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('{"question": "q"}', "lacks the field answer"),
        ('{"question": "q", "answer": "42"}', "does not end with '#### ' and a number"),
        ('{"question": "q", "answer": "#### many"}', "does not end with '#### ' and a number"),
        ('{"question": 3, "answer": "#### 1"}', "question is not a text"),
    ],
)
def test_a_malformed_row_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        load_task("gsm8k").rows("train", str(path))
    assert str(error.value).startswith(f"{path}:2: ")


def test_split_in_a_path_stands_for_the_split(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"question": split, "answer": "#### 1"}))
        rows = load_task("gsm8k").rows(split, str(tmp_path / "{split}.jsonl"))
        assert rows[0]["question"] == split


def test_hub_rows_are_those_of_the_public_data_set(monkeypatch):
    import datasets

    def load_dataset(*name, split):
        assert name == ("openai/gsm8k", "main") and split == "train"
        return [{"question": "q", "answer": "#### 1"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_task("gsm8k").rows("train", None)[0]["prompt"].endswith("q")


def test_an_unreachable_hub_is_one_sentence(monkeypatch):
    import datasets

    def load_dataset(*name, split):
        raise ConnectionError("no network\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"^openai/gsm8k \(test\) cannot be loaded: no network; .*--data$"):
        load_task("gsm8k").rows("test", None)


def test_an_unknown_protocol_is_refused_with_what_is_accepted():
    with pytest.raises(ValueError, match="--protocol d2: gsm8k accepts d1, maskgrpo, llada"):
        load_task("gsm8k", "d2")


@pytest.mark.parametrize(("split", "n"), [("train", 7473), ("test", 1319)])
def test_every_gold_answer_of_the_data_set_is_right_by_the_verdict(split, n):
    rows = load_task("gsm8k").rows(split, str(shared(f"data/gsm8k_{split}.jsonl")))
    assert len(rows) == n
    for row in rows:
        assert gsm8k.verdict(row["answer"], gsm8k.gold(row))
        assert gsm8k.verdict(rf"<answer>\boxed{{{gsm8k.gold(row)}}}</answer>", gsm8k.gold(row))
        assert not gsm8k.verdict(rf"\boxed{{{gsm8k.gold(row)}9}}", gsm8k.gold(row))
