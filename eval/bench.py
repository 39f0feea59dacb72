"""Speed: ``python -m eval.bench`` times each sampler of the built-in worlds against its bare forward passes.

The overhead of a sampler is its time over that of the same policy calls on the same inputs, less 1.
"""

import argparse
import time

import torch

import samplers
from common import generator

CASES = {
    "semi_autoregressive": ("tiny-math", dict(steps=8, block=8, temperature=1.0, eos_rule="none")),
    "maskgit": ("tiny-geneval", dict(steps=8, temperature=1.0, schedule_name="cosine")),
    "emerge": ("tiny-geneval", dict(steps=16, temperature=1.0, schedule_name="cosine")),
}


class Recorded:
    """A policy that keeps what it was called with."""

    def __init__(self, policy):
        self.policy, self.calls = policy, []

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.policy(*args, **kwargs)


@torch.no_grad()
def overhead(name: str, batch: int, repeats: int) -> tuple[float, float]:
    """(seconds of the sampler, seconds of its policy calls alone): the least of ``repeats``, in turn."""
    from eval.task import load_task
    from models import tiny

    task, settings = CASES[name]
    policy, rows = tiny.build(task), load_task(task).rows("test", None)
    prompt = policy.encode([rows[i % len(rows)]["prompt"] for i in range(batch)])
    settings = settings | dict(sampler=name, cfg=0.0, cfg_until=1.0)
    recorded = Recorded(policy)
    samplers.sample(recorded, prompt, [generator("bench", i) for i in range(batch)], settings)
    whole, bare = [], []
    for _ in range(repeats):
        noise = [generator("bench", i) for i in range(batch)]
        started = time.perf_counter()
        samplers.sample(policy, prompt, noise, settings)
        whole.append(time.perf_counter() - started)
        started = time.perf_counter()
        for args, kwargs in recorded.calls:
            policy(*args, **kwargs)
        bare.append(time.perf_counter() - started)
    return min(whole), min(bare)


def main() -> None:
    parser = argparse.ArgumentParser("eval.bench", description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    print("| sampler | responses a second | overhead over bare forward passes |\n|---|---|---|")
    for name in CASES:
        whole, bare = overhead(name, args.batch, args.repeats)
        print(f"| {name} | {args.batch / whole:.0f} | {whole / bare - 1:.1%} |")


if __name__ == "__main__":
    main()
