"""The pretended accelerators refuse, count and forget what real ones would: controls for all tests that use them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.devices.pretend import DeviceError, Machine


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "mps"])
def test_a_tensor_is_where_it_was_made_and_keeps_its_numbers(device):
    with Machine():
        here = torch.arange(6.0).view(2, 3)
        there = here.to(device)
        assert there.device.type == torch.device(device).type
        assert (there @ there.mT).device == there.device
        assert torch.zeros(2, device=there.device).device == there.device
        assert torch.zeros_like(there).device == there.device
        assert torch.tensor([1.0], device=device).device == there.device
        assert torch.equal((2 * there).cpu(), 2 * here)


@pytest.mark.parametrize(
    "mixing",
    [
        lambda one, two: one + two,
        lambda one, two: one @ two,
        lambda one, two: torch.cat([one, two]),
        lambda one, two: torch.where(one > 0, one, two),
        lambda one, two: one.index_select(0, torch.tensor([0], device=two.device)),
        lambda one, two: torch._foreach_add_([one], [two]),
        lambda one, two: one.baddbmm(one, two) if one.ndim == 3 else one.add_(two),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "cuda:1", "mps"])
def test_devices_do_not_mix(mixing, other):
    with Machine(), pytest.raises(DeviceError):
        mixing(torch.ones(2, 2, device="cuda:0"), torch.ones(2, 2).to(other))


def test_what_torch_allows_between_devices_is_allowed():
    with Machine() as machine:
        there = torch.ones(3, device="cuda:0")
        machine.reset()
        assert (there * torch.tensor(2.0)).sum().item() == 6
        assert machine.counts == (2, 1)
        there[torch.tensor([0])] = torch.tensor(5.0)
        assert there.cpu().tolist() == [5, 1, 1]
        assert sum(count for (what, _), count in machine.waits.items() if what == "indices from the host") == 1


def test_the_host_waits_for_numbers_and_for_shapes_that_depend_on_them():
    with Machine() as machine:
        there = torch.ones(3, device="cuda:0")
        for look in (float, bool, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.nonzero):
            machine.reset()
            look(there[:1])
            assert machine.counts[1] == 1, look
        machine.reset()
        assert there[there > 0].shape == (3,)
        assert machine.counts[1] == 1
        machine.reset()
        there.mul_(2).add_(1).clamp_min(0).view(3, 1).expand(3, 3)
        assert machine.counts == (3, 0)


def test_lists_of_tensors_are_one_launch_unless_they_are_of_several_kinds():
    with Machine() as machine:
        alike = [torch.ones(3, device="cuda:0") for _ in range(64)]
        machine.reset()
        torch._foreach_mul_(alike, 2.0)
        assert machine.counts == (1, 0)
        mixed = [torch.ones(3, device=f"cuda:{place % 2}") for place in range(6)]
        machine.reset()
        torch._foreach_mul_(mixed, 2.0)
        assert machine.counts == (6, 0)
        with pytest.raises(DeviceError):
            torch._foreach_mul_(mixed, torch.tensor(2.0, device="cuda:0"))


def test_mps_has_neither_float64_nor_decompositions():
    with Machine():
        there = torch.eye(3, device="mps")
        for wide in (there.double, lambda: torch.ones(2, dtype=torch.float64, device="mps")):
            with pytest.raises(TypeError, match="float64"):
                wide()
        for function in (torch.linalg.eigh, torch.linalg.qr, torch.linalg.cholesky_ex):
            with pytest.raises(NotImplementedError):
                function(there)
        assert torch.linalg.eigh(there.to("cuda:0")).eigenvalues.device.type == "cuda"


def test_numpy_is_out_of_reach():
    with Machine(), pytest.raises(TypeError, match="numpy"):
        torch.ones(2, device="cuda:0").numpy()


def test_bytes_are_counted_while_tensors_live():
    with Machine() as machine:
        first = torch.zeros(256, device="cuda:0")
        assert machine.live == 1024
        view = first[:10]
        del first
        assert machine.live == 1024, "a view keeps the memory"
        machine.reset()
        (view + 1) + 1
        assert machine.peak - machine.live == 80
        del view
        assert machine.live == 0


def test_gradients_flow_on_a_pretended_device():
    with Machine():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to("cuda:0")
        model(torch.ones(5, 3, device="cuda:0")).square().sum().backward()
        assert all(param.grad is not None and param.grad.device.type == "cuda" for param in model.parameters())
        twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        twin.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
        twin(torch.ones(5, 3)).square().sum().backward()
        for one, two in zip(model.parameters(), twin.parameters(), strict=True):
            assert one.grad is not None
            assert two.grad is not None
            assert torch.allclose(one.grad.cpu(), two.grad)
