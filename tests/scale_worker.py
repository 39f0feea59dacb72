"""Runs in each torchrun process of tests/test_scale.py: several short runs of maskgrpo.py, one after another.

torchrun ... scale_worker.py out.json '[["--flag", ...], ...]'
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common  # noqa: E402
import maskgrpo  # noqa: E402

torch.set_num_threads(1)
world = common.start_processes()
maskgrpo.start_processes = lambda: world
calls = []  # of each run: how often this rank gathered weights, reduced gradients, summed numbers


def count(module, name: str) -> None:
    call = getattr(module, name)

    def counted(*args, **kwargs):
        calls[-1][name] = calls[-1].get(name, 0) + 1
        return call(*args, **kwargs)

    setattr(module, name, counted)


for module, name in (
    (_fsdp_param_group, "foreach_all_gather"),
    (_fsdp_param_group, "foreach_reduce"),
    (dist, "all_reduce"),
    (dist, "all_gather"),
):
    count(module, name)
for argv in json.loads(sys.argv[2]):
    calls.append({})
    maskgrpo.main(argv)
    dist.barrier()
every = [None] * world.size
dist.all_gather_object(every, calls)
if world.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(every))
dist.destroy_process_group()
