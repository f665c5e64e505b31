// Context parallelism from C++: one sequence on several ranks that are threads of this process. Their transport is a
// shared array and a barrier; context_parallel_nccl.cpp has the same ranks on GPUs, with NCCL between them.
#include <barrier>
#include <cstdlib>
#include <cstring>

#include "rank.h"

namespace {

example::Device host() {
  example::Device device;
  device.allocate = [](size_t bytes) {
    return std::shared_ptr<void>(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
  };
  device.upload = [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); };
  device.download = [](float* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); };
  return device;
}

void run(int world_size) {
  const example::Sizes whole{.tokens = 600, .heads = 2, .value_heads = 4, .key_dim = 64, .value_dim = 96};
  example::Sizes share = whole;
  share.tokens = whole.tokens / world_size;
  const example::Data data = example::random_data(whole);
  const example::Results one =
      example::run_rank(host(), whole, data, 0, 1, [](const example::Tensor&, example::Tensor&) {});

  std::vector<const example::Tensor*> payloads(static_cast<size_t>(world_size));
  std::barrier meeting(world_size);
  std::vector<example::Results> results(static_cast<size_t>(world_size));
  example::run_ranks(world_size, [&](int rank) {
    const auto all_gather = [&](const example::Tensor& payload, example::Tensor& gathered) {
      payloads[static_cast<size_t>(rank)] = &payload;
      meeting.arrive_and_wait();
      for (int other = 0; other < world_size; ++other) {
        const example::Tensor& from = *payloads[static_cast<size_t>(other)];
        std::memcpy(gathered.data() + static_cast<size_t>(other) * from.count(), from.data(), from.bytes());
      }
      meeting.arrive_and_wait();
    };
    results[static_cast<size_t>(rank)] =
        example::run_rank(host(), share, example::share_of(data, rank, world_size), rank, world_size, all_gather);
  });
  std::printf("%d ranks of %lld tokens\n", world_size, static_cast<long long>(share.tokens));
  example::compare(results, one);
}

}  // namespace

int main() {
  try {
    for (const int world_size : {2, 3, 8}) run(world_size);
  } catch (const cula::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.kind().c_str(), error.what());
    return 1;
  }
  return 0;
}
