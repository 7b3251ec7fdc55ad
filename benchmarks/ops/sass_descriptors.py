# SPDX-License-Identifier: MIT
"""Find matrix instructions of Hopper machine code whose shared-memory descriptor comes from the wrong register.

ptxas 12.8 (shipped with triton 3.6) can build the descriptor of a wgmma operand from a stale uniform register: the code
compiles, and on the device it reads another tile or faults. A descriptor's low word is ``(address >> 4) & 0x3fff``:
this traces it back through the uniform registers and reports those that start elsewhere. Tracing is
straight-line: a report is a lead to look at, silence is no proof.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_DEST = re.compile(r"UR(\d+)$")


def _definitions(lines: list[str]) -> dict[int, list[tuple[int, str, list[str], int]]]:
    out: dict[int, list[tuple[int, str, list[str], int]]] = {}
    for n, text in enumerate(lines):
        m = re.match(r"(?:@!?U?P\d+ )?([A-Z0-9_.]+) (.*)", text)
        if not m:
            continue
        op, rest = m.groups()
        parts = [p.strip() for p in rest.split(",")]
        dest = _DEST.match(parts[0])
        if dest and op.startswith(("U", "R2UR", "S2UR", "REDUX", "VOTEU")):
            first = int(dest.group(1))
            width = 2 if ".64" in op or "WIDE" in op else 1
            for k in range(width):
                out.setdefault(first + k, []).append((n, op, parts[1:], k))
    return out


def wrong_descriptors(sass: str) -> list[str]:
    """Descriptions of the suspicious matrix instructions in the output of ``cuobjdump -sass``."""
    lines = [m.group(1).strip() for m in map(_LINE.search, sass.splitlines()) if m]
    definitions = _definitions(lines)

    def origin(register: int, before: int, depth: int = 0) -> str | None:
        found = [d for d in definitions.get(register, []) if d[0] < before]
        if not found or depth > 12:
            return f"UR{register} is not set"
        n, op, sources, k = found[-1]
        if op.startswith(("USGXT", "R2UR")) or (op.startswith("ULOP3") and any("0x3fff" in s for s in sources)):
            return None
        registers = [m for m in map(_DEST.match, sources) if m]
        if op.startswith(("UIADD3", "UMOV", "ULOP3")) and registers:
            return origin(int(registers[0].group(1)) + (k if ".64" in op else 0), n, depth + 1)
        return f"UR{register} is {op} of {', '.join(sources)}"

    wrong = []
    for n, text in enumerate(lines):
        m = re.match(r"HGMMA\S* R\d+, (R\d+, )?gdesc\[UR(\d+)\]", text)
        if m:
            base = int(m.group(2))
            for register in [base + 2] if m.group(1) else [base, base + 2]:
                error = origin(register, n)
                if error:
                    wrong.append(f"instruction {n}: {error}")
    return wrong
