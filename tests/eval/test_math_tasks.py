"""What GSM8K and MATH share; the prompts themselves are pinned in the tests of each."""

import numpy as np
import pytest

from eval.math_tasks import math_task

PRESETS = {
    None: (lambda text, gold: {"same": text == gold, "length": len(text)}, {"same": 2.0}, "same"),
    "d1": (lambda text, gold: {"length": len(text)}, {"length": 1.0}, "length"),
}


def rows(split, data, protocol):
    return [{"prompt": f"{split} {data} {protocol}"}]


def make(protocol=None):
    return math_task("sums", protocol, PRESETS, rows, gold=lambda row: row["answer"])


def test_a_protocol_brings_its_prompts_terms_weights_and_score():
    ours, d1 = make(), make("d1")
    assert (ours.name, ours.modality, ours.weights, ours.score) == ("sums", "text", {"same": 2.0}, "same")
    assert (d1.weights, d1.score) == ({"length": 1.0}, "length")
    assert ours.rows("test", "x") == d1.rows("test", "x") == [{"prompt": "test x d1"}]


def test_each_term_is_a_float_array_in_the_order_of_the_rows():
    found = make().reward([{"answer": "1"}, {"answer": "2"}], ["1", "222"])
    assert {name: values.tolist() for name, values in found.items()} == {"same": [1, 0], "length": [1, 3]}
    assert all(values.dtype == np.float64 for values in found.values())
    assert {name: values.shape for name, values in make().reward([], []).items()} == {
        "same": (0,),
        "length": (0,),
    }
    with pytest.raises(ValueError):
        make().reward([{"answer": "1"}], [])


def test_an_unknown_protocol_is_refused_with_what_is_accepted():
    with pytest.raises(ValueError, match="--protocol d2: sums accepts d1, maskgrpo, llada"):
        make("d2")
