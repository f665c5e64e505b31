// Gated DeltaNet (GDN): the public C++ interface.
//
//   Problem  what is computed: sizes, sequence lengths, flags. No pointers.
//   Plan     how it is computed: backend, chunk table, schedule, workspace. A pure function of a Problem.
//   forward, backward, recurrent_forward   run a Plan on DLPack tensors, a stream and a workspace of the caller's.
//
// Per value head, with a K x V state S, natural-log gate g, delta-rule strength beta and unit-scale output:
//
//   S   <- exp(g_t) S                          decay
//   r_t  = beta_t (v_t - S^T k_t)              what the decayed state does not yet say about k_t
//   S   <- S + k_t r_t^T
//   o_t  = scale S^T q_t
//
// (Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024; computed here in chunks of chunk_size tokens.)
//
// Every function throws cula::Error before it writes anything if an argument does not fit; the message names the
// argument, what was expected and what came. Shapes: B batch, T tokens, H query/key heads, HV value heads (a multiple
// of H; value head j reads query/key head j / (HV / H)), K key dim, V value dim, N sequences, C chunk size.
// Tensors may have any strides unless a comment says otherwise. "float type" is float64, float32, bfloat16 or float16.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/host/error.h"

namespace cula::gdn {

inline constexpr int64_t kMaxKeyDim = 256;
inline constexpr double kL2NormEpsilon = 1e-6;  // inside the root

enum class Backend { kAuto, kCpu, kCuda, kSm90 };
const char* backend_name(Backend backend);
Backend backend_from_name(const std::string& name);  // "auto", "cpu", "cuda", "sm90"
std::vector<Backend> compiled_backends();            // what this build has, whether or not a GPU is here

struct Problem {
  int64_t batch = 1;        // B
  int64_t tokens = 0;       // T, tokens in a row of the batch
  int64_t heads = 1;        // H
  int64_t value_heads = 1;  // HV
  int64_t key_dim = 0;      // K, at most kMaxKeyDim
  int64_t value_dim = 0;    // V
  // Packed sequences: N + 1 ascending offsets that start at 0 and end at or before `tokens`; batch must be 1, empty
  // sequences are allowed, tokens past the last offset are padding (outputs and gradients there are zero).
  // Absent: B sequences of T tokens.
  std::optional<std::vector<int64_t>> sequence_offsets = {};

  DLDataType dtype = {kDLFloat, 32, 1};  // of q, k, v, o; also of A and the other stored operands
  int64_t chunk_size = 64;               // C: 16, 32 or 64
  std::optional<double> scale = {};      // of the output; absent: K^-0.5

  bool use_qk_l2norm = false;     // q and k are divided by sqrt(sum of squares + kL2NormEpsilon) first
  bool use_gate = false;          // g is raw: the log decay is -exp(A_log) softplus(g + dt_bias)
  bool use_beta_sigmoid = false;  // beta is a logit
  bool allow_neg_eigval = false;  // beta = 2 sigmoid(logit); needs use_beta_sigmoid
  bool state_v_first = false;     // states are [.., V, K] instead of [.., K, V]

  // The bits of a sequence's results do not depend on the other sequences of the batch: whatever changes the order of
  // roundings follows from HV, K, V, dtype and C alone. Not so dA_log and ddt_bias, which are sums over all sequences.
  // On GPUs it costs time, and memory in the sm90 backward; the cpu backend's schedule has the property anyway. Context
  // parallelism refuses it: its cuts follow from the whole stream. Decoding has it without being asked.
  bool batch_invariant = false;

  Backend backend = Backend::kAuto;
  DLDevice device = {kDLCPU, 0};
  int num_threads = 0;  // of the CPU backend; 0: all that the machine has. Never changes a bit of the result.

  int64_t num_sequences() const;  // N
};

// One chunk: rows [begin, begin + length) of the flattened token axis (b * T + t).
struct ChunkRange {
  int64_t sequence;  // n
  int64_t index;     // position of the chunk inside its sequence
  int64_t begin;
  int64_t length;  // 1 .. C
};

// One sequence: rows [begin, begin + length) of the flattened token axis, chunks [first_chunk, first_chunk + chunks).
struct SequenceRange {
  int64_t begin;
  int64_t length;
  int64_t first_chunk;
  int64_t num_chunks;
};

struct ForwardTensors;
struct BackwardTensors;
struct ScheduleOptions;  // these two in schedules.h, for tests and backends
class Schedules;

class Plan {
 public:
  // Checks the problem and decides how it runs. Throws cula::Error.
  static Plan make(const Problem& problem);
  static Plan make(const Problem& problem, const ScheduleOptions& options);

  const Problem& problem() const { return problem_; }
  Backend backend() const { return backend_; }
  double scale() const { return scale_; }
  const std::vector<SequenceRange>& sequences() const { return sequences_; }
  int64_t num_chunks() const { return num_chunks_; }
  const std::vector<ChunkRange>& chunks() const;  // num_chunks() of them, listed when they are first asked for
  int num_threads() const { return num_threads_; }
  int64_t value_block() const { return value_block_; }  // columns of the state that one unit of work advances
  int64_t value_blocks() const { return (problem_.value_dim + value_block_ - 1) / value_block_; }
  // Units of the passes over the chunks in order: (sequence, value head, block of state columns).
  int64_t sequential_units() const {
    return static_cast<int64_t>(sequences_.size()) * problem_.value_heads * value_blocks();
  }

  // How the backends run it, chosen once, by whoever asks first.
  const Schedules& schedules() const { return *schedules_; }

  // Bytes of workspace, exactly what forward and backward use where the tensors are laid out as the backend takes them
  // and, of backward, all gradients are wanted. Alignment: 64 bytes.
  // `saves_for_backward`: whether SavedTensors will be passed.
  size_t forward_workspace_bytes(bool saves_for_backward) const;
  size_t backward_workspace_bytes() const;
  // For these tensors: more, if the backend can not take them as they lie and gives them to another (describe says), or
  // if it lays down there what would be an output that is not wanted.
  size_t forward_workspace_bytes(const ForwardTensors& tensors) const;
  size_t backward_workspace_bytes(const BackwardTensors& tensors) const;

  // What was decided and why, for people.
  std::string describe() const;

 private:
  Plan() = default;
  Problem problem_;
  Backend backend_ = Backend::kCpu;
  double scale_ = 1.0;
  std::vector<SequenceRange> sequences_;
  int64_t num_chunks_ = 0;
  int num_threads_ = 1;
  int64_t value_block_ = 0;
  std::shared_ptr<const Schedules> schedules_;
};

// What forward keeps for backward, beyond its own inputs. x is Problem::dtype; statistics are float32 (float64 for
// float64 problems). The four normalisation tensors exist exactly when use_qk_l2norm is set; backward then reads
// q_normalized and k_normalized instead of q and k.
struct SavedTensors {
  DLTensor* q_normalized = nullptr;  // [B, T, H, K] x
  DLTensor* q_rstd = nullptr;        // [B, T, H]
  DLTensor* k_normalized = nullptr;  // [B, T, H, K] x
  DLTensor* k_rstd = nullptr;        // [B, T, H]
  DLTensor* A = nullptr;             // [B, T, HV, C] x, (I + L)^-1 by rows
};

struct ForwardTensors {
  const DLTensor* q = nullptr;              // [B, T, H, K] x
  const DLTensor* k = nullptr;              // [B, T, H, K] x
  const DLTensor* v = nullptr;              // [B, T, HV, V] x
  const DLTensor* g = nullptr;              // [B, T, HV] float type; natural-log decay, -inf resets the state
  const DLTensor* beta = nullptr;           // [B, T, HV] float type
  const DLTensor* A_log = nullptr;          // HV elements, float type; with use_gate
  const DLTensor* dt_bias = nullptr;        // HV elements, float type; optional, with use_gate
  const DLTensor* initial_state = nullptr;  // [N, HV, K, V] float type; optional, zeros if absent
  DLTensor* o = nullptr;                    // [B, T, HV, V] x
  DLTensor* final_state = nullptr;          // [N, HV, K, V] float type, rounded once; optional
  const SavedTensors* saved = nullptr;      // absent: inference
  // Packed sequences on a GPU: [N + 1] int32 or int64 on the device, the values of Problem::sequence_offsets. Kernels
  // read their bounds from it, so that a captured graph follows new values with the same totals. Unused on the CPU.
  const DLTensor* cu_seqlens = nullptr;

  // For serving, where `saved` is absent. On a GPU kernels read these indices, so that a captured graph follows them.
  //
  // State pools: initial_state and final_state are [slots, HV, K, V], and sequence n has slot state_indices[n] of each.
  // A sequence with slot -1 starts from zeros and leaves no state. Slots that are written must be distinct. On the CPU
  // both this and -1 <= slot < slots are checked; on a GPU, where no value is read by the host, a slot outside the pool
  // counts as -1, and of sequences that share a slot it is undefined whose state, or whose parts, the slot holds after.
  const DLTensor* state_indices = nullptr;  // [N] int32 or int64
  // Checkpoints: the state behind every so many tokens of a sequence (a multiple of chunk_size in forward), one row
  // each; floor(length / checkpoint_every_n_tokens) of sequence n from row checkpoint_cu_starts[n] on, without that
  // tensor those of all sequences one behind the other. Rows past checkpoint_cu_starts[n + 1] or past the end of
  // state_checkpoints are not written.
  DLTensor* state_checkpoints = nullptr;           // [rows, HV, K, V] float32 (float64 for float64 problems)
  const DLTensor* checkpoint_cu_starts = nullptr;  // [N + 1] int32 or int64; optional
  int64_t checkpoint_every_n_tokens = 0;           // with state_checkpoints
};

struct BackwardTensors {
  const DLTensor* q = nullptr;  // as in forward; may be absent with use_qk_l2norm
  const DLTensor* k = nullptr;
  const DLTensor* v = nullptr;
  const DLTensor* g = nullptr;
  const DLTensor* beta = nullptr;
  const DLTensor* A_log = nullptr;
  const DLTensor* dt_bias = nullptr;
  const DLTensor* initial_state = nullptr;
  const SavedTensors* saved = nullptr;         // required
  const DLTensor* grad_output = nullptr;       // do [B, T, HV, V] float type
  const DLTensor* grad_final_state = nullptr;  // dht [N, HV, K, V] float type; optional, zeros if absent
  // Results. A missing pointer means that this gradient is not wanted. Each may be of any float type and is rounded
  // once, from the accumulator, when it is stored. None may share memory with an input, which is still read when a
  // result is written.
  DLTensor* dq = nullptr;                // like q
  DLTensor* dk = nullptr;                // like k
  DLTensor* dv = nullptr;                // like v
  DLTensor* dg = nullptr;                // like g
  DLTensor* dbeta = nullptr;             // like beta
  DLTensor* dA_log = nullptr;            // like A_log
  DLTensor* ddt_bias = nullptr;          // like dt_bias
  DLTensor* dh0 = nullptr;               // like initial_state
  const DLTensor* cu_seqlens = nullptr;  // as in forward
};

// A CUDA stream (cudaStream_t); unused by the CPU backend.
using Stream = void*;

struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// Outputs share no memory with inputs or with each other, but final_state may be initial_state (the same address, sizes
// and strides) where nothing is saved: update in place.
void forward(const Plan& plan, const ForwardTensors& tensors, Workspace workspace, Stream stream = nullptr);
void backward(const Plan& plan, const BackwardTensors& tensors, Workspace workspace, Stream stream = nullptr);

// The token recurrence itself, for decoding: same arguments as forward (`saved` must be absent), no workspace, and for
// 16-bit inputs with a float32 state and no rounding in between.
void recurrent_forward(const Plan& plan, const ForwardTensors& tensors, Stream stream = nullptr);

}  // namespace cula::gdn
