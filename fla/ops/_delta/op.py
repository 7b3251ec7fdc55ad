# SPDX-License-Identifier: MIT
"""From a function to a public op of the delta family: shared checks and defaults of dispatch.

All ops of the family give the same names the same meaning, so what there is to check is read off the parameter names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from fla.backends import dispatch
from fla.ops._common import checks
from fla.ops._common.old_keywords import HEAD_FIRST, STATE_LAYOUT
from fla.ops._common.seen import DATA, unless_seen
from fla.ops._delta.rows import Decay, DeltaRow
from fla.ops._delta.validate import check_beta, check_call, check_gate

__all__ = ["HEAD_FIRST", "STATE_LAYOUT", "Sizes", "Values", "delta_op"]


Values = Mapping[str, Any]
Sizes = Mapping[str, int]
_F = TypeVar("_F", bound=Callable[..., Any])
_DATA = (*DATA, "ssm_state_indices", "num_accepted_tokens")


def delta_op(
    row: DeltaRow,
    shapes: Mapping[str, str],
    *,
    chunk_sizes: tuple[int, ...] = (),
    grouped: bool = True,
    check: Callable[[Values, Sizes], None] | None = None,
    **options: Any,
) -> Callable[[_F], _F]:
    """Make the decorated function, whose body is the PyTorch path, a dispatched op.

    Args:
        row: the op's row.
        shapes: gates and coefficients with their shapes. One whose parameter has no default may not be None.
        chunk_sizes: what ``chunk_size`` may be.
        grouped: whether there may be more value heads than query heads.
        check: further checks, given all arguments by name and the sizes of the axes; runs after the shared ones.
        options: as of :func:`fla.backends.dispatch`.
    """

    def decorate(fn: _F) -> _F:
        parameters = inspect.signature(fn).parameters
        names = tuple(parameters)
        required = tuple(
            name for name in ("q", "k", "v", *shapes) if parameters[name].default is inspect.Parameter.empty
        )

        def validate(*args: Any, **kwargs: Any) -> None:
            values = {**dict(zip(names, args, strict=False)), **kwargs}
            for name in required:
                checks.check_tensor(name, values[name])
            sizes = _check_shared(row, shapes, grouped, values)
            if chunk_sizes:
                checks.check_chunk_size(values["chunk_size"], chunk_sizes)
            if check is not None:
                check(values, sizes)

        # Shapes, dtypes and flags that were right once are right. Offsets and slots are looked at every time.
        return dispatch(row.op, validate=unless_seen(validate, names, _DATA), **options)(fn)

    return decorate


def _check_shared(row: DeltaRow, shapes: Mapping[str, str], grouped: bool, values: Values) -> dict[str, int]:
    get = values.get
    A_log, dt_bias = get("A_log"), get("dt_bias")
    # A pool of states has a shape of its own, which the serving entry looks at.
    pooled = get("ssm_state_indices") is not None
    others: dict[str, tuple[Tensor | None, str]] = {name: (values[name], shape) for name, shape in shapes.items()}
    sizes = check_call(
        values["q"],
        values["k"],
        values["v"],
        others,
        scale=get("scale"),
        initial_state=None if pooled else get("initial_state"),
        state_v_first=bool(get("state_v_first")),
        cu_seqlens=get("cu_seqlens"),
        cu_seqlens_cpu=get("cu_seqlens_cpu"),
        parameters={"A_log": A_log, "dt_bias": dt_bias},
        allow_uncovered=bool(get("use_graph")),
        grouped=grouped,
    )
    vector = row.decay is Decay.VECTOR
    channels = sizes["HV"] * (sizes["K"] if vector else 1)
    check_gate(
        bool(get("use_gate_in_kernel")), A_log, dt_bias, sizes["HV"], channels, get("lower_bound"), bounded=vector
    )
    check_beta(bool(get("use_beta_sigmoid_in_kernel")), bool(get("allow_neg_eigval")))
    return sizes
