"""The driver's calls: which are made, in which order, and what becomes of their errors."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest
import torch

from execution.pages.fake_driver import PAGE, FakeDriver
from octavo.execution.pages import cuda
from octavo.execution.pages.cuda import CudaPages, cuda_page_bytes
from octavo.execution.pages.interface import GPU_PAGE_BYTES, AddressRange, PageError

VA = (
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
)


def make(**options: Any) -> tuple[FakeDriver, CudaPages]:
    driver = FakeDriver(**options)
    return driver, CudaPages(PAGE, driver=driver)


def map_all(pages: CudaPages, addresses: AddressRange, first: int, handles: list[int]) -> None:
    pages.map(addresses, first, handles)
    pages.set_access(addresses, first, len(handles))


def test_the_life_of_a_block_in_driver_calls() -> None:
    driver, pages = make()
    addresses = pages.reserve(4)
    handles = pages.create(2)
    map_all(pages, addresses, 1, handles)
    pages.unmap(addresses, 1, 2)
    pages.release(handles)
    pages.free(addresses)
    assert driver.names(*VA) == [
        "cuMemAddressReserve",
        *["cuMemCreate"] * 2,
        *["cuMemMap"] * 2,
        "cuMemSetAccess",  # once for all of them
        *["cuMemUnmap"] * 2,
        *["cuMemRelease"] * 2,
        "cuMemAddressFree",
    ]
    sizes = dict(driver.calls)
    assert sizes["cuMemAddressReserve"] == (4 * PAGE, 0, 0, 0)
    assert sizes["cuMemSetAccess"][:2] == (addresses.address + PAGE, 2 * PAGE)
    assert sizes["cuMemAddressFree"] == (addresses.address, 4 * PAGE)
    assert driver.used_bytes == 0


def test_memory_belongs_to_the_chosen_gpu() -> None:
    driver = FakeDriver()
    pages = CudaPages(PAGE, device=1, driver=driver)
    addresses = pages.reserve(1)
    map_all(pages, addresses, 0, pages.create(1))
    calls = dict(driver.calls)
    assert calls["cuMemCreate"][1].location.id == 1
    assert calls["cuMemSetAccess"][2][0].location.id == 1
    assert calls["cuCtxPushCurrent"] == ("context of device 1",)


def test_fresh_memory_is_zeroed_once_on_a_stream_of_its_own() -> None:
    driver, pages = make()
    addresses, other = pages.reserve(6), pages.reserve(1)
    map_all(pages, addresses, 0, pages.create(3))
    driver.write(addresses.address, 7)
    pages.map(addresses, 4, [pages.create(1)[0]])
    pages.map(addresses, 3, [0])
    pages.set_access(addresses, 0, 5)
    map_all(pages, other, 0, [0])
    memsets = [arguments for name, arguments in driver.calls if name == "cuMemsetD8Async"]
    assert memsets == [
        (addresses.address, 0, 3 * PAGE, "stream"),
        (addresses.address_of(4), 0, PAGE, "stream"),
    ]
    assert len(driver.names("cuStreamSynchronize")) == 2
    assert driver.read(other.address) == 7
    assert not driver.contexts


def test_zeroing_that_fails_is_tried_again() -> None:
    driver, pages = make(fail_at={"cuMemsetD8Async": 0})
    addresses = pages.reserve(1)
    pages.map(addresses, 0, pages.create(1))
    with pytest.raises(PageError, match=r"cuMemsetD8Async.* failed: CUDA_ERROR_OUT_OF_MEMORY"):
        pages.set_access(addresses, 0, 1)
    assert not addresses.accessible
    assert not driver.contexts
    pages.set_access(addresses, 0, 1)
    assert driver.read(addresses.address) == 0


def test_running_out_of_memory_says_what_is_free_and_keeps_nothing() -> None:
    driver, pages = make(total_bytes=10 * PAGE)
    pages.create(7)
    with pytest.raises(PageError) as caught:
        pages.create(5)
    assert str(caught.value) == (
        "cuMemCreate(0x200000, 0x0) failed: CUDA_ERROR_OUT_OF_MEMORY; 2,097,152 bytes were asked "
        "for, 0 of 20,971,520 bytes of GPU 0 are free"
    )
    assert caught.value.__notes__ == ["block 4 of 5; the others were released"]
    assert driver.used_bytes == 7 * PAGE
    assert pages.num_handles == 7
    assert pages.create(3) == [7, 8, 9]


@pytest.mark.parametrize("failing_call", [0, 1, 2])
def test_a_mapping_that_fails_half_way_is_undone(failing_call: int) -> None:
    driver, pages = make(fail_at={"cuMemMap": 1 + failing_call})
    addresses = pages.reserve(4)
    map_all(pages, addresses, 0, pages.create(4)[:1])
    with pytest.raises(PageError, match=r"cuMemMap\(0x.*\) failed: .* 2,097,152 bytes were asked"):
        pages.map(addresses, 1, [3, 1, 2])
    assert list(driver.mapped) == [addresses.address]
    assert (addresses.handles, pages.num_mappings) == ({0: 0}, 1)
    pages.release([1, 2, 3])
    assert driver.used_bytes == PAGE


def test_unmapping_that_fails_keeps_count_of_what_is_mapped() -> None:
    driver, pages = make(fail_at={"cuMemUnmap": 1})
    addresses = pages.reserve(3)
    map_all(pages, addresses, 0, pages.create(3))
    with pytest.raises(PageError, match="cuMemUnmap"):
        pages.unmap(addresses, 0, 3)
    assert addresses.handles == {1: 1, 2: 2}
    assert len(driver.mapped) == pages.num_mappings == 2
    assert pages.unmap(addresses, 1, 2) == [1, 2]


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("cuMemAddressReserve", lambda pages, _: pages.reserve(2)),
        ("cuMemSetAccess", lambda pages, addresses: pages.set_access(addresses, 0, 1)),
        ("cuMemRelease", lambda pages, _: pages.release([1])),
        ("cuMemAddressFree", lambda pages, addresses: pages.free(pages.reserve(1))),
    ],
)
def test_every_call_that_fails_is_named(name: str, act: Any) -> None:
    driver, pages = make()
    addresses = pages.reserve(2)
    pages.create(2)
    pages.map(addresses, 0, [0])
    driver.fail_at[name] = driver.counts[name]
    with pytest.raises(PageError, match=rf"{name}\(.*\) failed: CUDA_ERROR_OUT_OF_MEMORY; .* free"):
        act(pages, addresses)
    assert pages.num_handles == 2
    assert addresses.handles == {0: 0}
    assert not addresses.accessible


def test_closing_gives_everything_back() -> None:
    driver, pages = make()
    addresses = pages.reserve(4)
    map_all(pages, addresses, 1, pages.create(3))
    pages.close()
    pages.close()
    assert (driver.used_bytes, driver.streams, driver.retained) == (0, 0, 0)
    assert not driver.ranges
    assert not driver.contexts


def test_a_device_that_cannot_is_refused() -> None:
    with pytest.raises(PageError, match="GPU 0 has no virtual memory management"):
        make(supported=0)
    with pytest.raises(PageError, match=r"cuDeviceGet\(0x7\) failed: CUDA_ERROR_INVALID_DEVICE"):
        CudaPages(PAGE, device=7, driver=FakeDriver())
    driver = FakeDriver(fail_at={"cuStreamCreate": 0})
    with pytest.raises(PageError, match="cuStreamCreate"):
        CudaPages(PAGE, driver=driver)
    assert (driver.retained, driver.contexts) == (0, [])


def test_the_driver_is_asked_for_its_page() -> None:
    assert cuda_page_bytes(driver=FakeDriver()) == GPU_PAGE_BYTES == PAGE


def test_without_the_bindings_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(cuda.importlib, "import_module", missing)
    with pytest.raises(PageError, match=r"No module named 'cuda\..*pip install cuda-bindings"):
        CudaPages(PAGE)


def test_without_a_driver_the_message_says_so() -> None:
    class NoDriver(FakeDriver):
        def cuInit(self, flags: int) -> tuple[Any, ...]:
            raise RuntimeError("libcuda.so.1 not found")

    with pytest.raises(PageError, match="no usable NVIDIA driver: libcuda"):
        CudaPages(PAGE, driver=NoDriver())


def test_the_bindings_have_every_name_that_is_used() -> None:
    """The fake is only as good as its likeness."""
    real = pytest.importorskip("cuda.bindings.driver")
    for name in dir(FakeDriver):
        if name.startswith(("cu", "CU")):
            fake = getattr(FakeDriver, name)
            members = vars(fake) if not callable(fake) else {}
            for member, value in members.items():
                assert int(getattr(getattr(real, name), member)) == value
            assert hasattr(real, name)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_blocks_are_shared_zeroed_and_given_back() -> None:
    importlib.import_module("cuda.bindings.driver")
    use_blocks()  # kernels are loaded at their first use, and take memory
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    use_blocks()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)


def use_blocks() -> None:
    pages = CudaPages(cuda_page_bytes())
    view, slot = pages.reserve(64), pages.reserve(1 << 16)
    handles = pages.create(64)

    def mapping_thread() -> None:
        map_all(pages, view, 0, handles)
        map_all(pages, slot, 0, [5, 3, 9])

    thread = threading.Thread(target=mapping_thread)
    thread.start()
    thread.join()
    blocks = pages.tensor(view).view(64, -1)
    sequence = pages.tensor(slot)[: 3 * pages.block_bytes].view(3, -1)
    assert not blocks.any()
    sequence[1] = 7
    blocks[9] = 8
    assert blocks[3].min() == 7
    assert sequence[2].min() == 8
    assert (blocks.sum(dim=1) > 0).nonzero().flatten().tolist() == [3, 9]
    torch.cuda.synchronize()
    del blocks, sequence
    pages.unmap(slot, 0, 3)
    pages.unmap(view, 0, 64)
    pages.release(handles)
    pages.free(slot)
    pages.free(view)
    pages.close()
