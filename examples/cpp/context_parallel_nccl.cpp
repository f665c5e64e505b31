// Context parallelism on several GPUs of one machine: a thread and an NCCL communicator a rank. Built where CUDA and
// NCCL are found; needs a cula_gdn whose GPU backend has context parallelism, and says so if it has not.
#include <cuda_runtime.h>
#include <nccl.h>

#include "rank.h"

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) cula::throw_runtime_error(what, ": ", cudaGetErrorString(status));
}
void check(ncclResult_t status, const char* what) {
  if (status != ncclSuccess) cula::throw_runtime_error(what, ": ", ncclGetErrorString(status));
}

// The calling thread's device from here on.
example::Device gpu(int index, cudaStream_t stream) {
  check(cudaSetDevice(index), "cudaSetDevice");
  example::Device device;
  device.device = {kDLCUDA, index};
  device.stream = stream;
  device.allocate = [stream](size_t bytes) {
    void* memory = nullptr;
    check(cudaMallocAsync(&memory, bytes == 0 ? 1 : bytes, stream), "cudaMallocAsync");
    return std::shared_ptr<void>(memory, [stream](void* used) { cudaFreeAsync(used, stream); });
  };
  device.upload = [stream](void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  device.download = [stream](float* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  return device;
}

cudaStream_t make_stream(int index) {
  cudaStream_t stream = nullptr;
  check(cudaSetDevice(index), "cudaSetDevice");
  check(cudaStreamCreate(&stream), "cudaStreamCreate");
  return stream;
}

void run() {
  int world_size = 0;
  check(cudaGetDeviceCount(&world_size), "cudaGetDeviceCount");
  if (world_size < 1) cula::throw_runtime_error("no GPU");
  std::vector<ncclComm_t> communicators(static_cast<size_t>(world_size));
  check(ncclCommInitAll(communicators.data(), world_size, nullptr), "ncclCommInitAll");

  const example::Sizes share{.tokens = 1000, .heads = 2, .value_heads = 4, .key_dim = 128, .value_dim = 128};
  example::Sizes whole = share;
  whole.tokens = share.tokens * world_size;
  const example::Data data = example::random_data(whole);
  const example::Results one =
      example::run_rank(gpu(0, make_stream(0)), whole, data, 0, 1, [](const example::Tensor&, example::Tensor&) {});

  std::vector<example::Results> results(static_cast<size_t>(world_size));
  example::run_ranks(world_size, [&](int rank) {
    const cudaStream_t stream = make_stream(rank);
    const example::Device device = gpu(rank, stream);
    const auto all_gather = [&](const example::Tensor& payload, example::Tensor& gathered) {
      check(ncclAllGather(payload.data(), gathered.data(), payload.count(), ncclFloat,
                          communicators[static_cast<size_t>(rank)], stream),
            "ncclAllGather");
    };
    results[static_cast<size_t>(rank)] =
        example::run_rank(device, share, example::share_of(data, rank, world_size), rank, world_size, all_gather);
  });
  std::printf("%d GPUs, %lld tokens on each\n", world_size, static_cast<long long>(share.tokens));
  example::compare(results, one);
  for (ncclComm_t communicator : communicators) ncclCommDestroy(communicator);
}

}  // namespace

int main() {
  try {
    run();
  } catch (const cula::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.kind().c_str(), error.what());
    return 1;
  }
  return 0;
}
