# SPDX-License-Identifier: MIT
"""What `fla.utils` says of the machine, on hosts with and without accelerators."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import fla.utils
from fla.backends import devices
from fla.utils import Backend, ascend_ub_manager, facts, versions


@pytest.fixture(autouse=True)
def _forget():
    def forget():
        for module in (facts, versions, devices, ascend_ub_manager):
            for thing in vars(module).values():
                if hasattr(thing, "cache_clear"):
                    thing.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to be a host with one GPU."""

    def pretend(capability=(9, 0), *, hip=None, arch="", smem=232448):
        properties = SimpleNamespace(
            gcnArchName=arch,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=smem,
            multi_processor_count=132,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i=0: properties)
        monkeypatch.setattr(torch.version, "hip", hip)

    return pretend


def no_gpu(monkeypatch):
    def none(index=0):
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", none)


def flags() -> set[str]:
    names = [n for n in fla.utils.__all__ if n.startswith("IS_") and n not in ("IS_ARM", "IS_GATHER_SUPPORTED")]
    return {n for n in names if getattr(fla.utils, n)}


def test_import_brings_neither_torch_nor_triton():
    code = (
        "import sys, fla.utils\n"
        "dir(fla.utils)\n"
        "print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_facts_need_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import fla.utils\n"
        "for name in fla.utils.__all__: getattr(fla.utils, name)\n"
        "assert not fla.utils.IS_GATHER_SUPPORTED and fla.utils.autotune_cache_kwargs == {}"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cpu_host_computes_on_the_cpu(monkeypatch):
    no_gpu(monkeypatch)
    assert (fla.utils.device, fla.utils.device_name, fla.utils.device_platform) == ("cpu",) * 3
    assert fla.utils.device_torch_lib is torch.cpu
    assert flags() == set()
    assert fla.utils.get_device_arch() == ""
    assert fla.utils.get_multiprocessor_count() == 1
    assert not fla.utils.check_shared_mem()
    with pytest.warns(UserWarning, match="not known"):
        assert fla.utils.get_all_max_shared_mem() == [-1]
    with pytest.raises(RuntimeError, match="computes on cpu"):
        fla.utils.get_device_capability()
    with fla.utils.custom_device_ctx(3), fla.utils.custom_device_ctx(None):
        pass


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((7, 5), set()),
        ((8, 0), {"IS_TF32_SUPPORTED"}),
        ((9, 0), {"IS_TF32_SUPPORTED", "IS_NVIDIA_HOPPER", "IS_TMA_SUPPORTED"}),
        ((10, 0), {"IS_TF32_SUPPORTED", "IS_NVIDIA_BLACKWELL", "IS_NVIDIA_SM100", "IS_TMA_SUPPORTED"}),
        ((12, 0), {"IS_TF32_SUPPORTED", "IS_NVIDIA_BLACKWELL", "IS_NVIDIA_SM120", "IS_TMA_SUPPORTED"}),
        ((12, 1), {"IS_TF32_SUPPORTED", "IS_NVIDIA_BLACKWELL", "IS_TMA_SUPPORTED"}),
    ],
)
def test_nvidia_generations(gpu, monkeypatch, capability, expected):
    gpu(capability)
    language = SimpleNamespace(make_tensor_descriptor=None)
    monkeypatch.setattr(versions, "_triton", lambda: SimpleNamespace(language=language))
    assert fla.utils.device == fla.utils.device_platform == "cuda"
    assert flags() == {"IS_NVIDIA", *expected}
    assert fla.utils.is_nvidia is True
    assert fla.utils.is_nvidia_hopper is (capability == (9, 0))
    assert fla.utils.get_device_arch() == f"{capability[0]}{capability[1]}"


def test_amd_is_a_cuda_device_to_torch(gpu, monkeypatch):
    gpu((9, 4), hip="6.0", arch="gfx942:sramecc+:xnack-", smem=65536)
    assert (fla.utils.device_platform, fla.utils.device) == ("hip", "cuda")
    assert fla.utils.map_triton_backend_to_torch_device() == "cuda"
    assert fla.utils.get_device_arch() == "gfx942"
    assert flags() == {"IS_AMD"}


def test_shared_memory_is_compared_with_a_generation(gpu):
    gpu(smem=170000)
    assert [fla.utils.check_shared_mem(a) for a in ("ada", "AMPERE", "hopper", "none")] == [True, True, False, True]
    assert fla.utils.get_all_max_shared_mem() == [170000]
    assert fla.utils.get_device_smem_optin() == 170000
    assert fla.utils.get_multiprocessor_count() == 132
    assert [Backend.get_shared_memory(n) for n in ("Hopper", "ada", "x")] == [232448, 101376, 102400]


def test_shared_memory_without_opt_in_is_the_plain_figure(gpu):
    gpu(smem=0)
    assert fla.utils.get_device_smem_optin() == 49152


def test_npu_counts_its_cores_and_has_no_launch_options(monkeypatch):
    no_gpu(monkeypatch)
    properties = SimpleNamespace(vector_core_num=48, cube_core_num=24)
    npu = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda i: properties)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert fla.utils.device == "npu"
    assert flags() == {"IS_NPU"}
    assert fla.utils.get_multiprocessor_count() == 48
    assert fla.utils.get_multiprocessor_count(0, use_aicore=True) == 24
    with pytest.raises(NotImplementedError, match="Ascend"):
        fla.utils.ascend_compile_kwargs()


def test_ascend_options_are_empty_elsewhere(monkeypatch):
    no_gpu(monkeypatch)
    assert fla.utils.ascend_compile_kwargs(blacklist_auto_blockify=True, workspace_multibuffer=2) == {}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'IS_TOASTER'"):
        _ = fla.utils.IS_TOASTER


# Modules and tools


def test_missing_module_is_none_and_a_broken_one_raises(tmp_path, monkeypatch):
    assert fla.utils.find_spec_cached("torch") is not None
    assert fla.utils.find_spec_cached("no_such_thing") is None
    assert fla.utils.find_spec_cached("no_such_thing.part") is None
    (tmp_path / "brokenpkg").mkdir()
    (tmp_path / "brokenpkg" / "__init__.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        fla.utils.find_spec_cached("brokenpkg.part")


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No nvcc from any source; returns a folder with one."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices.shutil, "which", lambda _: None)
    monkeypatch.setattr(metadata, "files", lambda _: [])
    monkeypatch.setattr(devices, "SYSTEM_CUDA", tmp_path / "none")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    return tmp_path


@pytest.mark.parametrize("source", ["CUDA_HOME", "CUDA_PATH", "PATH", "wheel", "the system's folder"])
def test_each_source_of_nvcc_suffices(bare, monkeypatch, source):
    if source.startswith("CUDA"):
        monkeypatch.setenv(source, str(bare))
    elif source == "PATH":
        monkeypatch.setattr(devices.shutil, "which", lambda _: "/opt/nvcc")
    elif source == "wheel":
        monkeypatch.setattr(metadata, "files", lambda _: ["nvidia/cu13/bin/nvcc"])
    else:
        monkeypatch.setattr(devices, "SYSTEM_CUDA", bare)
    assert fla.utils.has_usable_nvcc()


def test_wheel_with_ptxas_alone_is_no_nvcc_and_the_log_says_so_once(bare, monkeypatch, caplog):
    monkeypatch.setattr(metadata, "files", lambda _: ["nvidia/cuda_nvcc/bin/ptxas"])
    with caplog.at_level(logging.WARNING, "fla.utils"):
        assert not fla.utils.has_usable_nvcc()
        assert not fla.utils.has_usable_nvcc()
    assert len(caplog.records) == 1


# Versions


def test_versions_are_compared_without_local_parts(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0a0+cu128")
    assert fla.utils.check_pytorch_version()
    assert fla.utils.check_pytorch_version("2.8")
    assert not fla.utils.check_pytorch_version("2.9")
    monkeypatch.setattr(versions, "installed_version", {"transformers": versions.Version("5.2")}.get)
    assert fla.utils.check_transformers_version("4.45")
    assert not fla.utils.check_transformers_version("99")
    assert not fla.utils.check_transformers_version("5.3")
    monkeypatch.setattr(versions, "_triton", lambda: SimpleNamespace(__version__="3.5.1+git1"))
    assert fla.utils.TRITON_ABOVE_3_4_0
    assert fla.utils.TRITON_ABOVE_3_5_1
    assert not fla.utils.TRITON_ABOVE_3_6_0


@pytest.mark.parametrize("new", [False, True])
def test_generation_parameter_is_looked_up(monkeypatch, new):
    mixin = pytest.importorskip("transformers.generation").GenerationMixin
    forms = (lambda self, input_ids: None, lambda self, input_ids, next_sequence_length=None: None)
    monkeypatch.setattr(mixin, "prepare_inputs_for_generation", forms[new])
    assert fla.utils.supports_transformers_next_sequence_length() is new


@pytest.mark.parametrize("present", [False, True])
def test_windows_hint_only_where_its_triton_is_missing(monkeypatch, caplog, present):
    monkeypatch.setattr(versions.sys, "platform", "win32")
    found = {"triton-windows": versions.Version("3.5") if present else None}
    monkeypatch.setattr(versions, "installed_version", found.get)
    with caplog.at_level(logging.WARNING, "fla.utils"):
        fla.utils.check_environments()
    assert ("triton-windows" in caplog.text) is not present


# Ascend tiles


def test_ub_capacity_comes_from_the_variable_else_a_warned_guess(monkeypatch):
    monkeypatch.delenv("ASCEND_UB_CAPACITY_BITS", raising=False)
    with pytest.warns(UserWarning, match="assuming 192 KiB"):
        assert ascend_ub_manager.ub_capacity_bits() == 192 * 1024 * 8
    ascend_ub_manager.ub_capacity_bits.cache_clear()
    monkeypatch.setenv("ASCEND_UB_CAPACITY_BITS", "4096")
    assert ascend_ub_manager.ub_capacity_bits() == 4096
    ascend_ub_manager.ub_capacity_bits.cache_clear()
    monkeypatch.setenv("ASCEND_UB_CAPACITY_BITS", "-1")
    with pytest.raises(ValueError, match="positive whole number"):
        ascend_ub_manager.ub_capacity_bits()


def test_tiles_fit_the_buffer_and_the_work():
    rows = ascend_ub_manager.tile_rows
    assert rows(32, 1000, capacity_bits=4096) == 128
    assert rows(32, 1000, fixed_bits=1, capacity_bits=4096) == 64
    assert rows(32, 5, capacity_bits=4096) == 8
    assert rows(32, 1, capacity_bits=4096) == 1
    with pytest.raises(ValueError, match="does not fit"):
        rows(4097, 1, capacity_bits=4096)
    with pytest.raises(ValueError, match="must be positive"):
        rows(0, 1, capacity_bits=1)
    assert ascend_ub_manager.programs_per_launch(70000) == 65535


@pytest.mark.gpu
def test_facts_of_a_real_gpu():
    assert fla.utils.device == "cuda"
    assert fla.utils.get_multiprocessor_count() == torch.cuda.get_device_properties(0).multi_processor_count
    assert fla.utils.get_device_smem_optin() > 48 * 1024
    with contextlib.ExitStack() as stack:
        stack.enter_context(fla.utils.custom_device_ctx(0))
        assert torch.cuda.current_device() == 0
