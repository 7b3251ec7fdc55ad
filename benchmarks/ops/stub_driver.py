# SPDX-License-Identifier: MIT
"""Triton's real launch path on a machine without a GPU: a libcuda that says yes to everything and runs nothing.

``with stub_driver(): fn(*cpu_tensors)`` compiles for the chip and launches through Triton's own C code, so that the
host side of a call can be profiled anywhere. CPU tensors stand for device tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

STUB = r"""
#include <cuda.h>
#include <string.h>
#define OK return CUDA_SUCCESS
long stub_launches = 0, stub_maps = 0;
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; OK; }
CUresult cuCtxSetCurrent(CUcontext c) { OK; }
CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 1 << 20; OK; }
CUresult cuCtxSetLimit(CUlimit l, size_t v) { OK; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; OK; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; OK; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  *v = a == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 132; OK; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; OK; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { OK; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { OK; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "stub"; OK; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = (CUfunction)1; OK; }
CUresult cuModuleLoadData(CUmodule *m, const void *p) { *m = (CUmodule)1; OK; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; OK; }
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)v = p; OK; }
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **d, CUdeviceptr p) { OK; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **k, void **e) { stub_launches++; OK; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t r, void *a, const cuuint64_t *d,
  const cuuint64_t *s, const cuuint32_t *b, const cuuint32_t *e, CUtensorMapInterleave i, CUtensorMapSwizzle w,
  CUtensorMapL2promotion l, CUtensorMapFloatOOBfill o) { memset(m, 0, sizeof *m); stub_maps++; OK; }
"""


def _build() -> Path:
    import triton

    folder = Path(tempfile.mkdtemp(prefix="stub-libcuda-"))
    (folder / "stub.c").write_text(STUB)
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = folder / "libcuda.so.1"
    subprocess.check_call(
        ["gcc", "-O2", "-w", "-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1",
         str(folder / "stub.c"), "-o", str(library)]
    )  # fmt: skip
    return library


@contextlib.contextmanager
def stub_driver(arch: str = "sm90") -> Iterator[ctypes.CDLL]:
    """Make ``arch`` the current chip; yields the library, whose ``stub_launches`` and ``stub_maps`` count."""
    os.environ.pop("TRITON_INTERPRET", None)
    library = _build()
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    handle = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia

    from fla.backends import devices
    from fla.ops._common import policy

    number = int(arch.removeprefix("sm"))

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            # The real ones are two C functions of torch.
            self.get_current_device = int
            self.get_current_stream = int

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", number, 32)

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return divmod(number, 10)

    active, interpreter = triton.runtime.driver._active, policy.CHIPS["interpreter"]
    triton.runtime.driver.set_active(Driver())
    policy.CHIPS["interpreter"] = policy.CHIPS[arch]
    accelerators = devices._accelerators, dict(devices._drivers)
    devices._accelerators, devices._drivers["cpu"] = ("cpu",), True
    try:
        yield handle
    finally:
        triton.runtime.driver._active, policy.CHIPS["interpreter"] = active, interpreter
        devices._accelerators = accelerators[0]
        devices._drivers.clear()
        devices._drivers.update(accelerators[1])
