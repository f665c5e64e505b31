// The stages of the chunked algorithm, each callable alone: same names, inputs, outputs and layouts as
// flash-linear-attention (FLA) 0.6.0, so that any one can be exchanged with FLA's.
//
// Sizes, sequence lengths, chunk size, scale, state layout and backend come from the Plan. Shapes use the letters of
// gdn.h; NT is the number of chunks (of one batch row, or of all packed sequences), x the dtype of q, k and v, "stat"
// is float32 (float64 if x is float64). In a chunk of n rows, gamma is the chunk-local running sum of the gate in
// log2 units, gamma_L its last row, E_ij = 2^(gamma_i - gamma_j) on and below the diagonal and 0 above.
//
// A gate of -inf (hard reset) leaves -inf in the running sum at its own row only, and the sum restarts behind it. Every
// stage that reads gamma gives such a row, and all pairs of rows that it parts, a factor of exactly 0.
//
// cu_seqlens is ForwardTensors::cu_seqlens: required for packed sequences on a GPU, unused on the CPU.
#pragma once

#include "gdn/gdn.h"

namespace cula::gdn::stages {

// Per-head and per-token preparation --------------------------------------------------------------------------------

// y = x * rstd, rstd = 1 / sqrt(sum x^2 + kL2NormEpsilon) over the last dimension.
struct L2NormForward {
  const DLTensor* x;  // [.., D] float type, at most 6 dimensions
  DLTensor* y;        // like x
  DLTensor* rstd;     // [..] stat
};
void l2norm_fwd(const Plan& plan, const L2NormForward& t, Stream stream = nullptr);

// dx = rstd (dy - y <dy, y>)
struct L2NormBackward {
  const DLTensor* y;
  const DLTensor* rstd;
  const DLTensor* dy;
  DLTensor* dx;
};
void l2norm_bwd(const Plan& plan, const L2NormBackward& t, Stream stream = nullptr);

// y = scale * sigmoid(x)
struct BetaSigmoidForward {
  const DLTensor* x;  // at most 6 dimensions, float type
  double scale;       // 1 or 2
  DLTensor* y;        // same shape, stat
};
void fused_beta_sigmoid_fwd(const Plan& plan, const BetaSigmoidForward& t, Stream stream = nullptr);

// dx = dy scale s (1 - s), s = sigmoid(x)
struct BetaSigmoidBackward {
  const DLTensor* x;
  const DLTensor* dy;
  double scale;
  DLTensor* dx;
};
void fused_beta_sigmoid_bwd(const Plan& plan, const BetaSigmoidBackward& t, Stream stream = nullptr);

// Inclusive running sum inside each chunk (from its end if reverse), times scale.
struct LocalCumsum {
  const DLTensor* g;   // [B, T, HV] float type
  double scale = 1.0;  // 1 / ln 2 turns natural-log gates into gamma
  bool reverse = false;
  DLTensor* out;  // [B, T, HV] stat
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_local_cumsum(const Plan& plan, const LocalCumsum& t, Stream stream = nullptr);

// The in-kernel gate, -exp(A_log) softplus(g + dt_bias), alone ...
struct GateForward {
  const DLTensor* g;        // [B, T, HV] raw gate, float type
  const DLTensor* A_log;    // HV elements
  const DLTensor* dt_bias;  // HV elements, optional
  DLTensor* out;            // [B, T, HV] stat, natural log
};
void gdn_gate_fwd(const Plan& plan, const GateForward& t, Stream stream = nullptr);

// ... with the running sum of chunk_local_cumsum behind it.
struct GateCumsum {
  const DLTensor* g;
  const DLTensor* A_log;
  const DLTensor* dt_bias;
  double scale = 1.0;
  DLTensor* out;
  const DLTensor* cu_seqlens = nullptr;
};
void gdn_gate_chunk_cumsum(const Plan& plan, const GateCumsum& t, Stream stream = nullptr);

// z = g + dt_bias: dg = -exp(A_log) sigmoid(z) dyg; dA_log = sum dyg * gate; ddt_bias = sum of dg before rounding.
struct GateBackward {
  const DLTensor* g;
  const DLTensor* A_log;
  const DLTensor* dt_bias;
  const DLTensor* dyg;  // [B, T, HV] gradient of the log decay
  DLTensor* dg;
  DLTensor* dA_log;
  DLTensor* ddt_bias;  // absent if dt_bias is
};
void gdn_gate_bwd(const Plan& plan, const GateBackward& t, Stream stream = nullptr);

// Forward -----------------------------------------------------------------------------------------------------------

// L = strictly lower part of beta_i <k_i, k_j> E_ij (E = 1 without g).
struct ScaledDotKkt {
  const DLTensor* k;     // [B, T, H, K] x
  const DLTensor* g;     // [B, T, HV] gamma, stat; optional
  const DLTensor* beta;  // [B, T, HV] float type
  DLTensor* L;           // [B, T, HV, C] stat, rows; columns past the chunk and on or above the diagonal are 0
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_scaled_dot_kkt_fwd(const Plan& plan, const ScaledDotKkt& t, Stream stream = nullptr);

// A = (I + L)^-1
struct SolveTril {
  const DLTensor* L;  // [B, T, HV, C] float type
  DLTensor* A;        // [B, T, HV, C] float type; exact unit diagonal, zeros above it and past the chunk
  const DLTensor* cu_seqlens = nullptr;
};
void solve_tril(const Plan& plan, const SolveTril& t, Stream stream = nullptr);

// A as above, then w and u of recompute_w_u_fwd.
struct Intra {
  const DLTensor* k;
  const DLTensor* v;
  const DLTensor* g;  // optional
  const DLTensor* beta;
  DLTensor* w;
  DLTensor* u;
  DLTensor* A;
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_gated_delta_rule_fwd_intra(const Plan& plan, const Intra& t, Stream stream = nullptr);

// u = A diag(beta) v; w = A diag(beta 2^gamma) k
struct RecomputeWU {
  const DLTensor* k;     // [B, T, H, K] x
  const DLTensor* v;     // [B, T, HV, V] x
  const DLTensor* beta;  // [B, T, HV]
  const DLTensor* A;     // [B, T, HV, C] x
  const DLTensor* g;     // gamma; optional
  DLTensor* w;           // [B, T, HV, K] x
  DLTensor* u;           // [B, T, HV, V] x
  const DLTensor* cu_seqlens = nullptr;
};
void recompute_w_u_fwd(const Plan& plan, const RecomputeWU& t, Stream stream = nullptr);

// Over the chunks of a sequence: h = S; v_new = u - w S; S <- 2^gamma_L S + k^T diag(2^(gamma_L - gamma)) v_new
struct StateForward {
  const DLTensor* k;              // [B, T, H, K] x
  const DLTensor* w;              // [B, T, HV, K] x
  const DLTensor* u;              // [B, T, HV, V] x
  const DLTensor* g;              // gamma; optional
  const DLTensor* initial_state;  // [N, HV, K, V]; optional
  DLTensor* h;                    // [B, NT, HV, K, V] x, the state at the start of each chunk
  DLTensor* v_new;                // [B, T, HV, V] x; optional
  DLTensor* final_state;          // [N, HV, K, V] stat; optional
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_gated_delta_rule_fwd_h(const Plan& plan, const StateForward& t, Stream stream = nullptr);

// o = scale diag(2^gamma) q h + scale (tril(q k^T) * E) v
struct OutputForward {
  const DLTensor* q;  // [B, T, H, K] x
  const DLTensor* k;  // [B, T, H, K] x
  const DLTensor* v;  // [B, T, HV, V] x, v_new
  const DLTensor* h;  // [B, NT, HV, K, V] x
  const DLTensor* g;  // gamma; optional
  DLTensor* o;        // [B, T, HV, V] x
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_fwd_o(const Plan& plan, const OutputForward& t, Stream stream = nullptr);

// Backward ----------------------------------------------------------------------------------------------------------

// dv = (scale tril(q k^T) * E)^T do
struct LocalValueGradient {
  const DLTensor* q;
  const DLTensor* k;
  const DLTensor* g;            // gamma; optional
  const DLTensor* grad_output;  // do [B, T, HV, V]
  DLTensor* dv;                 // [B, T, HV, V] like do
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_bwd_dv_local(const Plan& plan, const LocalValueGradient& t, Stream stream = nullptr);

// Over the chunks in reverse, D = dht: dh = D; dv2 = diag(2^(gamma_L - gamma)) k D + dv;
// D <- 2^gamma_L D + scale (diag(2^gamma) q)^T do - w^T dv2. What is left of D is dh0.
struct StateBackward {
  const DLTensor* q;
  const DLTensor* k;
  const DLTensor* w;
  const DLTensor* g;    // gamma; optional
  const DLTensor* dht;  // [N, HV, K, V]; optional
  const DLTensor* grad_output;
  const DLTensor* dv;  // from chunk_bwd_dv_local
  DLTensor* dh;        // [B, NT, HV, K, V] x, gradient of the state at the end of each chunk
  DLTensor* dh0;       // [N, HV, K, V] stat; optional
  DLTensor* dv2;       // like dv; may be the same memory
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_gated_delta_rule_bwd_dhu(const Plan& plan, const StateBackward& t, Stream stream = nullptr);

// The gradients of the output and state stages by their operands; dq and dk summed over each group of value heads.
struct OperandGradients {
  const DLTensor* q;
  const DLTensor* k;
  const DLTensor* v;  // v_new
  const DLTensor* w;
  const DLTensor* g;  // gamma; optional, then dg must be absent
  const DLTensor* h;
  const DLTensor* dv;  // dv2
  const DLTensor* grad_output;
  const DLTensor* dh;
  DLTensor* dq;  // [B, T, H, K] x
  DLTensor* dk;  // [B, T, H, K] x
  DLTensor* dw;  // [B, T, HV, K] x
  DLTensor* dg;  // [B, T, HV] stat, by gamma in natural-log units, before the reverse running sum
  const DLTensor* cu_seqlens = nullptr;
};
void chunk_bwd_dqkwg(const Plan& plan, const OperandGradients& t, Stream stream = nullptr);

// The gradients of recompute_w_u_fwd and of the inverse by their operands; dk summed over each group of value heads.
struct WyBackward {
  const DLTensor* k;
  const DLTensor* v;
  const DLTensor* beta;
  const DLTensor* g;  // gamma; optional, then dg must be absent
  const DLTensor* A;
  const DLTensor* dw;  // [B, T, HV, K]
  const DLTensor* du;  // [B, T, HV, V]
  DLTensor* dk;        // [B, T, H, K] x
  DLTensor* dv;        // [B, T, HV, V] x
  DLTensor* db;        // [B, T, HV] float type
  DLTensor* dg;        // [B, T, HV] stat
  const DLTensor* cu_seqlens = nullptr;
};
void prepare_wy_repr_bwd(const Plan& plan, const WyBackward& t, Stream stream = nullptr);

}  // namespace cula::gdn::stages
