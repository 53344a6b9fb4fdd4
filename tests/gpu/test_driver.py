"""Programs that use pycuda or ctypes get the same results from the software driver as from NVIDIA's."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.gpu.driver import modules
from tests.gpu.driver.library import ROOT
from tests.gpu.driver.streams import GLOBAL, OF_THREAD
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.gpu.kernels import ptx_of
from tests.gpu.ptx.launch import launch

SCALE = """
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
define ptx_kernel void @scale(ptr addrspace(1) %x, ptr addrspace(1) %y, float %by, i32 %n) {
  %t = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %b = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %o = mul i32 %b, 32
  %i = add i32 %o, %t
  %in = icmp ult i32 %i, %n
  br i1 %in, label %do, label %end
do:
  %l = zext i32 %i to i64
  %p = getelementptr float, ptr addrspace(1) %x, i64 %l
  %q = getelementptr float, ptr addrspace(1) %y, i64 %l
  %v = load float, ptr addrspace(1) %p
  %w = fmul float %v, %by
  store float %w, ptr addrspace(1) %q
  br label %end
end:
  ret void
}
"""


@pytest.fixture
def driver(software_gpu: SoftwareGpu) -> Iterator[Any]:
    """Yield pycuda's driver module. Card 0's primary context is current."""
    import pycuda.driver as driver

    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    yield driver
    context.pop()


def kernel(driver: Any) -> Any:
    module = driver.module_from_buffer(ptx_of(SCALE).encode() + b"\0")
    found = module.get_function("scale")
    found.module = module
    return found.prepare("PPfi")


@needs_pycuda
def test_pycuda_runs_a_kernel(driver: Any) -> None:
    x = np.arange(100, dtype=np.float32)
    source, target = driver.mem_alloc(x.nbytes), driver.mem_alloc(x.nbytes)
    driver.memcpy_htod(source, x)
    kernel(driver).prepared_call((4, 1), (32, 1, 1), source, target, 3.0, 100)
    y = np.empty_like(x)
    driver.memcpy_dtoh(y, target)
    assert (y == 3 * x).all()


@needs_pycuda
def test_a_stream_works_when_it_is_awaited(driver: Any) -> None:
    """The work in a stream runs only when the host waits for it. If the host changes pinned memory too early, a copy therefore reads the
    changed memory."""
    stream, event = driver.Stream(), driver.Event()
    x = driver.pagelocked_empty(64, np.float32)
    y = driver.pagelocked_empty(64, np.float32)
    x[:], y[:] = 1, 0
    source, target = driver.mem_alloc(x.nbytes), driver.mem_alloc(x.nbytes)
    driver.memcpy_htod_async(source, x, stream)
    kernel(driver).prepared_async_call((2, 1), (32, 1, 1), stream, source, target, 2.0, 64)
    driver.memcpy_dtoh_async(y, target, stream)
    event.record(stream)
    assert not event.query(), "a query runs one piece of work, not all"
    assert (y == 0).all()
    event.synchronize()
    assert (y == 2).all()


@needs_pycuda
def test_garbage_that_is_collected_during_a_kernel_changes_no_order(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is not collected during a driver call. A finalizer that frees memory would wait for all work, and the work that the
    interrupted call has begun would count as done."""
    x = np.arange(64, dtype=np.float32)
    stream, source, target = driver.Stream(), driver.mem_alloc(x.nbytes), driver.mem_alloc(x.nbytes)
    driver.memcpy_htod(source, x)
    scale, thresholds = kernel(driver), gc.get_threshold()

    def launch_amid_garbage(*args: Any, **kwargs: Any) -> None:
        gc.set_threshold(1)
        assert len([[] for _ in range(100)]) == 100  # so many allocations would start a garbage collection
        gc.set_threshold(0)
        launch(*args, **kwargs)

    monkeypatch.setattr(modules, "launch", launch_amid_garbage)
    gc.set_threshold(0)
    try:
        cycle: list[Any] = [driver.mem_alloc(64)]
        cycle.append(cycle)
        del cycle
        scale.prepared_async_call((2, 1), (32, 1, 1), stream, source, target, 3.0, 64)
        y = np.zeros_like(x)
        driver.memcpy_dtoh_async(y, target, stream)
        stream.synchronize()
    finally:
        gc.set_threshold(*thresholds)
    assert (y == 3 * x).all()


@needs_pycuda
def test_a_host_function_may_not_call_the_driver(driver: Any) -> None:
    library, stream, found = ctypes.CDLL("libcuda.so.1"), driver.Stream(), list[int]()
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(library.cuCtxSynchronize()))
    assert library.cuLaunchHostFunc(ctypes.c_void_p(stream.handle), callback, None) == 0
    stream.synchronize()
    assert found == [800]


@needs_pycuda
def test_a_captured_graph_is_launched_again_and_again(driver: Any) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    stream = driver.Stream()
    x = np.ones(64, np.float32)
    source, target = driver.mem_alloc(x.nbytes), driver.mem_alloc(x.nbytes)
    scale = kernel(driver)
    driver.memcpy_htod(target, np.zeros_like(x))
    queue, graph, executable = ctypes.c_void_p(stream.handle), ctypes.c_void_p(), ctypes.c_void_p()
    assert library.cuStreamBeginCapture_v2(queue, 0) == 0
    scale.prepared_async_call((2, 1), (32, 1, 1), stream, source, target, 2.0, 64)
    scale.prepared_async_call((2, 1), (32, 1, 1), stream, target, target, 2.0, 64)
    assert library.cuStreamEndCapture(queue, ctypes.byref(graph)) == 0
    count = ctypes.c_size_t()
    assert library.cuGraphGetNodes(graph, None, ctypes.byref(count)) == 0
    assert count.value == 2
    assert library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0)) == 0
    y = np.empty_like(x)
    driver.memcpy_dtoh(y, target)
    assert (y == 0).all(), "a capture must not run any work"
    for value in (1, 5):
        driver.memcpy_htod(source, value * x)
        assert library.cuGraphLaunch(executable, queue) == 0
        stream.synchronize()
        driver.memcpy_dtoh(y, target)
        assert (y == 4 * value).all()


@needs_pycuda
def test_a_capture_forbids_what_waits(driver: Any) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    stream = driver.Stream()
    queue, graph = ctypes.c_void_p(stream.handle), ctypes.c_void_p()
    assert library.cuStreamBeginCapture_v2(queue, 0) == 0
    assert library.cuStreamSynchronize(queue) == 900
    assert library.cuStreamEndCapture(queue, ctypes.byref(graph)) == 901
    assert library.cuStreamSynchronize(queue) == 0


# Calls that may wait for the card, by the driver's functions alone: pycuda does not raise the error of a free.
WAITING = {
    "an allocation": lambda library, block: library.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(64)),
    "pinned memory": lambda library, block: library.cuMemHostAlloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(64), 0),
    "a free": lambda library, block: library.cuMemFree_v2(ctypes.c_uint64(block)),
    "a module": lambda library, block: library.cuModuleLoadDataEx(ctypes.byref(ctypes.c_void_p()), ptx_of(SCALE).encode(), 0, None, None),
    "the default stream": lambda library, block: library.cuMemsetD8_v2(ctypes.c_uint64(block), 0, ctypes.c_size_t(64)),
}


@needs_pycuda
@pytest.mark.parametrize("mode", [GLOBAL, OF_THREAD])
@pytest.mark.parametrize("call", WAITING.values(), ids=list(WAITING))
def test_a_call_that_may_wait_for_the_card_ends_a_capture(call: Callable[[Any, int], int], mode: int, driver: Any) -> None:
    library, block, stream = ctypes.CDLL("libcuda.so.1"), driver.mem_alloc(64), driver.Stream()
    queue, graph = ctypes.c_void_p(stream.handle), ctypes.c_void_p()
    assert library.cuStreamBeginCapture_v2(queue, mode) == 0
    assert call(library, int(block)) in (900, 906)
    assert library.cuStreamEndCapture(queue, ctypes.byref(graph)) == 901


@needs_pycuda
def test_another_thread_may_allocate_during_a_capture_of_one_thread(driver: Any) -> None:
    """A capture in global mode forbids calls that may wait to all threads."""
    library, stream, found = ctypes.CDLL("libcuda.so.1"), driver.Stream(), list[int]()
    context, queue, graph = ctypes.c_void_p(), ctypes.c_void_p(stream.handle), ctypes.c_void_p()
    assert library.cuCtxGetCurrent(ctypes.byref(context)) == 0

    def allocate() -> None:
        assert library.cuCtxPushCurrent_v2(context) == 0
        found.append(WAITING["an allocation"](library, 0))

    for mode, expected in ((OF_THREAD, 0), (GLOBAL, 900)):
        assert library.cuStreamBeginCapture_v2(queue, mode) == 0
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        assert found.pop() == expected
        assert library.cuStreamEndCapture(queue, ctypes.byref(graph)) == (901 if expected else 0)


@needs_pycuda
def test_memory_is_counted_and_runs_out(driver: Any) -> None:
    gc.collect()  # frees what earlier tests left on the card
    free, total = driver.mem_get_info()
    block = driver.mem_alloc(total // 2)
    assert driver.mem_get_info()[0] == free - total // 2
    with pytest.raises(driver.MemoryError):
        driver.mem_alloc(total)
    block.free()
    assert driver.mem_get_info()[0] == free


@needs_pycuda
def test_a_wrong_launch_and_a_wrong_module_are_refused(driver: Any) -> None:
    source = driver.mem_alloc(64)
    with pytest.raises(driver.LogicError):
        kernel(driver).prepared_call((1, 1), (2048, 1, 1), source, source, 1.0, 1)
    with pytest.raises(driver.Error):
        driver.module_from_buffer(ptx_of(SCALE).replace("mul.rn.f32", "mul.unheard.of.f33").encode() + b"\0")
    with pytest.raises(driver.Error):
        driver.module_from_buffer(ptx_of(SCALE).replace(".target sm_80", ".target sm_120").encode() + b"\0")


def child(gpu: SoftwareGpu, text: str, **settings: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **gpu.environment(**settings)}
    return subprocess.run([sys.executable, "-c", textwrap.dedent(text)], env=environment, capture_output=True, text=True, timeout=120)


@needs_pycuda
def test_a_child_process_has_the_card_that_its_environment_describes(software_gpu: SoftwareGpu) -> None:
    result = child(
        software_gpu,
        """
        import pycuda.driver as driver
        driver.init()
        print(driver.Device.count(), driver.Device(1).compute_capability(), driver.Device(1).total_memory(), driver.get_driver_version())
        """,
        arch="8.0", cards=2, memory=1 << 28, driver=12080,
    )  # fmt: skip
    assert result.stdout.split("\n")[0] == f"2 (8, 0) {1 << 28} 12080", result.stderr


@needs_pycuda
def test_a_wild_pointer_ends_the_context_and_is_named(software_gpu: SoftwareGpu) -> None:
    result = child(
        software_gpu,
        f"""
        import os, sys
        import pycuda.driver as driver
        driver.init()
        context = driver.Device(0).retain_primary_context()
        context.push()
        scale = driver.module_from_buffer({ptx_of(SCALE)!r}.encode()).get_function("scale").prepare("PPfi")
        block = driver.mem_alloc(256)
        scale.prepared_call((1, 1), (32, 1, 1), int(block) + 1024, block, 1.0, 8)
        for attempt in range(2):
            try:
                context.synchronize()
            except driver.Error as error:
                print(error)
        sys.stdout.flush(); os._exit(0)
        """,
    )
    assert result.stdout.count("an illegal memory access was encountered") == 2, "the context is lost"
    assert "software GPU: launch 1: scale: ld.global.b32" in result.stderr
    assert "are not all within one allocation (block (0, 0, 0), thread (0, 0, 0))" in result.stderr


@needs_pycuda
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_streams_that_wait_for_events_are_right_in_every_order(software_gpu: SoftwareGpu, seed: int) -> None:
    result = child(
        software_gpu,
        f"""
        import numpy as np
        import pycuda.driver as driver
        driver.init()
        context = driver.Device(0).retain_primary_context()
        context.push()
        scale = driver.module_from_buffer({ptx_of(SCALE)!r}.encode()).get_function("scale").prepare("PPfi")
        streams = [driver.Stream() for _ in range(3)]
        block = driver.mem_alloc(256)
        x = driver.pagelocked_empty(64, np.float32)
        x[:] = 1
        event = driver.Event()
        driver.memcpy_htod_async(block, x, streams[0])
        for turn in range(9):
            event.record(streams[turn % 3])
            streams[(turn + 1) % 3].wait_for_event(event)
            scale.prepared_async_call((2, 1), (32, 1, 1), streams[(turn + 1) % 3], block, block, 2.0, 64)
        driver.memcpy_dtoh_async(x, block, streams[0])
        streams[0].synchronize()
        print(set(x.tolist()))
        """,
        seed=seed,
    )
    assert result.stdout == "{512.0}\n", result.stderr


def test_the_library_needs_no_pycuda(software_gpu: SoftwareGpu) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    assert library.cuInit(0) == 0
    assert library.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == 1
    text = ctypes.c_char_p()
    assert library.cuGetErrorName(700, ctypes.byref(text)) == 0
    assert text.value == b"CUDA_ERROR_ILLEGAL_ADDRESS"


# --- several cards -------------------------------------------------------------------------------------------------------


@pytest.fixture
def second(driver: Any, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the primary context of card 1, which is not current. Primary contexts may be those of earlier tests, which could access each
    other's memory."""
    software_gpu.has_cards(2, monkeypatch)
    context = driver.Device(1).retain_primary_context()
    if software_gpu.library is not None:
        from tests.gpu.driver.card import machine

        for each in machine.contexts.values():
            monkeypatch.setattr(each, "peers", set())
    yield context


def on_card(context: Any, act: Any) -> Any:
    context.push()
    try:
        return act()
    finally:
        context.pop()


@needs_pycuda
def test_a_kernel_reads_another_card_only_with_peer_access(driver: Any, second: Any, software_gpu: SoftwareGpu) -> None:
    x = np.arange(32, dtype=np.float32)
    far = on_card(second, lambda: driver.to_device(x))
    near, scale = driver.mem_alloc(x.nbytes), kernel(driver)
    scale.prepared_call((1, 1), (32, 1, 1), far, near, 3.0, 32)
    with pytest.raises(driver.LogicError, match="illegal memory access"):
        driver.Context.synchronize()
    software_gpu.reset()
    driver.Context.enable_peer_access(second)
    with pytest.raises(driver.LogicError, match="already enabled"):
        driver.Context.enable_peer_access(second)
    scale.prepared_call((1, 1), (32, 1, 1), far, near, 3.0, 32)
    np.testing.assert_array_equal(driver.from_device_like(near, x), 3 * x)


@needs_pycuda
def test_streams_of_two_cards_wait_for_each_other_by_events(driver: Any, second: Any) -> None:
    """An event of one card, on which a stream of another card waits, orders the work of both."""
    far, event = on_card(second, driver.Stream), on_card(second, driver.Event)
    pinned = driver.pagelocked_zeros(8, np.int64)
    memory = on_card(second, lambda: driver.mem_alloc(pinned.nbytes))
    on_card(second, lambda: (driver.memset_d8_async(int(memory), 1, pinned.nbytes, far), event.record(far)))
    near = driver.Stream()
    near.wait_for_event(event)
    driver.memcpy_dtoh_async(pinned, int(memory), near)
    near.synchronize()
    assert (pinned.view(np.uint8) == 1).all()


@needs_pycuda
def test_events_and_kernels_stay_in_the_context_of_their_stream(driver: Any, second: Any) -> None:
    far, event = on_card(second, driver.Stream), driver.Event()
    with pytest.raises(driver.LogicError, match="invalid resource handle"):
        event.record(far)
    scale, memory = kernel(driver), driver.mem_alloc(128)
    with pytest.raises(driver.LogicError, match="invalid resource handle"):
        scale.prepared_async_call((1, 1), (32, 1, 1), far, memory, memory, 3.0, 32)
