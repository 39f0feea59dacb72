"""Which tests are judged outside of the program, how, and which are refused."""

import pytest

from eval.asserts import called_names, holds, parse_test


def judged(test: str, **answers) -> bool:
    """The verdict where the program answers each source text as told; any other question is a KeyError."""
    questions = {source.replace("_", "("): value for source, value in answers.items()}

    def call(source):
        name = source.split("(")[0]
        if name not in questions:
            raise AssertionError(f"asked for {source}")
        return questions[name]

    return holds(parse_test(test), call)


@pytest.mark.parametrize(
    "test",
    [
        "assert f(2, 3) == 5",
        "assert f(2, 3) == 5, 'a message'",
        "assert 5 == f(2, 3)",
        "assert abs(f(2) - 5.1) < 0.2",
        "assert math.isclose(f(1), 5.0000001, rel_tol=1e-3)",
        "assert f(1) in (4, 5)",
        "assert not f(1) != 5",
        "assert 4 < f(1) <= 5 and isinstance(f(1), int)",
        "assert int(f(5, 3)) == -(-5)",
        "assert [f(1), f(2)][0:1] == [5]",
        "assert {'a': f(1)} == {'a': 5}",
        "assert f(1) == 1.0/3 * 15",
    ],
)
def test_a_test_holds_for_its_value_and_no_other(test):
    assert judged(test, f=5)
    assert not judged(test, f=7)


def test_the_program_is_only_asked_for_its_own_calls():
    asked = []

    def call(source):
        asked.append(source)
        return [3, 1]

    assert holds(parse_test("assert sorted(f([9], k=int)) == [1, 3]"), call)
    assert asked == ["f([9], k=int)"]  # neither the expected value nor sorted


def test_a_function_named_like_a_builtin_is_the_programs_when_it_stands_alone():
    assert judged("assert sum(10, 15) == 6", sum=6)  # MBPP 126
    assert judged("assert sum(f(1)) == 6", f=[1, 2, 3])
    assert called_names(parse_test("assert sum(10, 15) == 6")) == {"sum"}
    assert called_names(parse_test("assert abs(f(1) - 2) < 1")) == {"f"}


@pytest.mark.parametrize(
    "test",
    [
        "assert all(f(x) == x for x in range(3))",
        "assert [f(x) == x for x in (1, 2)] == [True, True]",
        "assert (lambda: f(1) == 1)()",
        "assert np.allclose(f(1), [1.0])",
        "assert collections.Counter(f(1)) == {1: 1}",
        "assert eval(f(1))",
        "f(1)",
        "x = f(1)\nassert x == 1",
        "assert f(1) ==",
    ],
)
def test_a_test_that_the_program_would_decide_itself_is_refused(test):
    with pytest.raises(ValueError, match="test "):
        parse_test(test)


def test_an_answer_of_another_kind_fails_the_test_and_raises_nothing():
    assert not judged("assert abs(f(1) - 2) < 1", f="two")
    assert not judged("assert f(1)[3] == 2", f=[1])
    assert not judged("assert len(f(1)) == 2", f=None)
    assert not judged("assert f(1) < 2", f={})


def test_no_answer_makes_the_judge_compute_without_end():
    assert not judged("assert f(1) ** g(1) == 1", f=10, g=10**9)
    assert not judged("assert f(1) * g(1) == 1", f="x", g=10**12)
    assert judged("assert f(1) ** 2 == 100", f=10)
