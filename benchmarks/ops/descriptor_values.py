# SPDX-License-Identifier: MIT
"""Compare the shared-memory descriptors of Hopper's matrix instructions in PTX with those in its machine code.

Most descriptors are constants: an address in shared memory and how the tile lies there. Both texts are run here as far
as constants go, in the order in which they stand, and the operands of each matrix instruction must come out equal. What
differs, or comes from a register that nothing has set, is a fault of ptxas (12.8 has it, 12.9 made none of the kernels
that were tried wrong). What depends on more than constants is passed over; `sass_descriptors` looks at where it comes
from.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable

# Where shared memory begins in machine code.
_BASE = 0x400
_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1


class _Unset:
    """The value of a register that nothing has set."""


# An operand: its descriptor, None where that is not a constant, _Unset; or "" where it lies in registers.
Operand = int | str | type[_Unset] | None

_PTX: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "add": operator.add,
    "sub": operator.sub,
    "or": operator.or_,
    "and": operator.and_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "mul.lo": operator.mul,
    "mad.lo": lambda a, b, c: a * b + c,
    "bfe.u32": lambda a, at, n: (a >> at) & ((1 << n) - 1),
}


def _ptx_operands(ptx: str) -> list[tuple[Operand, Operand]]:
    values: dict[str, int | None] = {"global_smem": _BASE}

    def value(x: str) -> int | None:
        return int(x, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", x) else values.get(x)

    # A register that is set in several places is no constant: it goes round a loop.
    times = Counter(re.findall(r"^\s*(?:@\S+\s+)?[a-z0-9_.:]+\s+(%rd?\d+),", ptx, re.MULTILINE))
    found: list[tuple[Operand, Operand]] = []
    for line in ptx.splitlines():
        text = line.split("//")[0].strip().rstrip(";").strip()
        if text.startswith("wgmma.mma_async"):
            _, a, b = re.sub(r"\{[^}]*\}", "{}", text).split(None, 1)[1].split(",")[:3]
            found.append(("" if a.strip() == "{}" else value(a.strip()), value(b.strip())))
            continue
        m = re.match(r"(@\S+\s+)?([a-z0-9_.:]+)\s+(%rd?\d+),\s*(.*)$", text)
        if not m:
            continue
        when, name, target, rest = m.groups()
        rule = next((f for key, f in _PTX.items() if name == key or name.startswith(key + ".")), None)
        given = [value(x.strip()) for x in rest.split(",")]
        try:
            known = rule is not None and not when and None not in given and times[target] == 1
            values[target] = rule(*given) & (_M64 if target[2] == "d" else _M32) if known and rule else None
        except (TypeError, ValueError):  # another form of the instruction
            values[target] = None
    return found


def _lut(table: int, a: int, b: int, c: int) -> int:
    """Three-input logic of 32 bits: bit ``4 a + 2 b + c`` of the table."""
    terms = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if table >> i & 1)
    return functools.reduce(operator.or_, terms, 0)


_SASS: dict[str, Callable[..., int]] = {
    "UMOV": lambda a: a,
    "ULEA": lambda a, b, s: (a << s) + b,
    "USHF.R.U32.HI": lambda low, s, a: a >> s if low == 0 else a,
    "USHF.L.U32": lambda a, s, high: a << s,
    "USGXT.U32": lambda a, n: a & ((1 << n) - 1),
    "ULOP3.LUT": lambda a, b, c, table, *_: _lut(table, a, b, c),
}


class _Uniform:
    """Uniform registers, as far as they hold constants."""

    def __init__(self) -> None:
        self.values: dict[int, int | None] = {}
        self.carries: dict[str, int | None] = {}

    def read(self, text: str, wide: bool = False) -> int | type[_Unset] | None:
        name = text.lstrip("-~!")
        if name.startswith("UR") and name[2:].isdigit():
            numbers = range(int(name[2:]), int(name[2:]) + 1 + wide)
            parts = [self.values.get(n, _Unset) for n in numbers]
            if _Unset in parts:
                return _Unset
            x = None if None in parts else sum(p << 32 * i for i, p in enumerate(parts) if isinstance(p, int))
        elif re.fullmatch(r"0x[0-9a-f]+|\d+", name):
            x = int(name, 0)
        else:
            x = 0 if name in ("URZ", "UPT") and text[0] != "!" else None
        if x is None or text[0] not in "-~":
            return x
        return ~x if text[0] == "~" else -x

    def run(self, when: str | None, name: str, target: int, sources: list[str]) -> None:
        wide = ".64" in name or ".WIDE" in name
        out = sources.pop(0) if name.startswith("UIADD3") and re.fullmatch(r"UP\d", sources[0]) else None
        plain = [x for x in sources if not x.lstrip("!").startswith("UP")]
        given = [self.read(x, wide) for x in plain]
        x: int | type[_Unset] | None = None
        if _Unset in given:
            x = _Unset
        elif name == "S2UR":
            x = 0 if "CgaCtaId" in sources[0] else None
        elif None not in given and name.startswith("UIADD3"):
            carry = self.carries.get(sources[3]) if name == "UIADD3.X" else 0
            if carry is not None:
                x = sum(v & (_M64 if wide else _M32) for v in given if isinstance(v, int)) + carry
        elif None not in given and name in _SASS:
            x = _SASS[name](*given)
        if out:
            self.carries[out] = x >> 32 if isinstance(x, int) else None
        for i in range(4 if ".128" in name else 1 + wide):
            part = x >> 32 * i & _M32 if isinstance(x, int) else None
            if x is _Unset:
                self.values.pop(target + i, None)
            else:
                # Under a condition it holds this or what it held before.
                self.values[target + i] = part if not when or self.values.get(target + i) == part else None


def _sass_operands(sass: str) -> list[tuple[Operand, Operand]]:
    uniform = _Uniform()
    found: list[tuple[Operand, Operand]] = []
    for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", sass):
        text = line.strip()
        m = re.match(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", text)
        if m:
            a, b = (uniform.read(f"UR{int(m[2]) + i}", True) for i in (0, 2))
            found.append(("" if m[1] else a, b))
            continue
        m = re.match(r"(@\S+ +)?([A-Z0-9_.]+) +UR(\d+), *(.*)", text)
        if m:
            uniform.run(m[1], m[2], int(m[3]), [x.strip() for x in m[4].split(",")])
    return found


def _text(x: Operand) -> str:
    return (
        "from a register that nothing has set" if x is _Unset else f"{x:#x}" if isinstance(x, int) else "in registers"
    )


def differing_descriptors(ptx: str, sass: str) -> list[str]:
    """The operands of matrix instructions that are not in the output of ``cuobjdump -sass`` what they are in PTX.

    Groups of warps with code of their own may stand in another order there: nothing differs where the two hold the same
    instructions.

    Raises:
        ValueError: the two do not hold the same number of matrix instructions.
    """
    wanted, got = _ptx_operands(ptx), _sass_operands(sass)
    if len(wanted) != len(got):
        raise ValueError(f"{len(wanted)} matrix instructions in PTX, {len(got)} in machine code")
    if _Unset not in sum(got, ()) and Counter(wanted) == Counter(got):
        return []
    return [
        f"matrix instruction {i}: {name} is {_text(is_)} instead of {_text(should)}"
        for i, pair in enumerate(zip(wanted, got, strict=True))
        for name, should, is_ in zip("AB", *pair, strict=True)
        if is_ is _Unset or (should is not None and is_ is not None and should != is_)
    ]
