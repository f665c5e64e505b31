// The token recurrence, for decoding: a unit is a block of state columns of one value head in one sequence.
#include "common/host/thread_pool.h"
#include "gdn/cpu/kernels/kernels.h"
#include "gdn/cpu/kernels/operands.h"
#include "gdn/state_pools.h"

namespace cula::gdn::cpu::CULA_ISA {

namespace {

// Columns of a unit. The state of a unit lives on its thread's stack.
inline constexpr int64_t kBlock = 64;

template <class T>
struct TokenTensors {
  TensorView q, k, v, g, beta, A_log, dt_bias, initial_state, o, final_state;
  const StateSlots& slots;
  const Checkpoints& checkpoints;
};

// Loads a row and divides it by its norm if asked to.
template <class T>
void load_key(const TensorView& x, const Problem& p, int64_t token, int64_t head, T* row) {
  load_tile(rows_of(x, p, token, head), 1, p.key_dim, Tile<T>{row, kMaxKeyDim});
  if (!p.use_qk_l2norm) return;
  scale_row(T(1.0 / std::sqrt(squared_norm(row, p.key_dim) + kL2NormEpsilon)), padded(p.key_dim), row);
}

template <class T>
void run_unit(const Plan& plan, const TokenTensors<T>& t, int64_t sequence, int64_t head, int64_t first) {
  const Problem& p = plan.problem();
  const SequenceRange& range = plan.sequences()[sequence];
  const int64_t columns = std::min(kBlock, p.value_dim - first), width = padded(columns);
  const int64_t key_head = head / (p.value_heads / p.heads);
  alignas(64) T state[kMaxKeyDim * kBlock], q[kMaxKeyDim], k[kMaxKeyDim], v[kBlock], update[kBlock], o[kBlock];
  const Tile<T> S = {state, kBlock};
  GateParameters gate;
  if (p.use_gate) gate = gate_parameters(t.A_log, t.dt_bias, head);

  const int64_t slot = t.slots.of(sequence);
  const auto store = [&](const TensorView& states, int64_t entry) {
    if (states && entry >= 0) store_tile(S, p.key_dim, columns, state_of(states, p, entry, head).columns_from(first));
  };
  if (t.initial_state && slot >= 0) {
    load_tile(state_of(t.initial_state, p, slot, head).columns_from(first), p.key_dim, columns, S);
  } else {
    fill_zero(S, p.key_dim, columns);
  }
  for (int64_t token = range.begin; token < range.begin + range.length; ++token) {
    load_key(t.q, p, token, key_head, q);
    load_key(t.k, p, token, key_head, k);
    load_tile(rows_of(t.v, p, token, head).columns_from(first), 1, columns, Tile<T>{v, kBlock});
    double log_decay;
    T beta;
    load_log_gates(rows_of(t.g, p, token, head), p.use_gate ? &gate : nullptr, 1, &log_decay);
    load_beta(rows_of(t.beta, p, token, head), p, 1, &beta);
    const T decay = T(std::exp(log_decay)), scale = T(plan.scale());

    for (int64_t j = 0; j < width; ++j) update[j] = o[j] = T(0);
    for (int64_t i = 0; i < p.key_dim; ++i) {
      scale_row(decay, width, S.row(i));
      add_row(k[i], S.row(i), width, update);
    }
    for (int64_t j = 0; j < width; ++j) update[j] = beta * (v[j] - update[j]);
    for (int64_t i = 0; i < p.key_dim; ++i) {
      add_row(k[i], update, width, S.row(i));
      add_row(scale * q[i], S.row(i), width, o);
    }
    store_tile(Tile<T>{o, kBlock}, 1, columns, rows_of(t.o, p, token, head).columns_from(first));
    store(t.checkpoints.states(), t.checkpoints.row(sequence, token + 1 - range.begin));
  }
  store(t.final_state, slot);
}

template <class T>
void run_recurrent(const Plan& plan, const ForwardTensors& tensors) {
  const Problem& p = plan.problem();
  const StateSlots slots(tensors.state_indices);
  const Checkpoints checkpoints(plan, tensors);
  const TokenTensors<T> t = {.q = TensorView::from(tensors.q, "q"),
                             .k = TensorView::from(tensors.k, "k"),
                             .v = TensorView::from(tensors.v, "v"),
                             .g = TensorView::from(tensors.g, "g"),
                             .beta = TensorView::from(tensors.beta, "beta"),
                             .A_log = TensorView::from(tensors.A_log, "A_log"),
                             .dt_bias = TensorView::from(tensors.dt_bias, "dt_bias"),
                             .initial_state = TensorView::from(tensors.initial_state, "initial_state"),
                             .o = TensorView::from(tensors.o, "o"),
                             .final_state = TensorView::from(tensors.final_state, "final_state"),
                             .slots = slots,
                             .checkpoints = checkpoints};
  zero_padding_rows(t.o, plan);
  const int64_t blocks = (p.value_dim + kBlock - 1) / kBlock;
  const auto num_sequences = static_cast<int64_t>(plan.sequences().size());
  parallel_for(num_sequences * p.value_heads * blocks, plan.num_threads(), [&](int64_t unit, int) {
    run_unit(plan, t, unit / blocks / p.value_heads, unit / blocks % p.value_heads, unit % blocks * kBlock);
  });
}

}  // namespace

void recurrent_forward(const Plan& plan, const ForwardTensors& t, Stream) {
  if (from_dlpack(plan.problem().dtype, "dtype") == DType::kFloat64) return run_recurrent<double>(plan, t);
  run_recurrent<float>(plan, t);
}

}  // namespace cula::gdn::cpu::CULA_ISA
