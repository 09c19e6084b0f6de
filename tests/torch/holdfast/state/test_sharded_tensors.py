"""Objects that spread state over the ranks are refused by name, and all others are accepted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

from holdfast.errors import BadInput
from holdfast.state import capture, torch_hooks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the package of this class contains deprecated scripts
    from torch.distributed.optim import ZeroRedundancyOptimizer


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refusal(**objects: Any) -> str:
    with pytest.raises(BadInput) as caught:
        torch_hooks.classify(objects)
    return str(caught.value)


def test_a_zero_redundancy_optimizer_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    said = refusal(model=model, optimizer=optimizer)
    assert said.startswith(
        "protect(optimizer=...): a ZeroRedundancyOptimizer spreads its state over the ranks"
    )
    assert "use DistributedDataParallel and a plain optimizer" in said


def test_an_optimizer_in_a_wrapper_is_found() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    inner = ZeroRedundancyOptimizer(nn.Linear(3, 3).parameters(), torch.optim.SGD, lr=0.1)
    assert "ZeroRedundancyOptimizer" in refusal(optimizer=Wrapper(inner))


def test_fsdp_of_both_kinds_is_refused_anywhere_in_the_model() -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = ShardingStrategy.NO_SHARD  # the only strategy for a group of one
    inner = FullyShardedDataParallel(nn.Linear(3, 3), sharding_strategy=whole, device_id=torch.device("cpu"))
    assert "a FullyShardedDataParallel spreads" in refusal(model=nn.Sequential(inner))
    model = nn.Sequential(nn.Linear(3, 3))
    fully_shard(model[0], mesh=mesh)
    assert "a FSDPLinear spreads" in refusal(model=model)
    optimizer = torch.optim.AdamW(model.parameters())
    assert refusal(optimizer=optimizer).startswith(
        "optimizer.param.0 is a DTensor, which is split among the ranks"
    )


def test_a_distributed_tensor_is_refused_in_parameters_and_in_any_state() -> None:
    mesh = init_device_mesh("cpu", (1,))
    spread = distribute_tensor(torch.ones(3), mesh)
    assert isinstance(spread, DTensor)
    model = nn.Linear(3, 3)
    model.bias = nn.Parameter(spread)
    assert refusal(model=model).startswith("model.bias is a DTensor")
    plain = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(plain.parameters(), momentum=0.9)
    optimizer.state[plain.bias]["momentum_buffer"] = spread
    torch_hooks.classify({"optimizer": optimizer})
    with pytest.raises(BadInput, match=r"^optimizer\.state\.1\.momentum_buffer is a DTensor"):
        capture.collect({"model": plain, "optimizer": optimizer})


def test_tensors_without_plain_memory_are_refused() -> None:
    assert "is on the device meta" in refusal(model=nn.Linear(3, 3, device="meta"))
    assert "has no shape yet" in refusal(model=nn.LazyLinear(3))
    sparse = nn.Linear(3, 3)
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    assert "is a sparse tensor" in refusal(model=sparse)


def test_an_engine_of_deepspeed_is_refused() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    assert "a DeepSpeedEngine spreads" in refusal(model=engine())


def test_objects_that_are_not_sharded_are_accepted() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    objects = {
        "model": model,
        "average": swa_utils.AveragedModel(model.module),
        "compiled": torch.compile(nn.Linear(3, 3), backend="eager"),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "scaler": torch.amp.GradScaler("cpu"),
    }
    modules, private, replicated = torch_hooks.classify(objects)
    assert (sorted(modules), private) == (["average", "compiled", "model"], {})
    assert replicated.keys() == objects.keys()
