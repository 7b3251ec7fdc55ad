# SPDX-License-Identifier: MIT
"""`fla.utils.tensor_cache`: when a result is found again, and when it must not be."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import fla.utils
from fla import settings
from fla.utils import tensor_cache


def make():
    calls = []

    @tensor_cache
    def lengths(cu_seqlens, chunk=64, *, scale=1.0, extra=None):
        calls.append(chunk)
        return cu_seqlens.diff() * scale

    return lengths, calls


def test_same_tensor_is_found_and_the_result_is_the_same_object():
    lengths, calls = make()
    cu = torch.tensor([0, 3, 8])
    first = lengths(cu, 1000)
    assert lengths(cu, int("1000")) is first  # equal, not identical: large ints are no singletons
    assert calls == [1000]
    assert lengths.cache_info()[:3] == (1, 1, 0)


def test_equal_tensor_that_is_another_object_is_not_found():
    lengths, calls = make()
    a, b = torch.tensor([0, 3]), torch.tensor([0, 3])
    assert lengths(a) is not lengths(b)
    assert len(calls) == 2


def test_tensor_edited_in_place_gives_a_fresh_result():
    lengths, _ = make()
    cu = torch.tensor([0, 3, 8])
    assert lengths(cu).tolist() == [3, 5]
    cu[1] = 4
    assert lengths(cu).tolist() == [4, 4]
    view = cu[1:]
    view += 10
    assert lengths(cu).tolist() == [14, 4]


def test_result_that_a_caller_wrote_into_is_made_anew():
    lengths, _ = make()
    cu = torch.tensor([0, 3, 8])
    lengths(cu).zero_()
    assert lengths(cu).tolist() == [3, 5]


def test_arguments_of_another_type_name_or_place_are_other_calls():
    lengths, calls = make()
    cu = torch.tensor([0, 3])
    lengths(cu, 1)
    lengths(cu, True)
    lengths(cu, chunk=1)
    lengths(cu, 1, scale=2.0)
    lengths(cu, 1, extra=(1, torch.float32))
    lengths(cu, 1, extra=(1, torch.float32))
    assert len(calls) == 5


def test_oldest_result_goes_first_and_the_size_is_a_setting():
    lengths, calls = make()
    cus = [torch.tensor([0, n]) for n in range(6)]
    for cu in cus:
        lengths(cu)
    assert lengths.cache_info().currsize == lengths.cache_info().maxsize == 4
    lengths(cus[5])
    assert len(calls) == 6
    lengths(cus[0])
    assert len(calls) == 7
    with settings.override(FLA_TENSOR_CACHE_SIZE=1):
        lengths(cus[1])
        assert lengths.cache_info().currsize == 1


def test_arguments_are_not_kept_alive_and_their_entries_go_with_them():
    lengths, _ = make()
    cu = torch.tensor([0, 3])
    alive = weakref.ref(cu)
    lengths(cu)
    del cu
    gc.collect()
    assert alive() is None
    assert lengths.cache_info().currsize == 0


def test_cache_can_be_turned_off_by_setting_environment_or_attribute(monkeypatch):
    lengths, calls = make()
    cu = torch.tensor([0, 3])
    with settings.override(FLA_DISABLE_TENSOR_CACHE=True):
        lengths(cu), lengths(cu)
        assert fla.utils.FLA_DISABLE_TENSOR_CACHE is True
    assert len(calls) == 2
    with monkeypatch.context() as patch:
        patch.setenv("FLA_DISABLE_TENSOR_CACHE", "1")
        lengths(cu), lengths(cu)
    assert len(calls) == 4
    with monkeypatch.context() as patch:
        patch.setattr(fla.utils, "FLA_DISABLE_TENSOR_CACHE", True)
        lengths(cu), lengths(cu)
    assert len(calls) == 6
    assert lengths.cache_info() == (0, 0, 6, 4, 0)
    lengths(cu), lengths(cu)
    assert len(calls) == 7


def test_what_counts_no_writes_or_needs_a_gradient_is_not_remembered():
    lengths, calls = make()
    with torch.inference_mode():
        cu = torch.tensor([0, 3])
    lengths(cu), lengths(cu)
    x = torch.tensor([0.0, 3.0], requires_grad=True)
    lengths(x).sum().backward()
    lengths(x).sum().backward()  # a remembered graph would be freed by now
    assert len(calls) == 4
    with torch.no_grad():
        lengths(x), lengths(x)
    assert len(calls) == 5


def test_result_of_inference_mode_does_not_reach_autograd():
    lengths, calls = make()
    cu = torch.tensor([0, 3])
    with torch.inference_mode():
        assert lengths(cu) is lengths(cu)
    weight = torch.ones(1, requires_grad=True)
    (lengths(cu) * weight).sum().backward()
    assert len(calls) == 2


def test_argument_of_an_unknown_kind_is_passed_through():
    lengths, calls = make()
    cu = torch.tensor([0, 3])
    lengths(cu, extra=object()), lengths(cu, extra={}), lengths(cu, extra={})
    assert len(calls) == 3
    assert lengths.cache_info().bypassed == 3


def test_many_threads_get_right_results():
    lengths, _ = make()
    cus = [torch.tensor([0, n]) for n in range(8)]
    wrong: list[int] = []

    def work():
        for _ in range(200):
            for n, cu in enumerate(cus):
                if lengths(cu).item() != n:
                    wrong.append(n)
                lengths(torch.tensor([0, n]))  # dies at once: finalisers run amid the others' calls

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert lengths.cache_info().currsize <= 4


def test_cache_clear_forgets_and_the_function_keeps_its_name():
    lengths, calls = make()
    cu = torch.tensor([0, 3])
    lengths(cu)
    lengths.cache_clear()
    assert lengths.cache_info() == (0, 0, 0, 4, 0)
    lengths(cu)
    assert len(calls) == 2
    assert lengths.__name__ == "lengths"


def test_compiled_region_traces_the_function():
    lengths, _ = make()
    compiled = torch.compile(lambda cu: lengths(cu), fullgraph=True, backend="eager")
    cu = torch.tensor([0, 3])
    assert compiled(cu).tolist() == [3]
    cu[1] = 7
    assert compiled(cu).tolist() == [7]


@pytest.mark.gpu
def test_streams_do_not_share_results_and_capture_keeps_what_it_found():
    lengths, calls = make()
    cu = torch.tensor([0, 3], device="cuda")
    first = lengths(cu)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert lengths(cu) is not first
    assert len(calls) == 2
