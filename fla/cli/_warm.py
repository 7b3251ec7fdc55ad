# SPDX-License-Identifier: MIT
"""What `fla warmup` runs: for each form of a function one call of every size class, forward and backward."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fla.cli._output import CliError

if TYPE_CHECKING:
    from fla.testing.draw import Request

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Task:
    """One form of one function, whose calls share most kernels and so run in one process."""

    function: str
    form: str
    dtype: str
    K: int
    V: int
    group: int
    gates: str
    backward: bool
    flags: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        group = f" group {self.group}" if self.group > 1 else ""
        return f"{self.function} {self.form} {self.dtype} {self.K}x{self.V}{group}"


@dataclass
class Outcome:
    """Of a task: how many calls ran, and why some did not: refused by the Triton path, or failed."""

    task: str
    calls: int = 0
    seconds: float = 0.0
    refused: str = ""
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_part(self, part: Outcome) -> Outcome:
        return Outcome(
            self.task,
            self.calls + part.calls,
            round(self.seconds + part.seconds, 2),
            self.refused or part.refused,
            self.error or part.error,
        )


def tasks(
    names: Sequence[str],
    *,
    dtypes: Sequence[str],
    dims: Sequence[str],
    groups: Sequence[int],
    forms: Sequence[str],
    flags: Mapping[str, Any],
    gates: str,
    backward: bool,
) -> list[Task]:
    """The tasks that the options of the command ask for.

    Raises:
        CliError: an unknown function, form, dtype, size or flag, or a function without a Triton path.
    """
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise CliError(f"--dtype {dtype!r} must be one of {', '.join(DTYPES)}", 2)
    if any(group < 1 for group in groups):
        raise CliError(f"--group must be at least 1, got {min(groups)}", 2)
    sizes = [_head_dims(text) for text in dims]
    specs = _specs(names)
    known = {v.name for spec in specs for v in _forms(spec)}
    for form in forms:
        if form not in known:
            raise CliError(f"--form {form!r} is not among the forms: {', '.join(sorted(known))}", 2)
    for flag in flags:
        if not any(flag in _op(spec).signature.parameters for spec in specs):
            raise CliError(f"--arg {flag}: none of the functions has this parameter", 2)
    return [
        Task(str(spec), variant.name, dtype, K, V, group, gates, backward and not variant.without_grad, flags)
        for spec in specs
        for variant in _forms(spec)
        if not forms or variant.name in forms
        for dtype, (K, V), group in itertools.product(dtypes, sizes, groups)
        if group == 1 or spec.grouped
    ]


def _forms(spec: Any) -> list[Any]:
    """The variants of a function that differ in more than values, which no compiler sees."""
    seen: dict[Any, Any] = {}
    for variant in spec.variants:
        shapes = tuple(sorted((n, x.shape, x.wide) for n, x in spec.inputs_of(variant).items()))
        seen.setdefault((tuple(sorted(variant.flags.items())), shapes), variant)
    return list(seen.values())


def _head_dims(text: str) -> tuple[int, int]:
    K, _, V = text.partition("x")
    if not K.isdecimal() or not (V or K).isdecimal() or int(K) < 1 or int(V or K) < 1:
        raise CliError(f"--head-dim {text!r} must be a number, as 128, or K and V, as 64x128", 2)
    return int(K), int(V or K)


def _rows() -> dict[tuple[str, str], Any]:
    """How each function is called: the kit's rows, and those for what the kit does not know."""
    from fla.cli._warm_rows import EXTRA
    from fla.testing.specs import SPECS

    return {**EXTRA, **SPECS}


def _op(spec: Any) -> Any:
    """What is behind the public function of a row."""
    return spec.function.op


def _specs(names: Sequence[str]) -> list[Any]:
    """The rows of the functions meant, those with a Triton path."""
    rows = [row for row in _rows().values() if _op(row).triton_path is not None]
    if not names:
        return rows
    found: dict[str, Any] = {}
    for name in names:
        meant = name.removeprefix("fla.ops.")
        hits = [row for row in rows if meant in (row.operation, row.name, str(row))]
        if not hits:
            listed = ", ".join(sorted({row.operation for row in rows}))
            raise CliError(f"no function with a Triton path is called {name!r}; operations with one: {listed}", 2)
        found |= {str(row): row for row in hits}
    return list(found.values())


def requests(task: Task, classes: Sequence[Any]) -> Iterator[Request]:
    """The calls of a task: every size class, with and without states, with ready gates in both dtypes."""
    from fla.cli._warm_rows import STATELESS
    from fla.testing.draw import Request

    room, _, name = task.function.rpartition(".")
    form = next(v for v in _rows()[room, name].variants if v.name == task.form)
    grads = (False, True) if task.backward else (False,)
    gates: dict[str, tuple[str | None, ...]] = {
        "both": (None, task.dtype),
        "float32": (None,),
        "same": (task.dtype,),
    }
    kinds = ("float32",) if task.dtype == "float32" else tuple(dict.fromkeys(gates[task.gates]))
    states: tuple[tuple[str | None, bool], ...] = ((None, False), (None, True), ("float32", True))
    if task.function.partition(".")[0] in STATELESS:
        states = states[:2]
    elif any(map(callable, form.flags.values())) or form.flags.get("inplace_final_state"):
        states = states[2:]
    for size, grad, kind, (initial, final) in itertools.product(classes, grads, kinds, states):
        yield Request(
            variant=task.form,
            dtype=task.dtype,
            B=1,
            T=size.T,
            H=size.heads,
            group=task.group,
            K=task.K,
            V=task.V,
            lengths=size.lengths,
            initial=initial,
            final=final,
            grad=("*",) if grad else (),
            gates=kind,
        )


def run_task(task: Task, device: str, only: int | None = None) -> Outcome:
    """Run the calls of a task on ``device``, or those of one size class. Values do not matter to a compiler, so nothing
    is compared."""
    import torch

    from fla.backends import BackendUnavailable, use_backend
    from fla.ops._common.policy import chip_of
    from fla.ops._common.size_classes import size_classes
    from fla.testing.draw import draw, results_of

    outcome = Outcome(str(task))
    start = time.perf_counter()
    room, _, name = task.function.rpartition(".")
    spec = _rows()[room, name]
    function = spec.function
    op = _op(spec)
    flags = {n: x for n, x in task.flags.items() if n in op.signature.parameters}
    classes = size_classes(chip_of(torch.device(device)))
    try:
        for request in requests(task, classes if only is None else classes[only : only + 1]):
            call = draw(op, spec, request, device, flags)
            given = call.keywords()
            given |= {n: x(given) for n, x in given.items() if callable(x)}
            grad = bool(request.grad)
            try:
                with torch.set_grad_enabled(grad), use_backend("triton", strict=True):
                    results = [x for x in results_of(function(**given)) if x is not None]
            except BackendUnavailable as error:
                outcome.refused = outcome.refused or str(error).partition("\n")[0]
                continue
            if grad:
                results = [x for x in results if x.requires_grad]
                torch.autograd.grad(
                    results, list(call.leaves().values()), [torch.ones_like(x) for x in results], allow_unused=True
                )
            outcome.calls += 1
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:  # whatever a form raises is its outcome; the others still run
        outcome.error = f"{type(error).__name__}: {error}".partition("\n")[0]
    outcome.seconds = round(time.perf_counter() - start, 2)
    return outcome


def run_tasks(work: Sequence[Task], device: str, jobs: int, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Run the tasks in ``jobs`` processes, in this one if that is 1; ``tell`` hears of each as it ends."""
    results: list[Outcome] = []
    if jobs == 1:
        for task in work:
            results.append(run_task(task, device))
            tell(results[-1])
        return results
    import torch

    from fla.ops._common.policy import chip_of
    from fla.ops._common.size_classes import size_classes

    # Calls of one task share kernels; but where there are fewer tasks than processes, some compiled twice cost less
    # than processes that wait.
    few = len(work) < jobs
    parts = range(len(size_classes(chip_of(torch.device(device))))) if few else [None]
    # A fresh interpreter each: a CUDA context does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(work) * len(parts)), mp_context=context) as pool:
        futures = {pool.submit(run_task, task, device, part): task for task in work for part in parts}
        sums = {task: Outcome(str(task)) for task in work}
        waiting = dict.fromkeys(work, len(parts))
        for future in as_completed(futures):
            task = futures[future]
            sums[task] = sums[task].with_part(future.result())
            waiting[task] -= 1
            if waiting[task] == 0:
                results.append(sums[task])
                tell(results[-1])
    return results


def cache_folder() -> Path:
    """Where Triton keeps what it has compiled."""
    try:
        knobs = importlib.import_module("triton.knobs")
        return Path(knobs.cache.dir)
    except (ImportError, AttributeError):
        chosen = os.environ.get("TRITON_CACHE_DIR")
        return Path(chosen) if chosen else Path.home() / ".triton" / "cache"


def cached_kernels() -> set[str]:
    """Names of the compiled kernels on disk."""
    folder = cache_folder()
    return {p.parent.name for p in folder.glob("*/*.json")} if folder.is_dir() else set()
