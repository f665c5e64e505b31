// The Hopper backend as the emulator has it: its backward pass and its stages; everything else is the general backend's.
// Link it in place of csrc/gdn/sm90/forward.cu and the instantiations that belong to that.
#include "gdn/backend.h"
#include "gdn/sm90/operator.h"

namespace cula::gdn {

namespace sm90 {

bool runs_on(int) { return true; }

}  // namespace sm90

const BackendTable& sm90_backend() {
  static const BackendTable kTable = [] {
    BackendTable table = cuda_backend();
    sm90::put_stages(table);
    table.backward_workspace_bytes = [](const Plan& plan) { return sm90::backward_workspace_bytes(plan); };
    table.backward_workspace_bytes_for = [](const Plan& plan, const BackwardTensors& t) {
      return sm90::backward_workspace_bytes(plan, t);
    };
    table.backward = sm90::backward;
    return table;
  }();
  return kTable;
}

}  // namespace cula::gdn
