"""Samplers cost little beside the forward passes."""

import pytest

from eval import bench


@pytest.mark.parametrize("name", list(bench.CASES))
def test_a_sampler_adds_little_to_its_forward_passes(name):
    """15 percent on a quiet machine (python -m eval.bench); the bound here leaves room for a busy one."""
    whole, bare = bench.overhead(name, batch=48, repeats=5)
    assert bare < whole < 1.5 * bare
