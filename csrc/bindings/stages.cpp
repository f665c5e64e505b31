// One line a stage: the members of its argument struct, in the order in which Python passes them.
#include "gdn/stages.h"

#include "bindings/binding.h"

namespace cula::gdn::bindings {
namespace {

// The FFI type that carries a member of a stage's argument struct.
template <class Member>
struct ArgumentOf {
  using type = Member;
};
template <>
struct ArgumentOf<const DLTensor*> {
  using type = Tensor;
};
template <>
struct ArgumentOf<DLTensor*> {
  using type = Tensor;
};

template <class Struct, class Member>
Struct struct_of(Member Struct::*);
template <class Struct, class Member>
Member member_of(Member Struct::*);

template <auto Member>
using Argument = typename ArgumentOf<decltype(member_of(Member))>::type;

inline DLTensor* unwrap(const Tensor& tensor) { return get(tensor); }
template <class Scalar>
Scalar unwrap(Scalar scalar) {
  return scalar;
}

inline void take_device(Problem& problem, const Tensor& tensor) {
  if (get(tensor) != nullptr) problem.device = get(tensor)->device;
}
template <class Scalar>
void take_device(Problem&, Scalar) {}

// The sizes can not be read off the tensors, since no stage has all of them; Python states them.
template <auto Run, auto First, auto... Rest>
void stage(Request request, Argument<First> first, Argument<Rest>... rest, int64_t batch, int64_t tokens, int64_t heads,
           int64_t value_heads, int64_t key_dim, int64_t value_dim, DLDataType dtype) {
  request.set_sizes(batch, tokens, heads, value_heads, key_dim, value_dim);
  Problem& problem = request.problem;
  problem.dtype = dtype;
  take_device(problem, first);
  decltype(struct_of(First)) arguments{};
  arguments.*First = unwrap(first);
  ((arguments.*Rest = unwrap(rest)), ...);
  if constexpr (requires { arguments.cu_seqlens; }) arguments.cu_seqlens = request.cu_seqlens;
  Run(request.make_plan(), arguments, current_stream(problem));
}

}  // namespace
}  // namespace cula::gdn::bindings

#define CULA_PARENTHESES ()
#define CULA_EXPAND(...) CULA_EXPAND_4(CULA_EXPAND_4(CULA_EXPAND_4(__VA_ARGS__)))
#define CULA_EXPAND_4(...) CULA_EXPAND_1(CULA_EXPAND_1(CULA_EXPAND_1(CULA_EXPAND_1(__VA_ARGS__))))
#define CULA_EXPAND_1(...) __VA_ARGS__
// &Struct::first, &Struct::second, ...
#define CULA_MEMBERS(Struct, member, ...) \
  &Struct::member __VA_OPT__(, CULA_MORE_MEMBERS CULA_PARENTHESES(Struct, __VA_ARGS__))
#define CULA_MORE_MEMBERS() CULA_MEMBERS

#define CULA_EXPORT_STAGE(name, Struct, ...) \
  CULA_EXPORT(name, cula::gdn::bindings::stage<name, CULA_EXPAND(CULA_MEMBERS(Struct, __VA_ARGS__))>)

using namespace cula::gdn::stages;  // NOLINT(google-build-using-namespace): the table below names little else

CULA_EXPORT_STAGE(l2norm_fwd, L2NormForward, x, y, rstd)
CULA_EXPORT_STAGE(l2norm_bwd, L2NormBackward, y, rstd, dy, dx)
CULA_EXPORT_STAGE(fused_beta_sigmoid_fwd, BetaSigmoidForward, x, scale, y)
CULA_EXPORT_STAGE(fused_beta_sigmoid_bwd, BetaSigmoidBackward, x, dy, scale, dx)
CULA_EXPORT_STAGE(chunk_local_cumsum, LocalCumsum, g, scale, reverse, out)
CULA_EXPORT_STAGE(gdn_gate_fwd, GateForward, g, A_log, dt_bias, out)
CULA_EXPORT_STAGE(gdn_gate_chunk_cumsum, GateCumsum, g, A_log, dt_bias, scale, out)
CULA_EXPORT_STAGE(gdn_gate_bwd, GateBackward, g, A_log, dt_bias, dyg, dg, dA_log, ddt_bias)
CULA_EXPORT_STAGE(chunk_scaled_dot_kkt_fwd, ScaledDotKkt, k, g, beta, L)
CULA_EXPORT_STAGE(solve_tril, SolveTril, L, A)
CULA_EXPORT_STAGE(chunk_gated_delta_rule_fwd_intra, Intra, k, v, g, beta, w, u, A)
CULA_EXPORT_STAGE(recompute_w_u_fwd, RecomputeWU, k, v, beta, A, g, w, u)
CULA_EXPORT_STAGE(chunk_gated_delta_rule_fwd_h, StateForward, k, w, u, g, initial_state, h, v_new, final_state)
CULA_EXPORT_STAGE(chunk_fwd_o, OutputForward, q, k, v, h, g, o)
CULA_EXPORT_STAGE(chunk_bwd_dv_local, LocalValueGradient, q, k, g, grad_output, dv)
CULA_EXPORT_STAGE(chunk_gated_delta_rule_bwd_dhu, StateBackward, q, k, w, g, dht, grad_output, dv, dh, dh0, dv2)
CULA_EXPORT_STAGE(chunk_bwd_dqkwg, OperandGradients, q, k, v, w, g, h, dv, grad_output, dh, dq, dk, dw, dg)
CULA_EXPORT_STAGE(prepare_wy_repr_bwd, WyBackward, k, v, beta, g, A, dw, du, dk, dv, db, dg)
