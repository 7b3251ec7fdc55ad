# SPDX-License-Identifier: MIT
"""Which families there are and in which package each lives, for lazy imports and the Auto classes."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A family, without its row."""

    model_type: str
    package: str
    stem: str

    @property
    def names(self) -> tuple[str, str, str]:
        """Configuration, language model, base model."""
        return f"{self.stem}Config", f"{self.stem}ForCausalLM", f"{self.stem}Model"


# In the order of the names in release 0.6.0.
FAMILIES = (
    Entry("comba", "comba", "Comba"),
    Entry("delta_net", "delta_net", "DeltaNet"),
    Entry("gated_deltanet", "gated_deltanet", "GatedDeltaNet"),
    Entry("gla", "gla", "GLA"),
    Entry("gsa", "gsa", "GSA"),
    Entry("hgrn", "hgrn", "HGRN"),
    Entry("hgrn2", "hgrn2", "HGRN2"),
    Entry("kda", "kda", "KDA"),
    Entry("linear_attn", "linear_attn", "LinearAttention"),
    Entry("mamba2", "mamba2", "Mamba2"),
    Entry("retnet", "retnet", "RetNet"),
    Entry("rwkv6", "rwkv6", "RWKV6"),
    Entry("samba", "samba", "Samba"),
    Entry("transformer", "transformer", "Transformer"),
)
