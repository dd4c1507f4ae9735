"""Tests of the simulated accelerator: it computes what the CPU computes, and exposes errors that real devices hide."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from support import clean_environment, pretend_environment
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpitrain.models.gpt import GPT
from mpitrain.models.resnet import ResNet

pytestmark = pytest.mark.parametrize("device", ["pretend"], indirect=True)
accelerator = torch.accelerator


def stream_of(device):
    return accelerator.current_stream(device)


# -- what is forgotten shows


def test_a_copy_to_the_host_arrives_when_the_host_has_waited(device):
    x = torch.arange(6.0, device=device)
    host = torch.zeros(6, pin_memory=True)
    host.copy_(x, non_blocking=True)
    before = host.tolist()
    x.add_(1)  # for which the device has to get there, but the host has not waited
    before += host.tolist()
    event = torch.Event(device=device.type)
    event.record()
    assert not event.query()
    event.synchronize()
    assert before == [0] * 12 and host.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_pinned_source_is_read_when_the_stream_reaches_the_copy(device):
    host = torch.ones(6).pin_memory()
    x = torch.empty(6, device=device)
    x.copy_(host, non_blocking=True)
    host.fill_(7)  # too early
    assert x.tolist() == [7] * 6


def test_a_stream_that_does_not_wait_reads_unfinished_data(device):
    beside = torch.Stream(device=device)
    y = torch.ones(6, device=device) * 2
    with beside:
        early = (y + 0).tolist()
    beside.wait_stream(stream_of(device))
    with beside:
        assert early != [2] * 6 and (y + 0).tolist() == [2] * 6


def test_memory_is_reused_only_after_all_streams_finished_with_it(device):
    beside = torch.Stream(device=device)
    x = torch.ones(256, device=device)
    accelerator.synchronize()
    with beside:
        y = x.view(256) * 1  # queued, but not run
    address = x.data_ptr()
    x.record_stream(beside)
    del x
    stream_of(device).synchronize()
    assert torch.empty(256, device=device).data_ptr() != address  # beside may still use it
    beside.synchronize()
    accelerator.synchronize()
    bytes_there = ctypes.string_at(torch.pretend.host_alias(address), 1024)
    assert np.isnan(np.frombuffer(bytes_there, np.float32)).all() and y.tolist() == [1] * 256


def in_child(do) -> int:
    """Call `do` in a forked child; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        do()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def test_the_cpu_cannot_access_device_memory(device):
    x = torch.ones(4, device=device)
    accelerator.synchronize()
    assert in_child(lambda: ctypes.string_at(x.data_ptr(), 4)) == signal.SIGSEGV
    assert in_child(lambda: ctypes.string_at(torch.pretend.host_alias(x.data_ptr()), 4)) == 0
    source = (ctypes.c_char * 16).from_address(x.data_ptr())
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="Bad address"):
        os.write(writer, source)
    os.close(reader), os.close(writer)


def test_a_forked_child_is_refused(device):
    def use() -> None:
        with pytest.raises(RuntimeError, match="forked child"):
            torch.ones(1, device=device)
        torch.manual_seed(1)
        torch.ones(2) + 1

    assert in_child(use) == 0


# -- memory of the host and of other processes


def test_memory_of_the_host_is_pinned_when_it_is_registered(device):
    with mmap.mmap(-1, 1 << 16) as shared:
        host = torch.frombuffer(shared, dtype=torch.float32)
        assert not host.is_pinned()
        torch.pretend.host_register(host.data_ptr(), 1 << 16)
        x = torch.ones(1024, device=device)
        host[2048:3072].copy_(x, non_blocking=True)
        late = host[2048].item()
        stream_of(device).synchronize()
        assert host[16:].is_pinned() and (late, host[2048].item()) == (0, 1)
        torch.pretend.host_unregister(host.data_ptr())
        assert not host.is_pinned()
        host[:1024].copy_(x, non_blocking=True)  # as any driver: it waits
        assert host[0].item() == 1
        del host


CHILD = """
import json, sys, torch
assert torch.accelerator.current_accelerator(check_available=True).type == "pretend"
x = torch.arange(1000.0, device="pretend")
torch.accelerator.synchronize()
properties = torch.pretend.get_device_properties()
told = torch.pretend.export_memory(x.untyped_storage())
print(json.dumps([torch.accelerator.device_count(), properties.name, properties.uuid, told]), flush=True)
sys.stdin.readline()
print(x.sum().item(), x[0].item(), flush=True)
"""


def test_memory_is_shared_with_a_process_that_sees_other_devices(device):
    environment = clean_environment(**pretend_environment(visible="1"))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        *there, handle = json.loads(child.stdout.readline())
        assert there == [1, "Pretend 1", "pretend-1"]
        storage = torch.pretend.import_memory(handle)
        theirs = torch.empty(0, dtype=torch.float32, device=storage.device).set_(storage)
        assert theirs.shape == (1000,) and theirs.device.index == 1 and theirs.sum().item() == 499500
        theirs[0].sub_(1)  # queued: not there yet
        assert ctypes.c_float.from_address(torch.pretend.host_alias(theirs.data_ptr())).value == 0
        theirs.neg_()
        accelerator.synchronize(1)
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline().split() == ["-499499.0", "1.0"]
        child.stdin.close()
    with pytest.raises(RuntimeError, match="memory of process"):
        torch.pretend.import_memory([handle[0], handle[1], handle[2] + 1, 0, 8, 0])
    assert theirs[1].item() == -1  # mapped still


# -- hidden, it is as if it were not there


def test_hidden_devices_change_nothing_on_the_cpu(device):
    import pretend

    pretend.available(False)
    try:
        assert accelerator.current_accelerator(check_available=True) is None
        assert not accelerator.is_available() and accelerator.device_count() == 0
        torch.manual_seed(1)
        x = torch.rand(8, 4)
        loader = torch.utils.data.DataLoader(x, 2, pin_memory=torch.accelerator.is_available(), num_workers=1)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16):
                model(batch).float().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        with torch.random.fork_rng():
            torch.rand(1)
        assert not batch.is_pinned()
        with pytest.raises(RuntimeError, match="pin_memory=True requires"):
            torch.empty(1, pin_memory=True)
    finally:
        pretend.available(True)
    assert accelerator.is_available() and accelerator.device_count() == 2


# -- time


def test_stages_of_a_pipeline_overlap(device):
    """Copy four chunks to the device and back, 20 ms each: 8 copies in sequence, or 5 where they overlap.

    The best of three attempts counts, because a busy host starts some copies late.
    """
    torch.pretend.set_late_ms(0)
    torch.pretend.set_copy_bandwidth(1e6)
    torch.pretend.set_kernel_ms(1)
    source, target = (torch.ones(4, 5000, pin_memory=True) for _ in range(2))
    on_device = torch.empty(4, 5000, device=device)
    in_turn, beside = [stream_of(device)] * 2, [torch.Stream(device=device) for _ in range(2)]
    took = []
    for streams in (in_turn, beside, beside, beside):
        begin, end = (torch.Event(device=device.type, enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record(streams[0])
        for k in range(4):
            with streams[0]:
                on_device[k].copy_(source[k], non_blocking=True)
                on_device[k].add_(k)
            streams[1].wait_stream(streams[0])
            with streams[1]:
                target[k].copy_(on_device[k], non_blocking=True)
        end.record(streams[1])
        assert not end.query()  # the host has not waited
        end.synchronize()
        took.append(begin.elapsed_time(end))
        assert time.perf_counter() - start > took[-1] / 1000 - 0.005
        assert [target[k, 0].item() for k in range(4)] == [1, 2, 3, 4]
    assert took[0] > 163 and 103 < min(took[1:]) < 0.8 * took[0], took


# -- it computes what the CPU computes


def losses(device, model, inputs, **autocast):
    """Train a step on each batch, moved to the device; return the losses."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    values = []
    for x, y in inputs:
        with sdpa_kernel(SDPBackend.MATH), torch.autocast(device.type, enabled=bool(autocast), **autocast):
            loss = model.criterion(model(x.to(device, non_blocking=True)), y.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        values.append(loss.item())
    return torch.tensor(values)


def test_a_transformer_trains_as_on_the_cpu(device):
    torch.manual_seed(1)
    model = GPT(vocabulary=32, layers=2, width=32, heads=2)
    inputs = [(t[:, :-1], t[:, 1:]) for t in torch.randint(0, 32, (4, 4, 17)).repeat(5, 1, 1).pin_memory()]
    expected = losses(torch.device("cpu"), model, inputs)
    assert torch.allclose(losses(device, model, inputs), expected, rtol=0, atol=2e-6) and expected[-1] < expected[0]
    half = losses(device, model, inputs, dtype=torch.bfloat16)
    assert 0 < (half - expected).abs().max() < 0.05


def test_convolutions_and_batch_statistics_train_as_on_the_cpu(device):
    torch.manual_seed(1)
    model = ResNet(18, 4, 1, 5, functional.cross_entropy, small=True)
    inputs = [(x, torch.arange(4)) for x in torch.rand(20, 4, 8, 8)]
    expected = losses(torch.device("cpu"), model, inputs)
    assert torch.allclose(losses(device, model, inputs), expected, rtol=0, atol=2e-5)
    norm, same = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).to(device)
    x = torch.rand(2, 3, 4, 4)
    norm(x), same(x.to(device))
    assert torch.equal(same.running_var.cpu(), norm.running_var)


def test_each_device_has_its_own_random_numbers(device):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    state = torch.pretend.get_rng_state(device)
    first = torch.rand(4, device=device).tolist()
    assert torch.equal(torch.get_rng_state(), before)
    torch.pretend.set_rng_state(state, device)
    with torch.random.fork_rng([device], device_type=device.type):
        assert torch.rand(4, device=device).tolist() == first
    generator = torch.Generator(device).manual_seed(3)
    assert torch.rand(4, device=device, generator=generator).tolist() == first
    assert torch.rand(4, device=device).tolist() == first


def test_memory_statistics_and_dlpack_exchange(device):
    before = accelerator.memory_allocated(device)
    accelerator.reset_peak_memory_stats(device)
    x = torch.arange(1 << 18, device=device)
    assert accelerator.memory_allocated(device) - before == 1 << 21
    same = torch.from_dlpack(x)
    assert same.data_ptr() == x.data_ptr() and same.device == x.device
    other = x.to("pretend:1")
    assert other.device.index == 1 and torch.equal(other.cpu(), torch.arange(1 << 18))
    del x, same
    assert accelerator.memory_allocated(device) == before
    assert accelerator.max_memory_allocated(device) == before + (1 << 21)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, device=device)
