# SPDX-License-Identifier: MIT
"""The backend `flash_kda`: FlashKDA's CUDA forward for `fla.ops.kda.chunk_kda`.

Nothing here imports `flash_kda`: the verifier reads arguments only, and the kernels load with the one-time probe.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from typing import Any, ClassVar

from fla.backends import BaseBackend, Capability, Rejection, hookimpl

HEAD_DIM = 128
MIN_BOUND = -5.0


class FlashKDA(BaseBackend):
    """FlashKDA (module `flash_kda`): the forward of `chunk_kda` on sm90 and later, where no gradient is needed."""

    backend_type = "flash_kda"
    package_name = "flash_kda"
    env_var = "FLA_FLASH_KDA"
    default_enable = True
    priority = 3
    operations = ("kda",)
    capability = Capability(
        device_types=("cuda",),
        compute_capability=(9, 0),
        dtypes=("bfloat16",),
        head_dims=((HEAD_DIM, HEAD_DIM),),
        gva=False,
        varlen=True,
        initial_state=True,
        state_layouts=("k_first", "v_first"),
        backward=False,
    )
    # The kernel's own rounding: up to 6.3e-3 of RMS on an H200 in the cases of fla's kit, whose bound is 5e-3.
    testing_tolerances: ClassVar[dict[str, tuple[float, float]]] = {"bfloat16": (7e-3, 1e-2)}

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why there are no kernels; None where there are."""
        if importlib.util.find_spec("flash_kda") is not None:
            return None
        here = (sys.implementation.name, sys.version_info[:2], platform.system(), platform.machine())
        if here == ("cpython", (3, 12), "Linux", "x86_64"):
            return "module flash_kda is not installed; pip install 'tokenspeed-flashkda==0.0.1.post20260729'"
        return (
            "module flash_kda is not installed; its wheels (tokenspeed-flashkda) exist for CPython 3.12 on Linux "
            f"x86_64, this is {here[0]} {here[1][0]}.{here[1][1]} on {here[2]} {here[3]}"
        )

    def probe(self) -> tuple[bool, str | None]:
        """One tiny forward against the token recurrence: some wheels import and then fail every call."""
        from fla_backend_flashkda.probe import probe

        return probe(self.chunk_kda)

    def chunk_kda_verifier(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        lower_bound: float | None = None,
        return_intermediate_states: bool = False,
        cu_seqlens: Any = None,
        cp_context: Any = None,
        use_graph: bool = False,
    ) -> tuple[bool, str | Rejection | None]:
        """Whether the kernel computes this call; what `capability` declares has been checked."""
        if not use_gate_in_kernel:
            return False, "use_gate_in_kernel must be True: the kernel takes the raw gate"
        if not use_qk_l2norm_in_kernel:
            return False, "use_qk_l2norm_in_kernel must be True: the kernel normalises q and k"
        if not use_beta_sigmoid_in_kernel:
            return False, "use_beta_sigmoid_in_kernel must be True: the kernel takes beta before the sigmoid"
        if lower_bound is None or not MIN_BOUND <= lower_bound < 0:
            return False, f"lower_bound must be in [{MIN_BOUND:g}, 0), got {lower_bound}"
        if allow_neg_eigval:
            return False, "allow_neg_eigval=True: the kernel does not double the sigmoid of beta"
        if return_intermediate_states:
            return False, "return_intermediate_states=True: the kernel keeps the states before chunks to itself"
        if use_graph:
            return False, "use_graph=True: the kernel wants cu_seqlens that cover all tokens"
        if cp_context is not None:
            return False, "cp_context is given: the kernel knows no context parallelism"
        for name, x in (("g", g), ("beta", beta)):
            kind = str(x.dtype).removeprefix("torch.")
            if kind != "bfloat16":
                return False, f"{name} is {kind}, the kernel takes bfloat16: rounding it would change the result"
        from fla.ops.kda import chunk_kda
        from fla_backend_flashkda.rule import MEASURED

        declined = MEASURED.rejection(chunk_kda, v, cu_seqlens)
        return declined is None, declined

    def chunk_kda(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: Any = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Any = None,
        cu_seqlens_cpu: Any = None,
        cp_context: Any = None,
        use_graph: bool = False,
        max_num_seqs: int | None = None,
        *,
        A_log: Any = None,
        dt_bias: Any = None,
        chunk_size: int = 64,
    ) -> tuple[Any, Any]:
        # The parameters are spelt out, without **kwargs: one that core adds later then makes the backend unsupported
        # for calls that use it. safe_gate, disable_recompute, max_num_seqs and chunk_size change no result here.
        assert lower_bound is not None  # the verifier saw to it
        from fla_backend_flashkda.forward import forward

        return forward(
            q,
            k,
            v,
            g,
            beta,
            scale,
            A_log,
            dt_bias,
            lower_bound,
            initial_state,
            output_final_state,
            state_v_first,
            cu_seqlens,
        )


@hookimpl
def register_backends(registry: Any) -> None:
    registry.register("kda", FlashKDA())
