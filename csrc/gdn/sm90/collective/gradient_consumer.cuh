// The two warpgroups of the gradient kernel that multiply. Warpgroup g has
//
//   of the pairs of rows    g = 0: dP = scale (dO V'^T) o E, on and below the diagonal
//                           g = 1: beta dL = -(dv V'^T) o E, below it: with dW the gradient of W, the gradient of
//                           the inverse A needs no product with A, since A^T (X W^T) A^T = (A^T X) (A W)^T = dW V'^T
//   of the 64-wide blocks of key columns    block g of dq and dk
//
// Sums over the value heads of the group stay in registers: dq, dk, and of the pairs G = sum dP, F = sum beta dL. At
// the end dq += G K and dk += G^T Q + (F + F^T) K.
#pragma once

#include "gdn/sm90/collective/gradient_pipeline.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, int kValueDim>
struct GradientConsumer {
  using Shared = GradientShared<kKeyDim, kValueDim>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kValueTiles = Shared::kValueTiles;

  const GradientArgs& args;
  typename Shared::Map shared;
  int group;  // index of the warpgroup

  __device__ __forceinline__ static int load_int(uint32_t address) {
    return static_cast<int>(load_shared_word(address));
  }
  __device__ __forceinline__ int item_length(int buffer) const {
    return load_int(shared.item(buffer) + static_cast<uint32_t>(offsetof(GradientItem, length)));
  }
  __device__ __forceinline__ GradientItem load_item(int buffer) const {
    GradientItem item;
    const uint32_t at = shared.item(buffer);
    item.key_head = load_int(at + static_cast<uint32_t>(offsetof(GradientItem, key_head)));
    item.batch = load_int(at + static_cast<uint32_t>(offsetof(GradientItem, batch)));
    item.token = load_int(at + static_cast<uint32_t>(offsetof(GradientItem, token)));
    item.length = item_length(buffer);
    item.slot = 0;  // not needed here
    return item;
  }
  // This thread's first row of an accumulator; the other one is 8 further on.
  __device__ __forceinline__ static int first_row() {
    const int thread = thread_index_anew();
    return (thread / 32 & 3) * 16 + (thread & 31) / 4;
  }
  __device__ __forceinline__ int key_tile() const { return kKeyTiles == 2 ? group : 0; }
  __device__ __forceinline__ static void sync_consumers() {
    sync_named(static_cast<int>(GradientBarrier::kConsumers), kGradientConsumers * kWarpgroupThreads);
  }
  __device__ __forceinline__ void sync_group() const {
    if (group == 0) {
      sync_named(static_cast<int>(GradientBarrier::kConsumer0), kWarpgroupThreads);
    } else {
      sync_named(static_cast<int>(GradientBarrier::kConsumer1), kWarpgroupThreads);
    }
  }

  // Zeroes the rows past the sequence's end, which hold tokens of the next one. By both warpgroups.
  __device__ __forceinline__ static void trim(uint32_t tiles, int count, int length) {
    const int pieces = (kRows - length) * 8;
#pragma unroll 1
    for (int tile = 0; tile < count; ++tile) {
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kGradientConsumers * kWarpgroupThreads) {
        clear_shared_vector(tiles + tile * kTileBytes + length * 128 + 16 * i);
      }
    }
    fence_async_shared();
    sync_consumers();
  }

  // d = a b^T over kTiles x 64 columns of both.
  template <int kTiles>
  __device__ __forceinline__ static void multiply_rows(float (&d)[32], uint32_t a, uint32_t b) {
    const uint32_t left = wgmma_operand(a);
    const uint32_t right = wgmma_operand(b);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4 * kTiles; ++k) {
      const int at = (k / 4) * kTileBytes + (k % 4) * 32;
      if (k == 0) {
        wgmma_ss_n64_first<T>(d, wgmma_descriptor(left, at), wgmma_descriptor(right, at));
      } else {
        wgmma_ss_n64<T>(d, wgmma_descriptor(left, at), wgmma_descriptor(right, at));
      }
    }
    wgmma_commit();
  }
  // d = a S', S' lying in the slots from `states` on: [V][K], a block of 64 value columns a slot.
  __device__ __forceinline__ void multiply_state(float (&d)[32], uint32_t a, RingPlace states) const {
    const uint32_t left = wgmma_operand(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      const uint32_t right = wgmma_operand(shared.slot(states.ahead(i).slot) + key_tile() * kTileBytes);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t x = wgmma_descriptor(left, i * kTileBytes + k * 32);
        if (i == 0 && k == 0) {
          wgmma_ss_n64_transposed_first<T>(d, x, wgmma_descriptor(right, k * 2048));
        } else {
          wgmma_ss_n64_transposed<T>(d, x, wgmma_descriptor(right, k * 2048));
        }
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void wait_full(RingPlace place) const {
    mbarrier_wait(shared.full_barrier(place.slot), place.phase);
  }
  __device__ __forceinline__ void release(RingPlace place, bool others_read_it = false) const {
    mbarrier_arrive_warp(shared.empty_barrier(place.slot), others_read_it ? 1 : 2);
  }
  // This thread's share of <S, D>: every other tile.
  __device__ __forceinline__ float multiply_states(RingPlace S, RingPlace D) const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      const uint32_t s_at = shared.slot(S.ahead(i).slot) + 16 * warpgroup_thread();
      const uint32_t d_at = shared.slot(D.ahead(i).slot) + 16 * warpgroup_thread();
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        if ((i * kKeyTiles + j) % kGradientConsumers != group) continue;
#pragma unroll
        for (int part = 0; part < kTileBytes / (16 * kWarpgroupThreads); ++part) {
          const int at = j * kTileBytes + part * 16 * kWarpgroupThreads;
          const uint4 x = load_shared_vector(s_at + at);
          const uint4 y = load_shared_vector(d_at + at);
          const auto add = [&](uint32_t a, uint32_t b) {
            const float2 left = unpack2<T>(a);
            const float2 right = unpack2<T>(b);
            sum += left.x * right.x;
            sum += left.y * right.y;
          };
          add(x.x, y.x);
          add(x.y, y.y);
          add(x.z, y.z);
          add(x.w, y.w);
        }
      }
    }
    return sum;
  }

  // What the pairs of rows add: `p` is dO V'^T or dv V'^T, `products` Q K^T or K K^T. `total` lacks the factor
  // coefficient().
  __device__ __forceinline__ void add_pairs(float (&total)[32], const float (&p)[32], const float (&products)[32],
                                            uint32_t factors, uint32_t sums) const {
    const int thread = thread_index_anew();
    const int lane = thread & 31;
    const int warp = thread / 32 & 3;
    const int row = warp * 16 + lane / 4;
    const int column = 2 * (lane & 3);
    const uint32_t gammas = factors + static_cast<uint32_t>(offsetof(ChunkFactors, gamma));
    const uint32_t betas = factors + static_cast<uint32_t>(offsetof(ChunkFactors, beta));
    const uint32_t firsts = factors + static_cast<uint32_t>(offsetof(ChunkFactors, first));
    float gamma[2];
    float weight[2];
    int first[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      gamma[r] = load_shared(gammas + 4 * (row + 8 * r));
      weight[r] = group == 0 ? 1.0f : row_weight<T>(load_shared(betas + 4 * (row + 8 * r)));
      first[r] = load_shared_byte(firsts + row + 8 * r);
    }
    const uint32_t sums_at = sums + static_cast<uint32_t>(offsetof(HeadSums, columns)) +
                             4 * ((4 * group + warp) * kRows + 8 * (lane / 16) + column + lane / 8 % 2);
    float strength[2] = {};
    const bool upper = (lane & 16) != 0;
    const bool odd = (lane & 8) != 0;
#pragma unroll
    for (int block = 0; block < 4; ++block) {  // of 16 columns
      float columns[2][2] = {};
      if (block <= warp) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int n = 2 * block + half;
          const int at = 8 * n + column;
          const float2 other = load_shared_pair(gammas + 4 * at);
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int r = e / 2;
            const int here = row + 8 * r;
            const int col = at + e % 2;
            const float x = p[4 * n + e] * exp2_approx(gamma[r] - (e % 2 == 0 ? other.x : other.y));
            const float kept = col >= first[r] && col <= here - group ? x : 0.0f;
            total[4 * n + e] += weight[r] * kept;
            const float of_product = col < here ? kept * products[4 * n + e] : 0.0f;
            strength[r] += of_product;
            columns[half][e % 2] += weight[r] * of_product;
          }
        }
      }
      // The sum over the warp's rows: of the four sums that a lane has a share in, it ends up with one.
      float kept[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        kept[e] = (upper ? columns[1][e] : columns[0][e]) + shuffle_xor(upper ? columns[0][e] : columns[1][e], 16);
      }
      float sum = (odd ? kept[1] : kept[0]) + shuffle_xor(odd ? kept[0] : kept[1], 8);
      sum += shuffle_xor(sum, 4);
      if ((lane & 4) == 0) {
        store_shared(sums_at + 64 * block, coefficient() * sum);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = coefficient() * strength[r];
      put_row_sum(sums, RowSum::kPairs, row + 8 * r, weight[r] * sum);
      put_row_sum(sums, RowSum::kStrength, row + 8 * r, sum);
    }
  }
  __device__ __forceinline__ float coefficient() const { return group == 0 ? args.scale : -1.0f; }
  __device__ __forceinline__ void put_row_sum(uint32_t sums, RowSum kind, int row, float share) const {
    const float sum = group_sum<4>(share);
    if ((lane_id() & 3) != 0) return;
    const int line = group * static_cast<int>(RowSum::kCount) + static_cast<int>(kind);
    store_shared(sums + 4 * (line * kRows + row), sum);
  }

  // d += sign[row] factor[row] x, and the row sums of factor x o tile, `tile` being this warpgroup's of q or k.
  __device__ __forceinline__ void add_rows(float (&d)[32], const float (&x)[32], const float (&factor)[2],
                                           const float (&sign)[2], uint32_t tile, uint32_t sums, RowSum kind) const {
    const int thread = thread_index_anew();
    const int lane = thread & 31;
    const int row = (thread / 32 & 3) * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t line = tile + (row + 8 * r) * 128 + 4 * (lane & 3);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = unpack2<T>(load_shared_word(line + ((n ^ (lane / 4)) * 16)));
        const float a = factor[r] * x[4 * n + 2 * r];
        const float b = factor[r] * x[4 * n + 2 * r + 1];
        sum += a * y.x + b * y.y;
        d[4 * n + 2 * r] += sign[r] * a;
        d[4 * n + 2 * r + 1] += sign[r] * b;
      }
      put_row_sum(sums, kind, row + 8 * r, sum);
    }
  }

  // Takes a gradient of normalised rows through the norm: dx = rstd (dy - y <y, dy>), y being this warpgroup's tile.
  // Row sums first; then, when all have theirs, the rest.
  __device__ __forceinline__ void put_norm(const float (&d)[32], uint32_t tile, int which) const {
    const int thread = thread_index_anew();
    const int lane = thread & 31;
    const int row = (thread / 32 & 3) * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t line = tile + (row + 8 * r) * 128 + 4 * (lane & 3);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = unpack2<T>(load_shared_word(line + ((n ^ (lane / 4)) * 16)));
        sum += d[4 * n + 2 * r] * y.x + d[4 * n + 2 * r + 1] * y.y;
      }
      sum = group_sum<4>(sum);
      if ((lane & 3) == 0) store_shared(shared.norms(group) + 4 * (which * kRows + row + 8 * r), sum);
    }
  }
  __device__ __forceinline__ void apply_norm(float (&d)[32], uint32_t tile, int which, const TensorArg& rstd,
                                             const GradientItem& item) const {
    const int thread = thread_index_anew();
    const int lane = thread & 31;
    const int row = (thread / 32 & 3) * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t line = tile + (row + 8 * r) * 128 + 4 * (lane & 3);
      const uint32_t at = 4 * (which * kRows + row + 8 * r);
      float sum = load_shared(shared.norms(0) + at);
      if (kKeyTiles == 2) sum += load_shared(shared.norms(1) + at);
      const bool valid = row + 8 * r < item.length;
      const float scale =
          valid ? static_cast<const float*>(rstd.data)[rstd.offset(item.batch, item.token + row + 8 * r, item.key_head)]
                : 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 y = unpack2<T>(load_shared_word(line + ((n ^ (lane / 4)) * 16)));
        d[4 * n + 2 * r] = scale * (d[4 * n + 2 * r] - y.x * sum);
        d[4 * n + 2 * r + 1] = scale * (d[4 * n + 2 * r + 1] - y.y * sum);
      }
    }
  }

  // Rounds to a tile whose rows are tokens.
  __device__ __forceinline__ static void put_tile(uint32_t tile, const float (&d)[32], float factor = 1.0f) {
    const auto pack = [&](float low, float high) { return pack2<T>(factor * low, factor * high); };
    const int thread = thread_index_anew();
    const int lane = thread & 31;
    const uint32_t row = tile + (16 * (thread / 32 & 3) + (lane & 7) + ((lane >> 3) & 1) * 8) * 128;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      stmatrix_x4(row + (((2 * j + (lane >> 4)) ^ (lane & 7)) * 16), pack(d[8 * j], d[8 * j + 1]),
                  pack(d[8 * j + 2], d[8 * j + 3]), pack(d[8 * j + 4], d[8 * j + 5]), pack(d[8 * j + 6], d[8 * j + 7]));
    }
  }
  // Rows of a chunk that has fewer than 64.
  __device__ __forceinline__ void store_tail(uint32_t tile, const TensorArg& x, const GradientItem& item) const {
    const int piece = static_cast<int>(threadIdx.x) & 7;
    T* out = static_cast<T*>(x.data) + x.offset(item.batch, item.token, item.key_head) + 64 * key_tile() + 8 * piece;
#pragma unroll 1
    for (int row = warpgroup_thread() / 8; row < item.length; row += kWarpgroupThreads / 8) {
      *reinterpret_cast<uint4*>(out + row * x.stride[1]) = load_shared_vector(tile + swizzled(row, piece));
    }
  }

  __device__ __forceinline__ void run() const {
    int heads = 0;  // so far
    // dq and dk of the item before have left its buffer of keys. All warps are past their last look at it.
    const auto release_keys = [&](int buffer) {
      if (warpgroup_thread() == 0) tma_store_wait_read();
      mbarrier_arrive_group(shared.keys_empty_barrier(buffer));
    };
#pragma unroll 1
    for (int turn = 0;; turn = turn == 2 * kKeyBuffers - 1 ? 0 : turn + 1) {  // goes round: a count makes ptxas spill
      const int buffer = turn % kKeyBuffers;
      mbarrier_wait(shared.keys_full_barrier(buffer), turn / kKeyBuffers);
      const int length = item_length(buffer);
      if (length == 0) {
        if (heads > 0) release_keys(buffer ^ 1);
        break;
      }
      const uint32_t keys = shared.keys(buffer);
      const uint32_t q_tile = keys + key_tile() * kTileBytes;
      const uint32_t k_tile = q_tile + kKeyTiles * kTileBytes;
      float products[32];  // Q K^T or K K^T
      float x[32];
      if (length < kRows) trim(keys, 2 * kKeyTiles, length);
      multiply_rows<kKeyTiles>(products, keys + group * kKeyTiles * kTileBytes, keys + kKeyTiles * kTileBytes);
      float total[32] = {};
      float dq[32] = {};
      float dk[32] = {};
      wgmma_wait<0>();
      if (heads > 0) release_keys(buffer ^ 1);

#pragma unroll 1
      for (int j = 0; j < args.group; ++j) {
        const RingPlace place = RingPlace::of_piece(heads * Shared::kPieces);
        const uint32_t sums = shared.sums(heads & 1);
        const uint32_t factors = shared.factor(heads & 1);
        const RingPlace residual = place.ahead(Shared::kResidual);
        const RingPlace dv = place.ahead(Shared::kDv);
        const RingPlace S = place.ahead(Shared::kFirstS);
        const RingPlace D = place.ahead(Shared::kFirstD);
        const auto row_factors = [&](float(&f)[2], size_t which) {
          const int row = first_row();
          f[0] = load_shared(factors + static_cast<uint32_t>(which) + 4 * row);
          f[1] = load_shared(factors + static_cast<uint32_t>(which) + 4 * row + 32);
        };
        wait_full(place);
        wait_full(dv);
        if (item_length(buffer) < kRows) {  // not kept: a register too many
          trim(shared.slot(place.slot), kValueTiles, length);
          trim(shared.slot(dv.slot), kValueTiles, length);
        }
        wait_full(residual);
        multiply_rows<kValueTiles>(x, shared.slot(group == 0 ? place.slot : dv.slot), shared.slot(residual.slot));
        wgmma_wait<0>();
        add_pairs(total, x, products, factors, sums);

        for (int i = 0; i < kValueTiles; ++i) wait_full(S.ahead(i));
        multiply_state(x, shared.slot(place.slot), S);  // dO S^T
        float factor[2];
        float sign[2] = {1.0f, 1.0f};
        row_factors(factor, offsetof(ChunkFactors, out_decay));
        wgmma_wait<0>();
        release(place);
        add_rows(dq, x, factor, sign, q_tile, sums, RowSum::kOutput);

        multiply_state(x, shared.slot(dv.slot), S);  // dv S^T
        row_factors(factor, offsetof(ChunkFactors, gamma));
        row_factors(sign, offsetof(ChunkFactors, beta));
        const int first_restart = load_int(factors + static_cast<uint32_t>(offsetof(ChunkFactors, first_restart)));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          factor[r] = first_row() + 8 * r < first_restart ? exp2_approx(factor[r]) : 0.0f;
          sign[r] = -row_weight<T>(sign[r]);
        }
        wgmma_wait<0>();
        release(dv, true);
        add_rows(dk, x, factor, sign, k_tile, sums, RowSum::kResidual);

        for (int i = 0; i < kValueTiles; ++i) wait_full(D.ahead(i));
        multiply_state(x, shared.slot(residual.slot), D);  // V' D^T
        const float states = warp_sum(multiply_states(S, D));
        if (lane_id() == 0) {
          const uint32_t at = sums + static_cast<uint32_t>(offsetof(HeadSums, states)) + 4 * (thread_index_anew() / 32);
          store_shared(at, states);
        }
        wgmma_wait<0>();
        release(residual);
        // Two at a time: with a meeting of the lanes for each, ptxas spills in fp16 with K = 64, V = 128.
        for (int i = 0; i < kValueTiles; ++i) {
          mbarrier_arrive_warp(
              {{shared.empty_barrier(S.ahead(i).slot), 2}, {shared.empty_barrier(D.ahead(i).slot), 2}});
        }
        row_factors(factor, offsetof(ChunkFactors, to_end));
        sign[0] = sign[1] = 1.0f;
        add_rows(dk, x, factor, sign, k_tile, sums, RowSum::kUpdate);

        mbarrier_arrive_warp(shared.summed_barrier(heads & 1));
        ++heads;
      }

      put_tile(shared.pair(group), total, coefficient());
      fence_async_shared();
      sync_consumers();
      const uint32_t G = wgmma_operand(shared.pair(0));
      const uint32_t F = wgmma_operand(shared.pair(1));
      const uint32_t q = wgmma_operand(q_tile);
      const uint32_t k = wgmma_operand(k_tile);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_ss_n64_transposed<T>(dq, wgmma_descriptor(G, 32 * i), wgmma_descriptor(k, 2048 * i));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_ss_n64_both_transposed<T>(dk, wgmma_descriptor(G, 2048 * i), wgmma_descriptor(q, 2048 * i));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_ss_n64_transposed<T>(dk, wgmma_descriptor(F, 32 * i), wgmma_descriptor(k, 2048 * i));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_ss_n64_both_transposed<T>(dk, wgmma_descriptor(F, 2048 * i), wgmma_descriptor(k, 2048 * i));
      }
      wgmma_commit();
      wgmma_wait<0>();
      if (args.q_rstd) {
        put_norm(dq, q_tile, 0);
        put_norm(dk, k_tile, 1);
      }
      sync_consumers();  // both are done with q, k and the pairs
      const GradientItem item = load_item(buffer);
      if (args.q_rstd) {
        apply_norm(dq, q_tile, 0, args.q_rstd, item);
        apply_norm(dk, k_tile, 1, args.k_rstd, item);
        if (kKeyTiles == 1) sync_consumers();  // the other one reads the tile that a gradient takes the place of
      }
      const bool has_dq = args.dq && (kKeyTiles == 2 || group == 0);
      const bool has_dk = args.dk && (kKeyTiles == 2 || group == 1);
      if (has_dq) put_tile(q_tile, dq);
      if (has_dk) put_tile(k_tile, dk);
      fence_async_shared();
      sync_group();
      const bool leader = warpgroup_thread() == 0;
      if (item.length < kRows) {
        if (has_dq) store_tail(q_tile, args.dq, item);
        if (has_dk) store_tail(k_tile, args.dk, item);
        fence_async_shared();
        sync_group();
      } else if (leader) {
        const BoxOrigin at = {64 * key_tile(), item.key_head, item.token, item.batch};
        if (has_dq) tma_store(args.maps.dq, at, q_tile);
        if (has_dk) tma_store(args.maps.dk, at, k_tile);
        tma_store_commit();
      }
    }
  }
};

}  // namespace cula::gdn::sm90
