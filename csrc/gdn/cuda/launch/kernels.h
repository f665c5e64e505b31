// Launches, one a kernel; compiled a (kernel, element type) at a time under instantiations/.
#pragma once

#include "common/device/launch.cuh"
#include "gdn/cuda/kernel/forward_scan.cuh"
#include "gdn/cuda/kernel/prepare.cuh"
#include "gdn/cuda/kernel/stage_forward.cuh"

namespace cula::gdn::cuda {

template <class T, GateKind kKind>
void launch_prepare(const PrepareArgs& args, device::Stream stream);
template <class T>
void launch_forward_scan(const ForwardScanArgs& args, device::Stream stream);
template <class T>
void launch_state_scan(const ForwardScanArgs& args, device::Stream stream);  // without output
template <class T>
void launch_recompute(const RecomputeArgs& args, device::Stream stream);
template <class T>
void launch_state_stage(const StateStageArgs& args, device::Stream stream);
template <class T>
void launch_output(const OutputArgs& args, device::Stream stream);

// How a pass over the chunks is cut: blocks of 16 value columns a warp (or pair of warps), and tiles under way.
struct ScanShape {
  int row_blocks;  // 1, 2 or 4
  int depth;       // 1, 2 or 4
};

// Narrow blocks when there are few units, so that more multiprocessors work; results do not depend on it.
// bytes(shape): shared memory of a block.
template <class Bytes>
ScanShape choose_scan_shape(int64_t units, int value_dim, const device::DeviceLimits& limits, Bytes bytes) {
  ScanShape shape = {4, 4};
  const auto blocks = [&] { return units * ((value_dim + 16 * shape.row_blocks - 1) / (16 * shape.row_blocks)); };
  while (shape.row_blocks > 1 && (blocks() < limits.multiprocessors || value_dim <= 8 * shape.row_blocks)) {
    shape.row_blocks /= 2;
  }
  // One block fills a multiprocessor's time if it is alone; otherwise two or more share it.
  if (blocks() > limits.multiprocessors) shape.depth = 2;
  while (shape.depth > 1 && bytes(shape) > static_cast<size_t>(limits.shared_bytes_per_block)) shape.depth /= 2;
  while (shape.row_blocks > 1 && bytes(shape) > static_cast<size_t>(limits.shared_bytes_per_block)) {
    shape.row_blocks /= 2;
  }
  return shape;
}

}  // namespace cula::gdn::cuda
