"""Several processes that train one drafter: started by torchrun, one a GPU (or any number of them on processors).

Rank 0 decides and writes; the others follow. What they share is the flat gradient, summed once a step, and at the start
the weights. Everything else each knows by itself, from the same files and the same seed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(hours=2)  # a hang is for the heartbeat to find, with stacks; not for a collective's own timeout


@dataclass(frozen=True)
class World:
    rank: int
    size: int

    @property
    def leads(self) -> bool:
        return self.rank == 0


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process, where the setting says no more than cuda."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def join(device: torch.device) -> World:
    """Meet the other processes, if there are any."""
    if world_size() > 1 and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    return World(rank(), world_size())


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(world: World) -> None:
    """Go on when all are here."""
    if world.size > 1:
        dist.barrier()


def same_everywhere(world: World, tensor: Tensor) -> None:
    """Rank 0's tensor, in place, on every process."""
    if world.size > 1:
        dist.broadcast(tensor, 0)


def agreed(world: World, number: int, device: torch.device) -> int:
    """Rank 0's number."""
    told = torch.tensor([number], device=device)
    same_everywhere(world, told)
    return int(told)
