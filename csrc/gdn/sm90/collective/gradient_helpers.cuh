// The warps of the gradient kernel that load, and that do what needs no tensor core.
#pragma once

#include "gdn/sm90/collective/gradient_pipeline.cuh"

namespace cula::gdn::sm90 {

template <class T, int kKeyDim, int kValueDim>
struct GradientHelpers {
  using Shared = GradientShared<kKeyDim, kValueDim>;
  static constexpr int kKeyTiles = Shared::kKeyTiles;
  static constexpr int kValueTiles = Shared::kValueTiles;

  const GradientArgs& args;
  Shared& memory;
  typename Shared::Map shared;

  __device__ __forceinline__ int64_t head_index(int slot, int head) const {
    return static_cast<int64_t>(slot) * (args.heads * args.group) + head;
  }

  // By one lane.
  __device__ __forceinline__ void load_head(const GradientItem& item, int head, RingPlace place, int buffer) const {
    const int64_t index = head_index(item.slot, head);
    const int64_t stored = head_index(item.slot - args.window.begin, head);
    const auto begin = [&](int bytes) {
      mbarrier_wait(shared.empty_barrier(place.slot), place.phase ^ 1);
      mbarrier_arrive_expect(shared.full_barrier(place.slot), bytes);
    };
    const auto load_values = [&](const CUtensorMap& map, int beside = 0) {
      begin(kValueTiles * kTileBytes + beside);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) {
        tma_load(shared.slot(place.slot) + i * kTileBytes, map, {64 * i, head, item.token, item.batch},
                 shared.full_barrier(place.slot));
      }
    };
    load_values(args.maps.grad_output);
    place = place.ahead(1);
    load_values(args.maps.dv, sizeof(ChunkFactors));
    bulk_load(shared.factor(buffer), args.factors + index, sizeof(ChunkFactors), shared.full_barrier(place.slot));
    const auto load_piece = [&](const SwizzledTile* tiles, int count) {
      place = place.ahead(1);
      begin(count * kTileBytes);
      bulk_load(shared.slot(place.slot), tiles, count * kTileBytes, shared.full_barrier(place.slot));
    };
    load_piece(args.residual + stored * kValueTiles, kValueTiles);
    place = place.ahead(1);
    load_values(args.maps.v);
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) load_piece(args.S + (stored * kValueTiles + i) * kKeyTiles, kKeyTiles);
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) load_piece(args.D + (stored * kValueTiles + i) * kKeyTiles, kKeyTiles);
  }

  __device__ __forceinline__ void wait_keys_empty(int number) const {
    if (number < kKeyBuffers) return;
    mbarrier_wait(shared.keys_empty_barrier(number % kKeyBuffers), (number / kKeyBuffers - 1) & 1);
  }

  __device__ __forceinline__ void run_loader() const {
    RingPlace place;
    int heads = 0;
    int items = 0;
    for_each_item(args, [&](const GradientItem& item, int number) {
      items = number + 1;
      if (lane_id() == 0) {
        const int b = number % kKeyBuffers;
        wait_keys_empty(number);
        memory.items[b] = item;
        mbarrier_arrive_expect(shared.keys_full_barrier(b), 2 * kKeyTiles * kTileBytes);
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i) {
          const BoxOrigin at = {64 * i, item.key_head, item.token, item.batch};
          const uint32_t q = shared.keys(b) + i * kTileBytes;
          tma_load(q, args.maps.q, at, shared.keys_full_barrier(b));
          tma_load(q + kKeyTiles * kTileBytes, args.maps.k, at, shared.keys_full_barrier(b));
        }
      }
#pragma unroll 1
      for (int j = 0; j < args.group; ++j) {
        if (lane_id() == 0) {
          if (heads >= 2) mbarrier_wait(shared.finished_barrier(heads & 1), ((heads >> 1) - 1) & 1);
          load_head(item, item.key_head * args.group + j, place, heads & 1);
        }
        place = place.ahead(Shared::kPieces);
        ++heads;
      }
      sync_warp();
    });
    if (lane_id() == 0) {
      wait_keys_empty(items);
      memory.items[items % kKeyBuffers].length = 0;
      mbarrier_arrive(shared.keys_full_barrier(items % kKeyBuffers));
    }
  }

  // <dv, v>, and where beta is small, dv = beta dW in the place of dW. By two warps, each every other group of 4 rows.
  __device__ __forceinline__ void run_values(int warp) const {
    constexpr int kRowsAtOnce = 8;  // of both warps; a lane takes a piece of 8 columns of one row
    const int first_row = 4 * warp + lane_id() / 8;
    const int piece = lane_id() & 7;
    RingPlace place;
    int heads = 0;
    for_each_item(args, [&](const GradientItem& item, int) {
#pragma unroll 1
      for (int j = 0; j < args.group; ++j) {
        const RingPlace dv = place.ahead(Shared::kDv);
        const RingPlace v = place.ahead(Shared::kV);
        const int buffer = heads & 1;
        const uint32_t betas = shared.factor(buffer) + static_cast<uint32_t>(offsetof(ChunkFactors, beta));
        mbarrier_wait(shared.full_barrier(dv.slot), dv.phase);
        mbarrier_wait(shared.full_barrier(v.slot), v.phase);
#pragma unroll 1
        for (int row = first_row; row < kRows; row += kRowsAtOnce) {
          float sum = 0.0f;
          if (row < item.length) {  // the consumers clear the rows behind these
            const uint32_t at = swizzled(row, piece);
            const float beta = load_shared(betas + 4 * row);
            const auto store = [&](int i, const uint4& x) {
              const int head = item.key_head * args.group + j;
              T* out = static_cast<T*>(args.dv.data) + args.dv.offset(item.batch, item.token + row, head);
              *reinterpret_cast<uint4*>(out + 64 * i + 8 * piece) = x;
            };
#pragma unroll
            for (int i = 0; i < kValueTiles; ++i) {
              const uint4 x = load_shared_vector(shared.slot(dv.slot) + i * kTileBytes + at);
              const uint4 y = load_shared_vector(shared.slot(v.slot) + i * kTileBytes + at);
              const auto take = [&](uint32_t gradient, uint32_t value) {
                const float2 a = unpack2<T>(gradient);
                const float2 b = unpack2<T>(value);
                sum += a.x * b.x + a.y * b.y;
                return pack2<T>(beta * a.x, beta * a.y);
              };
              const uint4 scaled = {take(x.x, y.x), take(x.y, y.y), take(x.z, y.z), take(x.w, y.w)};
              if (is_small_beta<T>(beta)) store(i, scaled);
            }
          }
          sum = group_sum<8>(sum);
          if (piece == 0) memory.sums[buffer].values[row] = sum;
        }
        mbarrier_arrive_warp({{shared.empty_barrier(dv.slot), Shared::kSlotShares / 4},
                              {shared.empty_barrier(v.slot), Shared::kSlotShares / 2},
                              {shared.summed_barrier(buffer), 1}});
        place = place.ahead(Shared::kPieces);
        ++heads;
      }
    });
  }

  // dg and dbeta out of the row sums. dg_t is the sum over s >= t of the gradients by the running sum at s, within what
  // no reset parts.
  __device__ __forceinline__ void finish(const GradientItem& item, int head, const HeadSums& sums,
                                         const ChunkFactors& f) const {
    const int lane = lane_id();
    const int length = item.length;
    double by_sum[2];  // gradient by the running sum at rows 2 lane, 2 lane + 1
    double to_end = 0.0;
    float dbeta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane + r;
      by_sum[r] = 0.0;
      dbeta[r] = 0.0f;
      if (row >= length) continue;
      const auto rows = [&](RowSum kind, int group) { return sums.rows[group][static_cast<int>(kind)][row]; };
#pragma unroll
      for (int g = 0; g < kGradientConsumers; ++g) {
        by_sum[r] += rows(RowSum::kPairs, g);
#pragma unroll
        for (int w = 0; w < 4; ++w) by_sum[r] -= sums.columns[g][w][row];
      }
      float output = 0.0f;
      float residual = 0.0f;
      double update = 0.0;
#pragma unroll
      for (int g = 0; g < kKeyTiles; ++g) {  // with one tile of keys both warpgroups have the same
        output += rows(RowSum::kOutput, g);
        residual += rows(RowSum::kResidual, g);
        update += rows(RowSum::kUpdate, g);
      }
      const float beta = f.beta[row];
      by_sum[r] += output - row_weight<T>(beta) * residual;
      dbeta[r] = (sums.values[row] + rows(RowSum::kStrength, 1) - residual) / row_scale<T>(beta);
      // A row loses what the last row gains. Of the last row that is nothing.
      if (row + 1 < length) {
        by_sum[r] -= update;
        to_end += update;
      }
    }
    to_end = warp_sum(to_end);
    double states = 0.0;
#pragma unroll
    for (int w = 0; w < 4 * kGradientConsumers; ++w) states += sums.states[w];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A decay of zero ends what the state in front can do, whatever it holds.
      if (2 * lane + r == length - 1) {
        by_sum[r] += to_end + (f.chunk_decay == 0.0f ? 0.0 : f.chunk_decay * states);
      }
    }
    const double pair = by_sum[0] + by_sum[1];
    double sum[2];
    sum[1] = warp_reverse_inclusive_scan(pair) - pair + by_sum[1];
    sum[0] = sum[1] + by_sum[0];
    const bool restarts = f.first_restart < kRows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane + r;
      double behind = 0.0;
      bool reset = false;
      if (restarts) {  // drop what lies behind the next restart
        int next = row + 1;
        while (next < length && f.first[next] != next) ++next;
        const double even = shuffle(sum[0], (next >> 1) & 31);
        const double odd = shuffle(sum[1], (next >> 1) & 31);
        if (next < length) behind = (next & 1) != 0 ? odd : even;
        reset = row == 0 ? f.first_restart == 0 : f.first[row] == row;
      }
      if (row >= length) continue;
      if (args.dg) {
        args.dg.store(args.dg.offset(item.batch, item.token + row, head),
                      reset ? 0.0f : static_cast<float>(sum[r] - behind));
      }
      if (args.dbeta) {
        float value = dbeta[r];
        if (args.beta_sigmoid) {
          const float s = f.beta[row] / args.beta_scale;
          value *= f.beta[row] * (1.0f - s);
        }
        args.dbeta.store(args.dbeta.offset(item.batch, item.token + row, head), value);
      }
    }
  }

  __device__ __forceinline__ void run_gate() const {
    int heads = 0;
    for_each_item(args, [&](const GradientItem& item, int) {
#pragma unroll 1
      for (int j = 0; j < args.group; ++j) {
        const int buffer = heads & 1;
        mbarrier_wait(shared.summed_barrier(buffer), (heads >> 1) & 1);
        finish(item, item.key_head * args.group + j, memory.sums[buffer], memory.factors[buffer]);
        mbarrier_arrive_warp(shared.finished_barrier(buffer));
        ++heads;
      }
    });
  }

  __device__ __forceinline__ void run() const {
    const int warp = warp_id() & 3;
    switch (static_cast<GradientHelper>(warp)) {
      case GradientHelper::kLoader:
        return run_loader();
      case GradientHelper::kGate:
        return run_gate();
      default:
        return run_values(warp - static_cast<int>(GradientHelper::kValues0));
    }
  }
};

}  // namespace cula::gdn::sm90
