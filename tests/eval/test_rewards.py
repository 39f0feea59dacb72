"""Named rewards: the command line, faults of a reward, weighted sums."""

import importlib
import warnings

import numpy as np
import pytest
import torch

from eval.reward_client import RewardServersDown
from eval.rewards import REWARDS, Rewards, as_scores, load_reward, parse_rewards
from eval.task import Task

ROWS = [{"prompt": p} for p in "abcd"]
TEXTS = ["", "x", "xx", "xxx"]


def lengths(rows, completions):
    return {"length": np.array([float(len(c)) for c in completions]), "words": [1] * len(rows)}


def make_task(reward=lengths, weights=None, modality="text"):
    return Task("toy", modality, lambda split, data: ROWS, reward, weights or {"length": 1.0}, "length")


def quietly(rewards, rows=ROWS, completions=TEXTS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rewards.components(rows, completions)


@pytest.mark.parametrize(
    "spec, parsed",
    [
        ("hpsv3=1,clip=0.5", [("hpsv3", 1.0), ("clip", 0.5)]),
        ("correctness", [("correctness", 1.0)]),
        (" a = 2 , b=-1", [("a", 2.0), ("b", -1.0)]),
        ("http://host:8000/hpsv3=1", [("http://host:8000/hpsv3", 1.0)]),
        ("http://host:8000/hpsv3", [("http://host:8000/hpsv3", 1.0)]),
        ("http://a:1/x|http://b:1/x=0.5,y=0", [("http://a:1/x|http://b:1/x", 0.5), ("y", 0.0)]),
    ],
)
def test_reward_flag_is_split_at_commas_with_the_weight_after_the_last_equals_sign(spec, parsed):
    assert parse_rewards(spec) == parsed


@pytest.mark.parametrize("spec", ["", "a,,b", "a,", "=1", "a=", "a=x", "a=nan", "a=inf", "a=1,a=2"])
def test_malformed_reward_flag_is_one_sentence_naming_the_flag(spec):
    with pytest.raises(ValueError, match="^--reward [^\n]*$"):
        parse_rewards(spec)


def test_unknown_reward_lists_what_is_accepted():
    with pytest.raises(ValueError, match="(?s)--reward nothing: unknown.*length, words.*clip.*ocr.*http://"):
        Rewards(make_task(), "nothing=1")
    with pytest.raises(ValueError, match="--reward clip: scores pictures"):
        Rewards(make_task(), "clip=1")


def test_registry_names_every_reward_of_the_papers():
    papers = {
        "clip",
        "pickscore",
        "imagereward",
        "hpsv3",
        "unified",
        "deqa",
        "geneval",
        "geneval_dense",
        "ocr",
    }
    assert papers <= REWARDS.keys()


def test_default_is_the_weights_of_the_task_and_its_other_components_are_logged_with_weight_0():
    rewards = Rewards(make_task())
    components = rewards.components(ROWS, TEXTS)
    assert components["length"].tolist() == [0, 1, 2, 3] and components["words"].tolist() == [1] * 4
    assert components["length"].dtype == components["words"].dtype == np.float64
    assert rewards.total(components).tolist() == [0, 1, 2, 3]


def test_total_is_the_weighted_sum_of_the_named_components():
    rewards = Rewards(make_task(), "length=2,words=-0.5")
    assert rewards.total(rewards.components(ROWS, TEXTS)).tolist() == [-0.5, 1.5, 3.5, 5.5]


def test_names_mean_the_components_of_the_task_before_the_registry():
    task = make_task(lambda rows, completions: {"clip": np.arange(len(rows))}, {"clip": 1.0}, "image")
    task = Task(task.name, "image", task.rows, task.reward, task.weights, "clip")
    rewards = Rewards(task, "clip=3")  # CLIP itself would need its weights
    assert rewards.total(rewards.components(ROWS, TEXTS)).tolist() == [0, 3, 6, 9]


def test_a_function_of_ones_own_file_is_a_reward_beside_those_of_the_task(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def vowels(rows, completions):\n    return {'vowels': [c.count('a') for c in completions]}\n"
    )
    rewards = Rewards(make_task(), f"length=1,{file}:vowels=10")
    components = rewards.components(ROWS[:2], ["ab", "aa"])
    assert components["vowels"].tolist() == [1, 2] and rewards.total(components).tolist() == [12, 22]
    with pytest.raises(ValueError, match="no function 'consonants'"):
        load_reward(f"{file}:consonants")
    with pytest.raises(ValueError, match="no such file"):
        load_reward("absent.py:vowels")


def test_a_raising_reward_scores_0_and_is_counted_and_stops_a_strict_run():
    """Report row K10."""

    def broken(rows, completions):
        raise TypeError("a programming error")

    rewards = Rewards(make_task(broken))
    with pytest.warns(UserWarning, match="TypeError: a programming error"):
        components = rewards.components(ROWS, TEXTS)
    assert components["length"].tolist() == [0] * 4
    assert rewards.errors == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned once
        rewards.components(ROWS, TEXTS)
    assert rewards.errors == 2
    with pytest.raises(TypeError, match="a programming error"):
        Rewards(make_task(broken), strict=True).components(ROWS, TEXTS)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_each_score_that_is_no_number_is_counted_and_only_it_is_0(bad):
    """Report rows K10, M7: a reward that silently answers None or NaN is an error."""

    def reward(rows, completions):
        return {"length": [1.0, bad, 3.0, bad]}

    rewards = Rewards(make_task(reward))
    components = quietly(rewards)
    assert components["length"].tolist() == [1, 0, 3, 0] and rewards.errors == 2
    assert np.isfinite(rewards.total(components, 4, normalize=True)).all()
    with pytest.raises(ValueError, match="2 of 4 scores of length"):
        Rewards(make_task(reward), strict=True).components(ROWS, TEXTS)


@pytest.mark.parametrize(
    "answer",
    [
        {"length": [1.0] * 3},
        {"length": 1.0},
        {"length": np.ones((4, 1))},
        {"length": ["1"] * 4},
        {"length": None},
        {"other": [1.0] * 4},
        [1.0] * 4,
        None,
    ],
)
def test_an_answer_of_the_wrong_form_is_an_error_like_an_exception(answer):
    """Report row K10: never broadcast, never converted in silence."""
    rewards = Rewards(make_task(lambda rows, completions: answer))
    assert quietly(rewards)["length"].tolist() == [0] * 4 and rewards.errors == 1
    with pytest.raises(TypeError):
        Rewards(make_task(lambda rows, completions: answer), strict=True).components(ROWS, TEXTS)


def test_one_failing_reward_leaves_the_others(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def broken(rows, completions):\n    raise OSError('gone')\n")
    rewards = Rewards(make_task(), f"length=1,{file}:broken=1")
    assert rewards.total(quietly(rewards)).tolist() == [0, 1, 2, 3] and rewards.errors == 1


def test_scores_may_be_lists_arrays_or_tensors_of_any_number_type():
    for values in ([1, 0], [True, False], np.float32([1, 0]), torch.tensor([1, 0]).bfloat16()):
        scores = as_scores(values, 2)
        assert scores.dtype == np.float64 and scores.tolist() == [1, 0]


def test_all_servers_down_passes_through_uncounted():
    def down(rows, completions):
        raise RewardServersDown("all down")

    rewards = Rewards(make_task(down))
    with pytest.raises(RewardServersDown):
        rewards.components(ROWS, TEXTS)
    assert rewards.errors == 0


def test_a_component_once_seen_stays_when_the_reward_fails_or_a_shard_is_empty():
    calls = iter([False, True])

    def flaky(rows, completions):
        if next(calls):
            raise OSError("once")
        return lengths(rows, completions)

    rewards = Rewards(make_task(flaky))
    assert Rewards(make_task(flaky)).components([], [])["length"].shape == (0,)
    first, failed, empty = quietly(rewards), quietly(rewards), quietly(rewards, [], [])
    assert list(first) == list(failed) == list(empty) == ["length", "words"]
    assert failed["words"].tolist() == [0] * 4 and empty["words"].shape == (0,)


def test_components_come_in_one_order_whatever_a_reward_answers_first():
    """Processes gather them one by one."""

    def task(order):
        return make_task(lambda rows, completions: {key: np.ones(len(rows)) for key in order}, {"b": 1.0})

    orders = [
        list(Rewards(task(o)).components(ROWS, TEXTS)) for o in (["length", *"dbca"], [*"abcd", "length"])
    ]
    assert orders[0] == orders[1] == ["b", "length", "a", "c", "d"]


def test_normalized_components_have_mean_0_and_std_1_in_each_group():
    rewards = Rewards(make_task(), "length=2,words=5")
    components = {"length": np.array([0.0, 2, 100, 104]), "words": np.array([0.1, 0.1, 0.1, 0.1])}
    assert rewards.total(components, 2, normalize=True).tolist() == [-2, 2, -2, 2]
    assert np.allclose(rewards.total(components), [0.5, 4.5, 200.5, 208.5])


def test_normalized_component_without_spread_is_exactly_0():
    rewards = Rewards(make_task())
    values = np.full(6, 0.1)  # its standard deviation is a rounding error, not 0
    assert values[:3].std() > 0
    assert (rewards.total({"length": values}, 3, normalize=True) == 0).all()


def test_normalizing_needs_whole_groups():
    with pytest.raises(ValueError, match="--reward-normalize: 4 scores"):
        Rewards(make_task()).total({"length": np.zeros(4)}, 3, normalize=True)


def test_held_out_metrics_stand_beside_the_trained_reward(tmp_path):
    """Report row K16: weight 0 measures without training."""
    file = tmp_path / "mine.py"
    file.write_text("def ones(rows, completions):\n    return {'ones': [1.0] * len(rows)}\n")
    rewards = Rewards(make_task(), f"length=1,words=0,{file}:ones=0")
    components = rewards.components(ROWS, TEXTS)
    assert {k: v.mean() for k, v in components.items()} == {"length": 1.5, "words": 1.0, "ones": 1.0}
    assert rewards.total(components).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("spec", "loads", "measured", "total"),
    [
        (None, 1, ["length", "words"], 3),
        ("words=1", 1, ["length", "words"], 1),
        ("edges=1,length=0.5", 1, ["length", "edges"], 1.5),
        ("edges=1", 0, ["edges"], 0),
        ("{file}:length=1", 0, ["length"], 7),
    ],
)
def test_models_of_a_tasks_own_reward_are_loaded_at_once_or_never(tmp_path, spec, loads, measured, total):
    """A run on GenEval's prompts by another reward needs no detector; one that does must not fail late."""
    file, calls = tmp_path / "mine.py", []
    file.write_text("def length(rows, completions):\n    return {'length': [7.0] * len(rows)}\n")

    def own(rows, completions):
        return lengths(rows, completions)

    own.load = lambda: calls.append("load")
    rewards = Rewards(make_task(own, modality="image"), spec and spec.format(file=file), strict=True)
    assert len(calls) == loads
    found = rewards.components(ROWS, [torch.zeros(3, 4, 4, dtype=torch.uint8)] * 4)
    assert found.keys() >= set(measured) and ("words" in found) == bool(loads)
    assert rewards.total(found).tolist() == [total] * 4 and len(calls) == loads


def test_a_wrong_name_is_said_before_any_model_is_loaded():
    def own(rows, completions):
        return lengths(rows, completions)

    own.load = lambda: pytest.fail("loaded")
    with pytest.raises(ValueError, match="--reward nothing: unknown; accepted: length, words"):
        Rewards(make_task(own), "length=1,nothing=1")


def test_rows_and_completions_must_be_as_many():
    with pytest.raises(ValueError, match="4 rows for 3 completions"):
        Rewards(make_task()).components(ROWS, TEXTS[:3])


@pytest.mark.parametrize("name", REWARDS)
def test_every_name_of_the_registry_has_its_function(name):
    module, _, function = REWARDS[name].partition(":")
    assert callable(getattr(importlib.import_module(f"eval.{module}"), function or "reward"))
