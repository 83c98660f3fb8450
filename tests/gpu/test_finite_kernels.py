"""Our kernels find what PyTorch's operations find, and clear all or nothing."""

from __future__ import annotations

import pytest
import torch

from farandole.sync.common.device_check import DeviceChecks

CUDA = torch.device("cuda")
SIZES = (1, 7, 8191, 8192, 8193, 40_000)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(size, dtype=dtype, device=CUDA) for size in SIZES]


def kernels() -> object:
    pytest.importorskip("triton")
    from farandole.sync.common import finite_kernels

    found = finite_kernels.serving(CUDA)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ill", [torch.nan, torch.inf, -torch.inf])
def test_one_number_anywhere(dtype: torch.dtype, ill: float) -> None:
    found = kernels()
    for place, size in enumerate(SIZES):
        for at in {0, size // 2, size - 1}:
            given = gradients(dtype)
            given[place][at] = ill
            answer = found.find_and_clear(given)  # type: ignore[attr-defined]
            torch.cuda.synchronize()
            assert answer.tolist() == [int(n == place) for n in range(len(SIZES))] + [1]
            assert not any(bool(each.any()) for each in given)
    given = [each * torch.finfo(dtype).max for each in gradients(dtype)]
    answer = found.find_and_clear(given)  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    assert not answer.any()
    assert all(bool((each == torch.finfo(dtype).max).all()) for each in given)


def test_layouts_of_memory() -> None:
    found = kernels()
    weight = torch.ones(8, 4, 3, 3, device=CUDA).to(memory_format=torch.channels_last)
    behind = torch.full((100,), torch.nan, device=CUDA)  # memory that is nobody's gradient
    weight[3, 2, 1, 0] = torch.nan
    answer = found.find_and_clear([weight, behind[:0]])  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    assert answer.tolist() == [1, 0, 1]
    assert not weight.any()
    assert behind.isnan().all()
    gaps = torch.ones(4, 4, device=CUDA)[:, 1:3]
    assert found.find_and_clear([gaps]) is None  # type: ignore[attr-defined]
    several = [torch.ones(2, device=CUDA), torch.ones(2, device=CUDA, dtype=torch.float64)]
    assert found.find_and_clear(several) is None  # type: ignore[attr-defined]


def test_many_blocks_and_several_bad_gradients() -> None:
    """The last block to end clears for all the others."""
    found = kernels()
    for step in range(20):
        given = [torch.ones(30 * 8192 + at, device=CUDA) for at in range(40)]
        ill = {step, 39 - step} if step % 2 else set()
        for place in ill:
            given[place][-1 - step] = torch.nan
        answer = found.find_and_clear(given)  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        assert answer.tolist() == [*(int(place in ill) for place in range(40)), int(bool(ill))]
        assert all(bool(each.any() if not ill else not each.any()) for each in given)


def test_launched_again_elsewhere() -> None:
    """Later launches skip what Triton works out: gradients anywhere, on any stream."""
    found = kernels()
    kept = []
    side = torch.cuda.Stream()
    for step in range(6):
        kept.append(gradients(torch.float32))  # memory that was not used before
        if step == 5:
            kept[-1][3][8191] = torch.nan
        torch.cuda.synchronize()
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            answer = found.find_and_clear(kept[-1])  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        assert answer.tolist() == ([0, 0, 0, 1, 0, 0, 1] if step == 5 else [0] * 7)
        assert found._launch is not None  # type: ignore[attr-defined]
    assert all(bool(each.all()) for given in kept[:5] for each in given)
    assert not any(bool(each.any()) for each in kept[5])


@pytest.mark.parametrize("mixed", [False, True], ids=["kernels", "operations"])
def test_a_check_is_read_one_step_later(mixed: bool) -> None:
    checks = DeviceChecks()
    for ill in (False, True, False):
        given = gradients(torch.float32)
        if mixed:
            given.append(torch.ones(3, device=CUDA, dtype=torch.float64))
        if ill:
            given[4][5] = torch.inf
        check = checks.start(given, lambda given=given: given, [])  # type: ignore[misc]
        assert check.first_bad() == (4 if ill else None)
        assert all(bool(each.any()) for each in given) is not ill
