import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.group import settle
from trainer.passes import accumulate, autocast

CPU = torch.device("cpu")
DATA = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))


def gradients(passes: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    replica = DistributedDataParallel(nn.Linear(5, 3), gradient_as_bucket_view=True)
    settle(replica, DATA[:1])
    loss = accumulate(replica, passes, lambda chosen: replica(DATA[chosen]).square().mean())
    found = [parameter.grad for parameter in replica.parameters() if parameter.grad is not None]
    return loss, [gradient.clone() for gradient in found]


def test_passes_add_up_to_the_gradients_of_one_large_batch(group: None) -> None:
    order = torch.arange(24)
    loss_at_once, at_once = gradients(order.view(1, 24))
    loss_in_parts, in_parts = gradients(order.view(4, 6))
    assert len(at_once) == 2
    torch.testing.assert_close(loss_in_parts, loss_at_once)
    torch.testing.assert_close(in_parts, at_once)


@pytest.mark.parametrize(("bf16", "kind"), [(None, torch.float32), (True, torch.bfloat16)])
def test_a_cpu_computes_in_bfloat16_only_if_requested(bf16: bool | None, kind: torch.dtype) -> None:
    with autocast(CPU, bf16):
        assert nn.Linear(2, 2)(torch.zeros(1, 2)).dtype == kind
