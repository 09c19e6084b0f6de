import pytest
import torch

from trainer.vision.model import ResNet


def small(channels: int = 3, blocks: int = 1) -> ResNet:
    torch.manual_seed(0)
    return ResNet(channels=channels, classes=10, blocks=blocks, width=4, dropout=0.1)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 4), (3, 9)])
@pytest.mark.parametrize("blocks", [1, 2])
def test_any_small_image_produces_one_logit_per_class(channels: int, size: int, blocks: int) -> None:
    assert small(channels, blocks)(torch.zeros(2, channels, size, size)).shape == (2, 10)


def test_every_parameter_of_the_resnet_gets_a_gradient() -> None:
    model = small()
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_counting_operations_changes_nothing() -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stem = 2 * 3 * 4 * 9 * 64
    stages = 2 * (2 * 16 * 9 * 64) + 2 * (32 * 9 + 64 * 9 + 32) * 16 + 2 * (128 * 9 + 256 * 9 + 128) * 4
    head = 2 * 16 * 10
    assert model.flops_per_image(torch.randn(3, 8, 8)) == 3 * (stem + stages + head)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
