# SPDX-License-Identifier: MIT
"""Keywords of the 0.6.0 series that most ops share, as ``renamed`` and ``removed`` of :func:`fla.backends.dispatch`."""

HEAD_FIRST = {"head_first": "`head_first` was removed: pass tensors as [B, T, H, D]."}
STATE_LAYOUT = {"transpose_state_layout": "state_v_first"}
