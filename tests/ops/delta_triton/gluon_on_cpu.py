# SPDX-License-Identifier: MIT
"""Gluon kernels on the CPU: enough of the language to run the kernels of this project as they are written.

Partitions are threads; barriers in shared memory count arrivals and bytes as the chip does. Shared memory begins as
NaN, products may only be used once they were waited for, and copies out of shared memory happen when they are waited
for, so that what is overwritten too early shows in the results. Layouts mean nothing here, and kernels written for 16
bits may run on float32: tiles count as if they had 16.
"""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch

from fla.ops._common import bound
from fla.ops._delta import kernels

PATIENCE = 20.0
# What kernels share is imported by its name.
SHARED = {
    "fla.ops._common.gluon_language": Path(bound.__file__).with_name("gluon_language.py"),
    "fla.ops._common.groups_kernels": Path(bound.__file__).with_name("groups_kernels.py"),
    "fla.ops._delta.kernels.groups_watch": Path(kernels.__file__).with_name("groups_watch.py"),
}


class Int(int):
    """A number as a kernel has it: with a dtype to convert to."""

    def to(self, dtype: Any) -> Int:
        return self


def _kept(name: str) -> Any:
    def op(self: Int, other: Any) -> Any:
        value = getattr(int, name)(self, other)
        return value if value is NotImplemented else Int(value)

    return op


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(Int, _side, _kept(_side))


class Pointer:
    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at = flat, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.at + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.flat, self.at - less)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.flat.dtype)


class Descriptor:
    def __init__(self, x: torch.Tensor, rows: int, cols: int, block_rows: int, block_cols: int) -> None:
        self.x, self.block = x.view(rows, cols), (block_rows, block_cols)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def tile(self, coord: Any) -> torch.Tensor:
        """What of a block lies within the matrix."""
        r, c = (int(i) for i in coord)
        assert r >= 0
        assert 0 <= c <= self.x.shape[1] - self.block[1]
        return self.x[r : r + self.block[0], c : c + self.block[1]]


class Bar:
    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0

    def _done(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase ^= 1
            self.left = self.count
            self.lock.notify_all()

    def arrive(self, n: int, expect: int = 0) -> None:
        with self.lock:
            self.bytes += expect
            self.left -= n
            assert self.left >= 0
            self._done()

    def bring(self, n: int) -> None:
        with self.lock:
            self.bytes -= n
            self._done()

    def wait(self, parity: int) -> None:
        with self.lock:
            if not self.lock.wait_for(lambda: self.phase != parity, PATIENCE):
                raise RuntimeError("a barrier is never reached")


class Shared:
    def __init__(self, x: torch.Tensor, bars: dict[int, Bar] | None = None, at: int = 0) -> None:
        self.x, self.bars, self.at = x, bars, at

    def index(self, i: Any) -> Shared:
        return Shared(self.x[int(i)], self.bars, int(i))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.x.narrow(dim, start, length))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(self.x.view(shape), self.bars)

    def permute(self, order: Any) -> Shared:
        return Shared(self.x.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        assert dtype == self.x.dtype
        return Shared(self.x.view(shape))

    def load(self, layout: Any = None) -> torch.Tensor:
        return self.x.clone()

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.x.dtype
        assert value.shape == self.x.shape
        self.x.copy_(value)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def bar(self) -> Bar:
        assert self.bars is not None
        return self.bars.setdefault(self.at, Bar())


class Product:
    def __init__(self, value: torch.Tensor, number: int) -> None:
        self.value, self.number = value, number


class _Thread(threading.local):
    def __init__(self) -> None:
        self.products = 0
        self.copies: list[Any] = []


_here = _Thread()
_pid = 0
_programs = 1


def _mma(a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    left = a.x if isinstance(a, Shared) else a
    assert isinstance(b, Shared)
    assert left.dtype == b.x.dtype
    if isinstance(acc, Product):  # products into the same sum follow each other
        acc = acc.value
    value = left.float() @ b.x.float()
    if use_acc:
        value = value + acc
    _here.products += 1
    return Product(value, _here.products) if is_async else value


def _mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    out = []
    for d in deps:
        if isinstance(d, Product):
            assert d.number <= _here.products - num_outstanding, "used before it was waited for"
            d = d.value
        out.append(d)
    return out[0] if len(out) == 1 else tuple(out)


def _specialize(parts: Any, warps: Any, registers: Any) -> None:
    errors: list[BaseException] = []

    def run(fn: Any, args: Any) -> None:
        try:
            with torch.no_grad():
                fn(*args)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=p) for p in parts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def _load(p: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    if isinstance(p.at, int) and not p.flat.is_floating_point():
        return Int(other if mask is False else p.flat[p.at])
    at = torch.as_tensor(p.at)
    if mask is None:
        return p.flat[at]
    mask = torch.as_tensor(mask).expand(at.shape)
    return torch.where(mask, p.flat[torch.where(mask, at, 0)], torch.tensor(other, dtype=p.flat.dtype))


def _store(p: Pointer, value: torch.Tensor | float, mask: Any = None) -> None:
    value = torch.as_tensor(value)
    if mask is None:
        p.flat[p.at] = value.to(p.flat.dtype)
    else:
        p.flat[p.at[mask]] = value[mask].to(p.flat.dtype)


def _smem(dtype: torch.dtype, shape: list[int], layout: Any = None) -> Shared:
    if dtype == torch.int64:
        return Shared(torch.zeros(shape, dtype=dtype), {})
    return Shared(torch.full(shape, float("nan"), dtype=dtype))


def _copy_in(desc: Descriptor, coord: Any, bar: Shared, dst: Shared, pred: bool = True) -> None:
    if not pred:
        return
    tile = desc.tile(coord)
    assert dst.x.shape == desc.block
    dst.x.zero_()
    dst.x[: tile.shape[0]] = tile
    # The scalars of a chunk are float32 on the chip as well; they come in rows of their own.
    bar.bar.bring(dst.x.numel() * (4 if desc.block[0] < 8 else 2))


def _copy_out(desc: Descriptor, coord: Any, src: Shared) -> None:
    tile = desc.tile(coord)
    assert src.x.shape == desc.block
    _here.copies.append((tile, src.x[: tile.shape[0]]))


def _store_wait(pendings: int = 0) -> None:
    while len(_here.copies) > pendings:
        tile, x = _here.copies.pop(0)
        tile.copy_(x)


def _init(bar: Shared, count: int) -> None:
    b = bar.bar
    b.count = b.left = count


def _where(c: Any, a: Any, b: Any) -> Any:
    return torch.where(c, a, b) if isinstance(c, torch.Tensor) else a if c else b


def _least(a: Any, b: Any) -> Any:
    return torch.clamp(a, max=b) if isinstance(a, torch.Tensor) else Int(min(a, b))


def _most(a: Any, b: Any, propagate_nan: Any = None) -> Any:
    if isinstance(b, torch.Tensor):
        return torch.maximum(a, b)
    return torch.clamp(a, min=b) if isinstance(a, torch.Tensor) else Int(max(a, b))


def _asm(code: str, constraints: str, args: Any, **kw: Any) -> torch.Tensor:
    if code.startswith("shfl.sync.idx"):
        # From other lanes, where each block of 8 rows and 8 columns lies in one warp as products have it.
        x, lane = args
        assert torch.equal(lane % 4, (torch.arange(8) // 2).expand_as(lane))
        return x.gather(0, torch.arange(x.shape[0])[:, None] // 8 * 8 + lane // 4)
    ops = {"ex2": torch.exp2, "rcp": torch.reciprocal, "lg2": torch.log2}
    return ops[code.split(".")[0]](args[0])


def _layout(*args: Any, **kw: Any) -> None:
    return None


def _jit(fn: Any = None, **kw: Any) -> Any:
    return fn if fn is not None else (lambda f: f)


def _modules() -> dict[str, types.ModuleType]:
    gl = types.ModuleType("triton.experimental.gluon.language")
    gl.constexpr = lambda value: value  # type: ignore[attr-defined]
    for name, value in {
        "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float32, "int64": torch.int64,
        "program_id": lambda axis: Int(_pid), "arange": lambda a, b, layout=None: torch.arange(a, b),
        "zeros": lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype), "load": _load, "store": _store,
        "exp2": torch.exp2, "where": _where, "minimum": _least,
        "maximum": _most, "abs": torch.abs, "sum": torch.sum,
        "full": lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
        "zeros_like": torch.zeros_like, "int32": torch.int32,
        "BlockedLayout": _layout,
        "allocate_shared_memory": _smem, "static_range": range, "convert_layout": lambda x, layout: x,
        "thread_barrier": lambda: None, "warp_specialize": _specialize, "SliceLayout": _layout,
        "NVMMADistributedLayout": _layout, "NVMMASharedLayout": _layout, "DotOperandLayout": _layout,
        "static_assert": lambda *a: None, "num_programs": lambda axis: Int(_programs),
        "inline_asm_elementwise": _asm, "DistributedLinearLayout": _layout, "SwizzledSharedLayout": _layout,
        "rsqrt": torch.rsqrt, "exp": torch.exp, "log": torch.log,
    }.items():  # fmt: skip
        setattr(gl, name, value)
    hopper = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    bars = types.SimpleNamespace(
        init=_init, wait=lambda b, p: b.bar.wait(p),
        expect=lambda b, n, pred=True: b.bar.arrive(1, n) if pred else None,
        arrive=lambda b, count=1, pred=True: b.bar.arrive(count) if pred else None, MBarrierLayout=_layout,
    )  # fmt: skip
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=_store_wait
    )
    for name, value in {
        "mbarrier": bars, "tma": copies, "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
        "fence_async_shared": lambda: None,
    }.items():  # fmt: skip
        setattr(hopper, name, value)
    gluon = types.ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.language = _jit, gl  # type: ignore[attr-defined]
    experimental = types.ModuleType("triton.experimental")
    experimental.gluon = gluon  # type: ignore[attr-defined]
    return {
        "triton.experimental": experimental, "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": gl, hopper.__name__: hopper,
        "triton.experimental.gluon.language.nvidia": types.ModuleType("nvidia"),
    }  # fmt: skip


def _module(path: Path, name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["range"] = lambda *bounds: map(Int, range(*bounds))
    exec(compile("from __future__ import annotations\n" + path.read_text(), str(path), "exec"), module.__dict__)
    return module


def load(path: Path, name: str) -> types.ModuleType:
    """The module at ``path`` with this Gluon instead of Triton's."""
    fakes = _modules()
    before = {n: sys.modules.get(n) for n in fakes}
    sys.modules.update(fakes)
    try:
        for n, shared in SHARED.items():
            before[n] = sys.modules.get(n)
            sys.modules[n] = _module(shared, n)
        return _module(path, name)
    finally:
        for n, m in before.items():
            if m is None:
                del sys.modules[n]
            else:
                sys.modules[n] = m


class OnCpu:
    """Stands for `Launcher`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.runs = 0

    def fix(self, meta: dict[str, Any], options: dict[str, Any]) -> Any:
        def run(grid: int, args: tuple[Any, ...], given: Any) -> None:
            global _pid, _programs
            self.runs += 1
            ours = [
                Descriptor(*a) if type(a) is bound.Matrix else Pointer(a.view(-1)) if isinstance(a, torch.Tensor) else a
                for a in args
            ]
            _programs = grid
            for _pid in range(grid):
                self.kernel(*ours, **meta)

        return run
