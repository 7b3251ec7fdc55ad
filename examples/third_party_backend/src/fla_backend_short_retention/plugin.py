"""What fla is told about the backend. Importing this module defines it and does nothing else: no kernels, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fla.backends import BaseBackend, Capability, Rejection, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 256
MEASURED = "2 CPU cores, torch 2.13, fla 1.0.0.dev0, 4 to 8 heads of 64 to 128"


class ShortRetention(BaseBackend):
    """`fla.ops.retention.chunk_retention` for short sequences, forward and backward."""

    backend_type = "short_retention"
    env_var = "FLA_SHORT_RETENTION"
    priority = 5
    # Packed sequences would need a table of decays for every packing. The state layout is not an option of this op.
    capability = Capability(
        device_types=("cpu",),
        dtypes=("float64", "float32", "float16", "bfloat16"),
        varlen=False,
        initial_state=True,
        backward=True,
    )

    def chunk_retention_verifier(self, q: Tensor) -> tuple[bool, Any]:
        if q.shape[1] > LIMIT:
            return False, Rejection(
                "slower", f"T is {q.shape[1]}; beyond {LIMIT} tokens core is faster ({MEASURED}) and wants less memory"
            )
        return True, None

    def chunk_retention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        *,
        chunk_size: int | None = None,  # changes no result
    ) -> tuple[Tensor, Tensor | None]:
        from fla_backend_short_retention import kernel

        return kernel.chunk_retention(q, k, v, scale, initial_state, output_final_state)

    # For training under torch.compile, where autograd is off while an op runs.

    def chunk_retention_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        *,
        chunk_size: int | None = None,
    ) -> tuple[tuple[Tensor, Tensor | None], Sequence[Tensor]]:
        # Nothing is saved: the backward pass has the arguments and wants no more.
        return self.chunk_retention(q, k, v, scale, initial_state, output_final_state), ()

    def chunk_retention_bwd(
        self,
        args: Sequence[Any],
        saved: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        from fla_backend_short_retention import kernel

        return kernel.compiled_backward(args, grads, needed)


@hookimpl
def register_backends(registry: Any) -> None:
    registry.register("retention", ShortRetention())
