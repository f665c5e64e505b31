// Context parallelism: the state map of whole sequences and its adjoint, and the state that several of them make.
//
// M obeys the state recurrence itself with V = 0 and S_in = I, and dM the adjoint one with dO = 0 and D_out = I. So
// [S_ext | M] is one K x (V + K) state, of which a unit of work advances some columns as in forward and backward.
#include "gdn/cpu/kernels/kernels.h"
#include "gdn/cpu/kernels/sequence_pass.h"

namespace cula::gdn::cpu::CULA_ISA {

namespace {

// Unit of work: some columns of S_ext or of M of one value head of one summary.
struct SummaryBlock : SequenceBlock {
  int64_t entry;       // of the summary tensor
  bool is_transition;  // columns of M, counted from its own first one

  SummaryBlock(const Plan& plan, const std::vector<int64_t>& sequences, int64_t unit) {
    const Problem& p = plan.problem();
    const int64_t block = unit % blocks(plan);
    is_transition = block >= plan.value_blocks();
    const int64_t all_columns = is_transition ? p.key_dim : p.value_dim;
    first_column = (is_transition ? block - plan.value_blocks() : block) * plan.value_block();
    columns = std::min(plan.value_block(), all_columns - first_column);
    head = unit / blocks(plan) % p.value_heads;
    entry = unit / blocks(plan) / p.value_heads;
    sequence = sequences[static_cast<size_t>(entry)];
  }

  static int64_t transition_blocks(const Plan& plan) {
    return (plan.problem().key_dim + plan.value_block() - 1) / plan.value_block();
  }
  static int64_t blocks(const Plan& plan) { return plan.value_blocks() + transition_blocks(plan); }
};

// A [K, columns] matrix of a [P, HV, K, columns] tensor.
MatrixView matrix_of(const TensorView& x, int64_t entry, int64_t head) {
  return {element(x, entry * x.stride[0] + head * x.stride[1]), x.dtype, x.stride[2], x.stride[3]};
}

// The columns of a summary that a unit makes.
MatrixView columns_of(const TensorView& summary, const Problem& p, const SummaryBlock& block) {
  return matrix_of(summary, block.entry, block.head)
      .columns_from((block.is_transition ? p.value_dim : 0) + block.first_column);
}

// What a unit starts from: its columns of the identity, of the given state, or zero.
template <class T>
void load_start(const TensorView& given, const Problem& p, const SummaryBlock& block, Tile<T> S) {
  if (!block.is_transition) return load_state(given, block.entry, p, block, S);
  fill_zero(S, p.key_dim, block.columns);
  for (int64_t j = 0; j < block.columns; ++j) S.row(block.first_column + j)[j] = T(1);
}

template <class Policy>
void run_summarize(const Plan& plan, const cp::Summary& t, Workspace workspace) {
  const Problem& p = plan.problem();
  Arena arena(workspace.data);
  Arena count;
  SequenceScratch<Policy>(count, p, plan.value_block());
  const ThreadScratch thread_scratch(arena, count.used(), plan.num_threads());
  const SequenceInputs in = {.q = TensorView(),
                             .k = TensorView::from(p.use_qk_l2norm ? t.saved->k_normalized : t.k, "k"),
                             .v = TensorView::from(t.v, "v"),
                             .g = TensorView::from(t.g, "g"),
                             .beta = TensorView::from(t.beta, "beta"),
                             .A_log = TensorView::from(t.A_log, "A_log"),
                             .dt_bias = TensorView::from(t.dt_bias, "dt_bias"),
                             .initial_state = TensorView::from(t.initial_state, "initial_state"),
                             .A = TensorView::from(t.saved->A, "A")};
  const TensorView summary = TensorView::from(t.summary, "summary");
  const auto entries = static_cast<int64_t>(t.sequences.size());
  const int64_t units = entries * p.value_heads * SummaryBlock::blocks(plan);
  // M's own operands are not rounded: what one chunk loses of it, every later one multiplies.
  const auto run = [&](auto policy, const SummaryBlock& block, int worker) {
    using P = decltype(policy);
    Arena scratch(thread_scratch.of(worker));
    SequenceScratch<P> s(scratch, p, plan.value_block());
    SequenceInputs inputs = in;
    if (block.is_transition) inputs.v = TensorView();
    load_start(in.initial_state, p, block, s.S);
    for_each_chunk(plan, block.sequence, [&](const ChunkRange& chunk, int64_t) {
      load_sequence_chunk(inputs, rows_of(in.A, p, chunk.begin, block.head), p, chunk, block, s);
      make_residual<P>(s.worker, s.gate, s.beta, s.K, s.A, s.S, chunk.length, p.key_dim, block.columns, s.V, s.V_new);
      advance_state<P>(s.worker, s.gate, s.K, s.V_new, chunk.length, p.key_dim, block.columns, s.S);
    });
    store_tile(s.S, p.key_dim, block.columns, columns_of(summary, p, block));
  };
  parallel_for(units, plan.num_threads(), [&](int64_t unit, int worker) {
    const SummaryBlock block(plan, t.sequences, unit);
    block.is_transition ? run(Unrounded<Policy>(), block, worker) : run(Policy(), block, worker);
  });
}

template <class Policy>
void run_summarize_adjoint(const Plan& plan, const cp::AdjointSummary& t, Workspace workspace) {
  using T = typename Policy::Scalar;
  const Problem& p = plan.problem();
  Arena arena(workspace.data);
  Arena count;
  AdjointScratch<Policy>(count, p, plan.value_block());
  const ThreadScratch thread_scratch(arena, count.used(), plan.num_threads());
  const SequenceInputs in = {.q = TensorView::from(p.use_qk_l2norm ? t.saved->q_normalized : t.q, "q"),
                             .k = TensorView::from(p.use_qk_l2norm ? t.saved->k_normalized : t.k, "k"),
                             .v = TensorView::from(t.grad_output, "do"),  // takes the place of V
                             .g = TensorView::from(t.g, "g"),
                             .beta = TensorView::from(t.beta, "beta"),
                             .A_log = TensorView::from(t.A_log, "A_log"),
                             .dt_bias = TensorView::from(t.dt_bias, "dt_bias"),
                             .initial_state = TensorView(),
                             .A = TensorView::from(t.saved->A, "A")};
  const TensorView final_gradient = TensorView::from(t.grad_final_state, "dht");
  const TensorView transition = TensorView::from(t.transition, "transition");
  const TensorView summary = TensorView::from(t.summary, "summary");
  const auto entries = static_cast<int64_t>(t.sequences.size());
  const int64_t units = entries * p.value_heads * SummaryBlock::blocks(plan);
  const auto run = [&](auto policy, const SummaryBlock& block, int worker) {
    using P = decltype(policy);
    Arena scratch(thread_scratch.of(worker));
    AdjointScratch<P> s(scratch, p, plan.value_block());
    if (block.is_transition && transition) {
      load_tile(matrix_of(transition, block.entry, block.head).transposed().columns_from(block.first_column), p.key_dim,
                block.columns, s.S);
      return store_tile(s.S, p.key_dim, block.columns, columns_of(summary, p, block));
    }
    SequenceInputs inputs = in;
    if (block.is_transition) inputs.q = inputs.v = TensorView();
    load_start(final_gradient, p, block, s.S);
    for_each_chunk(
        plan, block.sequence,
        [&](const ChunkRange& chunk, int64_t) {
          load_sequence_chunk(inputs, rows_of(in.A, p, chunk.begin, block.head), p, chunk, block, s);
          retreat_chunk<P>(p, chunk.length, block.columns, T(plan.scale()), !block.is_transition, s, [](Tile<T>) {});
        },
        /*reverse=*/true);
    store_tile(s.S, p.key_dim, block.columns, columns_of(summary, p, block));
  };
  parallel_for(units, plan.num_threads(), [&](int64_t unit, int worker) {
    const SummaryBlock block(plan, t.sequences, unit);
    block.is_transition ? run(Unrounded<Policy>(), block, worker) : run(Policy(), block, worker);
  });
}

// Scratch of one thread in a merge.
template <class T>
struct MergeScratch {
  Tile<T> M, S, next;

  MergeScratch(Arena& arena, const Plan& plan)
      : M(take_tile<T>(arena, plan.problem().key_dim, plan.problem().key_dim)),
        S(take_tile<T>(arena, plan.problem().key_dim, plan.value_block())),
        next(take_tile<T>(arena, plan.problem().key_dim, plan.value_block())) {}
};

template <class Policy>
void run_merge(const Plan& plan, const cp::Merge& t, Workspace workspace) {
  using T = typename Policy::Scalar;
  using Exact = Unrounded<Policy>;
  const Problem& p = plan.problem();
  Arena arena(workspace.data);
  Arena count;
  MergeScratch<T>(count, plan);
  const ThreadScratch thread_scratch(arena, count.used(), plan.num_threads());
  const TensorView summaries = TensorView::from(t.summaries, "summaries");
  const TensorView state = TensorView::from(t.state, "state");
  parallel_for(p.value_heads * plan.value_blocks(), plan.num_threads(), [&](int64_t unit, int worker) {
    Arena scratch(thread_scratch.of(worker));
    MergeScratch<T> s(scratch, plan);
    Arena no_pairs;
    const Worker<Exact> exact(no_pairs, 0, 0, 0);
    const int64_t head = unit / plan.value_blocks(), first = unit % plan.value_blocks() * plan.value_block();
    const int64_t columns = std::min(plan.value_block(), p.value_dim - first);
    fill_zero(s.S, p.key_dim, columns);
    for (size_t i = 0; i < t.order.size(); ++i) {
      const MatrixView entry = matrix_of(summaries, t.order[i], head);
      load_tile(entry.columns_from(first), p.key_dim, columns, s.next);
      if (i != 0) {  // there is no state yet: M may be anything, as 0 times infinity would show
        load_tile(entry.columns_from(p.value_dim), p.key_dim, p.key_dim, s.M);
        multiply<Exact>(exact, {p.key_dim, columns, p.key_dim}, plain(s.M), s.S, s.next, {.accumulate = true});
      }
      std::swap(s.S, s.next);
    }
    store_tile(s.S, p.key_dim, columns, state_at(state, p, 0, head).columns_from(first));
  });
}

// Bytes of one thread's scratch for every thread.
template <class Make>
size_t scratch_bytes(const Plan& plan, Make&& make) {
  Arena arena, one;
  with_policy(plan.problem(), [&](auto policy) { make(policy, one); });
  ThreadScratch(arena, one.used(), plan.num_threads());
  return arena.used();
}

}  // namespace

size_t cp_summarize_workspace_bytes(const Plan& plan) {
  return scratch_bytes(plan, [&](auto policy, Arena& arena) {
    SequenceScratch<decltype(policy)>(arena, plan.problem(), plan.value_block());
  });
}

void cp_summarize(const Plan& plan, const cp::Summary& t, Workspace workspace, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_summarize<decltype(policy)>(plan, t, workspace); });
}

size_t cp_summarize_adjoint_workspace_bytes(const Plan& plan) {
  return scratch_bytes(plan, [&](auto policy, Arena& arena) {
    AdjointScratch<decltype(policy)>(arena, plan.problem(), plan.value_block());
  });
}

void cp_summarize_adjoint(const Plan& plan, const cp::AdjointSummary& t, Workspace workspace, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_summarize_adjoint<decltype(policy)>(plan, t, workspace); });
}

size_t cp_merge_workspace_bytes(const Plan& plan) {
  return scratch_bytes(
      plan, [&](auto policy, Arena& arena) { MergeScratch<typename decltype(policy)::Scalar>(arena, plan); });
}

void cp_merge(const Plan& plan, const cp::Merge& t, Workspace workspace, Stream) {
  with_policy(plan.problem(), [&](auto policy) { run_merge<decltype(policy)>(plan, t, workspace); });
}

}  // namespace cula::gdn::cpu::CULA_ISA
