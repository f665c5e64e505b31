// What the kernels of a chunk's gradients share.
#pragma once

#include "gdn/cuda/collective/gate.cuh"

namespace cula::gdn::cuda {

// Row sums by [.., HV, B T]; `state` by [.., slot, HV]. key_blocks parts of each but the first two.
struct GradientSums {
  float* scores;         // gate: row sums minus column sums
  float* beta;           // beta, but for what goes through the state
  float* decay;          // gate, through the decay of a row: scale decay <q, dO S^T> - beta decay <k, dW S^T>
  float* to_end;         // gate, through to_end: to_end <k, V' D^T>
  float* state;          // <S, D>
  float* beta_state;     // beta, through the state: decay <k, dW S^T>
  int64_t stride;        // HV B T
  int64_t head_stride;   // B T
  int64_t state_stride;  // slots HV
};

struct GradientArgs {
  SequenceTable sequences;
  int64_t heads;
  int64_t group;
  int key_dim;
  int value_dim;
  int padded_key_dim;  // of the blocks of the states
  int64_t key_blocks;
  float scale;
  TensorArg q;
  TensorArg k;
  TensorArg v;
  TensorArg grad_output;
  TensorArg residual;  // V'
  TensorArg dW;
  GateArgs gates;
  const float* factors;  // [6][HV][B T]: see PrepareArgs
  const void* S;         // [slot][HV] blocks
  const void* D;
  int64_t state_elements;
  TensorArg dP;  // [B, T, HV, C]: scale (dO V'^T) between, on and below the diagonal
  TensorArg M;   // [B, T, HV, C]: -beta (dW V'^T) between, below the diagonal
  GradientSums sums;
  TensorArg dq;
  TensorArg dk;
  TensorArg dg;  // by the log decay
  TensorArg dbeta;
};

}  // namespace cula::gdn::cuda
