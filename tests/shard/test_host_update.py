"""Updates on the host: gradients leave the device once ready, and parameters return when no kernel reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpitrain.comm.memory.device import empty_pinned
from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.shard.offload import HostUpdate


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_both_directions_follow_earlier_device_work(device, dtype):
    stored = torch.zeros(8, dtype=dtype, device=device)
    gradient = torch.zeros(8, dtype=dtype, device=device)
    value = nn.Parameter(empty_pinned((8,), torch.float32, device).zero_())
    flat_parameter = FlatParameter(value, stored, lambda: gradient, ((stored, 0, 8, 0),), 0, True, bucket=0)
    last = [True]
    host = HostUpdate([flat_parameter], device, lambda: last[0])
    for step in range(1, 4):
        gradient.fill_(-1.0)
        if step == 2:  # what was on its way for an update that was left out is not taken for this one's
            host.begin()
        else:
            host.copy_bucket(0)
        gradient.copy_(torch.full((8,), float(step), dtype=dtype, device=device))
        if step != 2:  # a further pass has changed it
            last[0] = step == 3
            host.copy_bucket(0)
            last[0] = True
        host.begin()
        read = stored.clone()  # as a forward pass would, which the device may be late with
        host_gradient = host.gradient(flat_parameter)
        assert host_gradient is not None and host_gradient.dtype == torch.float32
        assert host_gradient.tolist() == [float(step)] * 8
        host.before_update()
        with torch.no_grad():
            value += host_gradient
        host.store(flat_parameter)
        host.end()
        if step == 2:
            assert stored.clone().tolist() == [float(sum(range(step + 1)))] * 8
        host.before_update()  # returns when the parameters have left
        saved = value.detach().clone()
        value.detach().fill_(torch.nan)
        assert read.tolist() == [float(sum(range(step)))] * 8
        assert stored.tolist() == [float(sum(range(step + 1)))] * 8
        value.detach().copy_(saved)
