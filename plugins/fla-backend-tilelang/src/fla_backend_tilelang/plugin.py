# SPDX-License-Identifier: MIT
"""The backend `tilelang`: forwards of `chunk_gated_delta_rule` and `chunk_kda` on Hopper, where no gradient is needed.

Nothing here imports `tilelang`: the verifiers read arguments only, and programs are built with the first call of a
kind. What raises there is quarantined by the framework, and core serves the call.
"""

from __future__ import annotations

from typing import Any

from fla.backends import Capability, Rejection, TileLangBackend, hookimpl

#: As in pyproject.toml, for what is installed otherwise.
VERSIONS = ">=0.1.15,<0.2"
MIN_BOUND = -5.0
ARCHITECTURE = (9, 0)
CHUNK = 64
#: Tokens of a KDA call. Scores and write strengths are rounded to 16 bits, an error that a token's channels share: over
#: one token and few heads it does not average out (6.2e-3 of the output was seen, 5e-3 is allowed).
MIN_TOKENS = 16
#: CUDA's limit for the second and third axis of a launch, and elements that 32-bit indices reach.
GRID_LIMIT, INDEX_LIMIT = 65535, 2**31

Answer = tuple[bool, str | Rejection | None]


def _version() -> str | None:
    """Why the installed tilelang will not do. One without metadata (a source tree) has to."""
    from importlib.metadata import PackageNotFoundError, version

    from packaging.specifiers import SpecifierSet

    try:
        found = version("tilelang")
    except PackageNotFoundError:
        return None
    fits = SpecifierSet(VERSIONS).contains(found, prereleases=True)
    return None if fits else f"tilelang {found} is installed, supported: {VERSIONS}"


def _architecture(q: Any) -> str | None:
    """The programs use Hopper's own instructions, which its successors dropped."""
    import torch

    # A meta tensor (explain) stands for one on this machine's accelerator.
    if not torch.cuda.is_available() or q.device.type not in ("cuda", "meta"):
        return None
    found = torch.cuda.get_device_capability(q.device if q.device.type == "cuda" else None)
    return None if found == ARCHITECTURE else f"compute capability is {found[0]}.{found[1]}, supported: 9.0 alone"


def _dtypes(q: Any, **others: Any) -> str | None:
    """Gates and write strengths come in float32 or in the dtype of q."""
    for name, x in others.items():
        if x is not None and x.dtype != q.dtype and str(x.dtype) != "torch.float32":
            kind, own = (str(t.dtype).removeprefix("torch.") for t in (x, q))
            return f"{name} is {kind}, supported: float32 and {own}"
    return None


def _size(q: Any, v: Any, cu_seqlens: Any) -> str | None:
    """Launches have an axis of chunks, one of sequences and one of heads; indices of tensors have 32 bits."""
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # Never fewer than there are.
    chunks = (B * T + sequences * (CHUNK - 1)) // CHUNK
    for what, count in (("chunks of 64 tokens", chunks), ("sequences", sequences), ("heads", HV)):
        if count > GRID_LIMIT:
            return f"there may be {count} {what}, supported: {GRID_LIMIT}"
    largest = max(chunks * HV * CHUNK * max(K, V), sequences * HV * K * V)
    if largest >= INDEX_LIMIT:
        return f"its largest tensor may have {largest} elements, supported: less than 2^31"
    return None


class TileLang(TileLangBackend):
    """Our TileLang programs (module `tilelang` builds them with nvcc)."""

    priority = 4
    operations = ("gated_delta_rule", "kda")
    capability = Capability(
        device_types=("cuda",),
        compute_capability=ARCHITECTURE,
        dtypes=("float16", "bfloat16"),
        head_dims=((64, 64), (64, 128), (128, 64), (128, 128)),
        gva=True,
        varlen=True,
        initial_state=True,
        state_layouts=("k_first", "v_first"),
        backward=False,
    )

    @classmethod
    def is_available(cls) -> bool:
        return super().is_available() and _version() is None

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """What is missing: tilelang, the version of it that the programs are written for, or nvcc."""
        return super().unavailable_reason() or _version()

    def probe(self) -> tuple[bool, str | None]:
        """Whether tilelang can be loaded: it makes the folder of its cache when it is imported."""
        try:
            import tilelang  # noqa: F401
        except OSError as error:
            return False, f"tilelang cannot be loaded ({error}); TILELANG_CACHE_DIR names a folder for its cache"
        except Exception as error:
            return False, f"tilelang cannot be loaded ({type(error).__name__}: {error})"
        return True, None


def _less_exact(q: Any) -> Rejection | None:
    """float16 goes to core's Triton kernels, which keep its digits; here it is computed at bfloat16's accuracy."""
    import torch

    from fla.backends import devices

    if q.dtype != torch.float16 or not devices.has_triton_driver("cuda"):
        return None
    return Rejection("slower", "core's kernels are more exact in float16 (and no call in float16 was timed)")


class GatedDeltaRule(TileLang):
    """`chunk_gated_delta_rule`."""

    def chunk_gated_delta_rule_verifier(
        self, q: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any = None, cp_context: Any = None
    ) -> Answer:
        """Whether the programs compute this call; what `capability` declares has been checked."""
        if cp_context is not None:
            return False, "cp_context is given: the programs know no context parallelism"
        reason = _architecture(q) or _dtypes(q, g=g, beta=beta) or _size(q, v, cu_seqlens)
        if reason is not None:
            return False, reason
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla_backend_tilelang.rule import GATED_DELTA_RULE

        declined = _less_exact(q) or GATED_DELTA_RULE.rejection(chunk_gated_delta_rule, v, cu_seqlens)
        return declined is None, declined

    def chunk_gated_delta_rule(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float | None = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Any = None,
        cu_seqlens_cpu: Any = None,
        chunk_indices: Any = None,
        cp_context: Any = None,
        *,
        use_gate_in_kernel: bool = False,
        A_log: Any = None,
        dt_bias: Any = None,
        chunk_size: int = 64,
    ) -> tuple[Any, Any]:
        # The parameters are spelt out, without **kwargs: one that core adds later then makes the backend unsupported
        # for calls that use it. cu_seqlens_cpu, chunk_indices and chunk_size change no result here.
        from fla_backend_tilelang.scalar import Switches, forward

        if not use_gate_in_kernel:
            A_log = dt_bias = None
        switches = Switches(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel)
        return forward(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            state_v_first,
            cu_seqlens,
            A_log,
            dt_bias,
            switches,
        )


class KDA(TileLang):
    """`chunk_kda` with gates known to lie in [-5, 0]."""

    def chunk_kda_verifier(
        self,
        q: Any,
        v: Any,
        g: Any,
        beta: Any,
        *,
        use_gate_in_kernel: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        return_intermediate_states: bool = False,
        cu_seqlens: Any = None,
        cp_context: Any = None,
        use_graph: bool = False,
    ) -> Answer:
        """Whether the programs compute this call; what `capability` declares has been checked."""
        if use_gate_in_kernel and (lower_bound is None or not MIN_BOUND <= lower_bound < 0):
            return False, f"lower_bound must be in [{MIN_BOUND:g}, 0), got {lower_bound}"
        if not use_gate_in_kernel and not safe_gate:
            return False, "safe_gate must be True: the programs take log decays of at least -5"
        if return_intermediate_states:
            return False, "return_intermediate_states=True: the programs keep the states before chunks to themselves"
        if use_graph:
            return False, "use_graph=True: the programs want cu_seqlens that cover all tokens"
        if cp_context is not None:
            return False, "cp_context is given: the programs know no context parallelism"
        if q.shape[1] < MIN_TOKENS:
            return False, f"needs {MIN_TOKENS} tokens, got {q.shape[1]}"
        reason = _architecture(q) or _dtypes(q, g=g, beta=beta) or _size(q, v, cu_seqlens)
        if reason is not None:
            return False, reason
        from fla.ops.kda import chunk_kda
        from fla_backend_tilelang.rule import KDA as TABLE

        declined = _less_exact(q) or TABLE.rejection(chunk_kda, v, cu_seqlens)
        return declined is None, declined

    def chunk_kda(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float | None = None,
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
        from fla_backend_tilelang.scalar import Switches
        from fla_backend_tilelang.vector import forward

        if not use_gate_in_kernel:
            A_log = dt_bias = lower_bound = None
        switches = Switches(use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel)
        return forward(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state,
            output_final_state,
            state_v_first,
            cu_seqlens,
            A_log,
            dt_bias,
            lower_bound,
            switches,
        )


@hookimpl
def register_backends(registry: Any) -> None:
    registry.register("gated_delta_rule", GatedDeltaRule())
    registry.register("kda", KDA())
