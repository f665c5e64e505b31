// Chunk-parallel preparation: A = (I + L)^-1 for every chunk and value head.
#pragma once

#include "common/host/thread_pool.h"
#include "gdn/cpu/kernels/collectives.h"
#include "gdn/cpu/kernels/operands.h"

namespace cula::gdn::cpu::CULA_ISA {

// Columns of V that a chunk-parallel pass takes at a time.
inline int64_t chunk_value_block(const Problem& p) { return std::min<int64_t>(128, padded(p.value_dim)); }

// Scratch of one thread.
template <class Policy>
struct PrepareScratch {
  using T = typename Policy::Scalar;
  Worker<Policy> worker;
  ChunkGate<T> gate;
  Tile<T> K, K_transposed, KK, L, A;
  T* beta;

  PrepareScratch(Arena& arena, const Problem& p, int64_t value_block = 0)
      : worker(arena, p.chunk_size, p.key_dim, value_block),
        gate(arena, p.chunk_size),
        K(take_tile<T>(arena, p.chunk_size, p.key_dim)),
        K_transposed(take_tile<T>(arena, p.key_dim, p.chunk_size)),
        KK(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        L(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        A(take_tile<T>(arena, p.chunk_size, p.chunk_size)),
        beta(arena.take<T>(p.chunk_size)) {}
};

// Loads K and K^T of a chunk and makes the lower part of K K^T.
template <class Policy, class Scratch>
void load_keys(const TensorView& k, const Problem& problem, const ChunkRange& chunk, int64_t head, Scratch& s) {
  load_tile(rows_of(k, problem, chunk.begin, head), chunk.length, problem.key_dim, s.K);
  transpose(s.K, chunk.length, problem.key_dim, s.K_transposed);
  multiply<Policy>(s.worker, {chunk.length, chunk.length, problem.key_dim}, plain(s.K), s.K_transposed, s.KK,
                   {.triangle = Triangle::kLowerC});
}

// What the rows of A hold past the chunk: columns up to C are zero.
template <class T>
void store_chunk_square(Tile<T> from, const Problem& problem, const ChunkRange& chunk, const MatrixView& to) {
  // Columns past padded(length) are not part of the square; they are cleared so that whole rows can be stored.
  for (int64_t i = 0; i < chunk.length; ++i) {
    for (int64_t j = chunk.length; j < problem.chunk_size; ++j) from.row(i)[j] = T(0);
  }
  store_tile(from, chunk.length, problem.chunk_size, to);
}

}  // namespace cula::gdn::cpu::CULA_ISA
