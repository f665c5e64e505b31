"""Gated DeltaNet: the delta rule with decay, in chunks, on CPUs and GPUs.

    from cula.gdn import chunk_gated_delta_rule
    o, final_state = chunk_gated_delta_rule(q, k, v, g, beta)

`chunk_gated_delta_rule` (alias `chunk_gdn`) is the operator with its gradient, `fused_recurrent_gated_delta_rule` the
token recurrence for decoding; both take the arguments of flash-linear-attention 0.6.0. `cula.gdn.stages` holds the
parts of the chunked algorithm, `cula.gdn.cp` context parallelism between ranks (`build_cp_context`), and
`reference_gated_delta_rule` is the definition in float64 to check against.
"""

from cula.gdn import cp, stages
from cula.gdn.cp import build_cp_context
from cula.gdn.index import prepare_checkpoint_offsets, prepare_chunk_indices, prepare_chunk_offsets
from cula.gdn.ops import chunk_gated_delta_rule, chunk_gdn
from cula.gdn.plan import LibraryInfo, Plan, library_info, plan
from cula.gdn.recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
from cula.gdn.reference import reference_gated_delta_rule

__all__ = [
    "LibraryInfo",
    "Plan",
    "build_cp_context",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "cp",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "library_info",
    "plan",
    "prepare_checkpoint_offsets",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "reference_gated_delta_rule",
    "stages",
]

__version__ = library_info().version
