// Forward: two passes, over one batch of (sequence, key head) pairs after another so that A is still in the caches when
// it is used.
//   prepare   for each (chunk, key head), chunk-parallel: A for the value heads of the group
//   advance   for each (sequence, value head, block of state columns), over the chunks in order:
//               R = beta (V - gamma K S); V' = A R; O = scale gamma Q S + P V'; S <- total S + K^T diag(to_end) V'
// Columns of the state never meet, so that a block of them is a unit of its own. Context parallelism calls the two
// passes one by one, with A saved between them.
#include "gdn/cpu/kernels/kernels.h"
#include "gdn/cpu/kernels/sequence_pass.h"
#include "gdn/schedules.h"
#include "gdn/state_pools.h"
#include "gdn/validate.h"

namespace cula::gdn::cpu::CULA_ISA {

namespace {

// The workspace, laid out once for its size and once for use.
template <class Policy>
struct ForwardWorkspace {
  using T = typename Policy::Scalar;
  const std::vector<Batch>& batches;
  TensorView q_normalized, q_rstd, k_normalized, k_rstd;
  TensorView A;  // [slots, HV / H, C, C], unless it is saved
  void* thread_scratch;
  size_t thread_bytes;

  ForwardWorkspace(Arena& arena, const Plan& plan, bool saves_for_backward)
      : batches(plan.schedules().forward_batches(plan)) {
    const Problem& p = plan.problem();
    const DType x = from_dlpack(p.dtype, "dtype");
    const DType stat = stat_dtype(p);
    const int64_t group = p.value_heads / p.heads;
    if (!saves_for_backward) {
      if (p.use_qk_l2norm) {
        q_normalized = take_tensor(arena, x, {p.batch, p.tokens, p.heads, p.key_dim});
        q_rstd = take_tensor(arena, stat, {p.batch, p.tokens, p.heads});
        k_normalized = take_tensor(arena, x, {p.batch, p.tokens, p.heads, p.key_dim});
        k_rstd = take_tensor(arena, stat, {p.batch, p.tokens, p.heads});
      }
      A = take_tensor(arena, x, {most_slots(batches), group, p.chunk_size, p.chunk_size});
    }
    Arena prepare, advance;
    PrepareScratch<Policy>(prepare, p);
    SequenceScratch<Policy>(advance, p, plan.value_block());
    thread_bytes = std::max(prepare.used(), advance.used());
    thread_scratch = arena.take<char>(static_cast<int64_t>(thread_bytes) * plan.num_threads());
  }

  void* scratch_of(int worker) const { return static_cast<char*>(thread_scratch) + thread_bytes * worker; }
};

enum class Passes { kBoth, kPrepare, kAdvance };

template <class Policy>
void run_forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Passes passes) {
  using T = typename Policy::Scalar;
  const Problem& p = plan.problem();
  Arena arena(workspace.data);
  ForwardWorkspace<Policy> ws(arena, plan, t.saved != nullptr);

  SequenceInputs in = {.q = TensorView::from(t.q, "q"),
                       .k = TensorView::from(t.k, "k"),
                       .v = TensorView::from(t.v, "v"),
                       .g = TensorView::from(t.g, "g"),
                       .beta = TensorView::from(t.beta, "beta"),
                       .A_log = TensorView::from(t.A_log, "A_log"),
                       .dt_bias = TensorView::from(t.dt_bias, "dt_bias"),
                       .initial_state = TensorView::from(t.initial_state, "initial_state"),
                       .A = TensorView::from(t.saved != nullptr ? t.saved->A : nullptr, "A")};
  const TensorView o = TensorView::from(t.o, "o");
  const TensorView final_state = TensorView::from(t.final_state, "final_state");
  const StateSlots slots(t.state_indices);
  const Checkpoints checkpoints(plan, t);
  const bool prepares = passes != Passes::kAdvance, advances = passes != Passes::kPrepare;
  if (advances) zero_padding_rows(o, plan);

  if (p.use_qk_l2norm) {
    if (t.saved != nullptr) {
      ws.q_normalized = TensorView::from(t.saved->q_normalized, "q_normalized");
      ws.q_rstd = TensorView::from(t.saved->q_rstd, "q_rstd");
      ws.k_normalized = TensorView::from(t.saved->k_normalized, "k_normalized");
      ws.k_rstd = TensorView::from(t.saved->k_rstd, "k_rstd");
    }
    if (prepares) {
      normalize_rows<T>(in.q, ws.q_normalized, ws.q_rstd, plan.num_threads());
      normalize_rows<T>(in.k, ws.k_normalized, ws.k_rstd, plan.num_threads());
    }
    in.q = ws.q_normalized;
    in.k = ws.k_normalized;
  }

  const int64_t group = p.value_heads / p.heads;
  for (const Batch& batch : ws.batches) {
    const auto A_of = [&](int64_t chunk, int64_t head) {
      return in.A ? rows_of(in.A, p, plan.chunks()[chunk].begin, head) : slot_matrix(ws.A, plan, batch, chunk, head);
    };
    parallel_for(prepares ? batch.num_slots() : 0, plan.num_threads(), [&](int64_t slot, int worker) {
      Arena scratch(ws.scratch_of(worker));
      PrepareScratch<Policy> s(scratch, p);
      const auto [index, head] = chunk_head_of_slot(plan, batch.first_slot + slot);
      const ChunkRange& chunk = plan.chunks()[index];
      load_keys<Policy>(in.k, p, chunk, head, s);
      for (int64_t value_head = head * group; value_head < (head + 1) * group; ++value_head) {
        load_gate(in, p, chunk, value_head, s.gate);
        load_beta(rows_of(in.beta, p, chunk.begin, value_head), p, chunk.length, s.beta);
        make_L(s.gate, s.beta, s.KK, chunk.length, s.L);
        invert_unit_lower(s.L, chunk.length, s.A);
        store_chunk_square(s.A, p, chunk, A_of(index, value_head));
      }
    });

    const int64_t first_unit = batch.first_pair * group * plan.value_blocks();
    const int64_t end_unit = batch.end_pair * group * plan.value_blocks();
    parallel_for(advances ? end_unit - first_unit : 0, plan.num_threads(), [&](int64_t unit, int worker) {
      Arena scratch(ws.scratch_of(worker));
      SequenceScratch<Policy> s(scratch, p, plan.value_block());
      const SequenceBlock block(plan, first_unit + unit);
      const int64_t slot = slots.of(block.sequence);
      load_state(in.initial_state, slot, p, block, s.S);
      for_each_chunk(plan, block.sequence, [&](const ChunkRange& chunk, int64_t index) {
        load_sequence_chunk(in, A_of(index, block.head), p, chunk, block, s);
        make_residual<Policy>(s.worker, s.gate, s.beta, s.K, s.A, s.S, chunk.length, p.key_dim, block.columns, s.V,
                              s.V_new);
        make_P<Policy>(s.worker, s.gate, s.Q, s.K_transposed, chunk.length, p.key_dim, T(plan.scale()), s.P);
        make_output<Policy>(s.worker, s.gate, T(plan.scale()), s.Q, s.S, s.P, s.V_new, chunk.length, p.key_dim,
                            block.columns, s.V);
        store_tile(s.V, chunk.length, block.columns,
                   rows_of(o, p, chunk.begin, block.head).columns_from(block.first_column));
        advance_state<Policy>(s.worker, s.gate, s.K, s.V_new, chunk.length, p.key_dim, block.columns, s.S);
        store_state(checkpoints.states(), checkpoints.row(block.sequence, chunk.index * p.chunk_size + chunk.length), p,
                    block, s.S);
      });
      store_state(final_state, slot, p, block, s.S);
    });
  }
}

}  // namespace

size_t forward_workspace_bytes(const Plan& plan, bool saves_for_backward) {
  Arena arena;
  with_policy(plan.problem(),
              [&](auto policy) { ForwardWorkspace<decltype(policy)>(arena, plan, saves_for_backward); });
  return arena.used();
}

void forward(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_forward<decltype(policy)>(plan, t, workspace, Passes::kBoth); });
}

size_t cp_prepare_workspace_bytes(const Plan& plan) { return forward_workspace_bytes(plan, true); }

void cp_prepare(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream) {
  with_policy(plan.problem(),
              [&](auto policy) { run_forward<decltype(policy)>(plan, t, workspace, Passes::kPrepare); });
}

size_t cp_advance_workspace_bytes(const Plan& plan) { return forward_workspace_bytes(plan, true); }

void cp_advance(const Plan& plan, const ForwardTensors& t, Workspace workspace, Stream) {
  with_policy(plan.problem(),
              [&](auto policy) { run_forward<decltype(policy)>(plan, t, workspace, Passes::kAdvance); });
}

}  // namespace cula::gdn::cpu::CULA_ISA
