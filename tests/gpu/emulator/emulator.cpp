#include "emulator.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

#include <cstdio>
#include <cstdlib>
#include <random>

// Saves the callee-saved registers on this stack, stores its pointer in *save, and goes on with another stack.
extern "C" void cula_switch_stack(void** save, void* load);
asm(R"(
.text
.globl cula_switch_stack
.type cula_switch_stack, @function
cula_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace cula::emulator {

namespace {

constexpr size_t kStackBytes = 256 * 1024;

struct Meeting {
  int arrived = 0;
  uint64_t round = 0;
  void* slots[32] = {};
  const char* operation = nullptr;
};

struct GroupMeeting {
  int arrived = 0;
  uint64_t round = 0;
  void* slots[128] = {};
};

struct Block {
  std::vector<Thread> threads;
  std::vector<std::vector<char>> stacks;
  std::vector<Meeting> warps;
  std::vector<int> held_up;  // turns for which a warp does not run
  Meeting barriers[16];
  std::vector<GroupMeeting> warpgroups;
  std::vector<unsigned char> shared;
  Index block, size, grid;
  int current = 0;
  int running = 0;
  void* scheduler_stack = nullptr;
  const std::function<void()>* kernel = nullptr;
  std::mt19937 random{12345};
};

Block g;

[[noreturn]] void fail(const char* what, const char* detail) {
  std::fprintf(stderr, "emulator: %s (%s), block %u thread %d\n", what, detail, g.block.x, g.current);
  std::abort();
}

extern "C" void cula_fiber_entry() {
  (*g.kernel)();
  Thread& me = current();
  for (const auto& group : me.copies) {
    if (!group.empty()) fail("a thread ended with copies under way", "cp.async");
  }
  me.done = true;
  --g.running;
  void* unused;
  cula_switch_stack(&unused, g.scheduler_stack);
  std::abort();
}

}  // namespace

Thread& current() { return g.threads[g.current]; }
Index block_index() { return g.block; }
Index block_size() { return g.size; }
Index grid_size() { return g.grid; }
unsigned char* shared_memory() {
  return reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(g.shared.data()) + 1023) / 1024 * 1024);
}

void yield() {
  Thread& me = current();
  cula_switch_stack(&me.stack_pointer, g.scheduler_stack);
}

void meet_warp(const char* operation, void* mine, const std::function<void(void* const*)>& combine) {
  Thread& me = current();
  Meeting& meeting = g.warps[me.warp];
  if (meeting.arrived == 0) meeting.operation = operation;
  if (std::strcmp(meeting.operation, operation) != 0) fail("lanes of a warp diverged", operation);
  meeting.slots[me.lane] = mine;
  if (++meeting.arrived == 32) {
    combine(meeting.slots);
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  const uint64_t round = meeting.round;
  while (meeting.round == round) yield();
}

void arrive_block(int barrier, int threads) {
  Meeting& meeting = g.barriers[barrier];
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.round;
  }
}

void meet_block(int barrier, int threads) {
  Meeting& meeting = g.barriers[barrier];
  const uint64_t round = meeting.round;
  arrive_block(barrier, threads);
  while (meeting.round == round) yield();
}

void meet_warpgroup(void* mine, const std::function<void(void* const*)>& combine) {
  GroupMeeting& meeting = g.warpgroups[current().warp / 4];
  meeting.slots[current().thread.x % 128] = mine;
  if (++meeting.arrived == 128) {
    combine(meeting.slots);
    meeting.arrived = 0;
    ++meeting.round;
    return;
  }
  const uint64_t round = meeting.round;
  while (meeting.round == round) yield();
}

void fault(const char* what, const char* operation) { fail(what, operation); }

void run_grid(int64_t blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
  g.size = {static_cast<unsigned>(threads)};
  g.grid = {static_cast<unsigned>(blocks)};
  g.kernel = &kernel;
  if (static_cast<int>(g.stacks.size()) < threads) g.stacks.resize(threads, std::vector<char>(kStackBytes));
  for (int64_t b = 0; b < blocks; ++b) {
    g.block = {static_cast<unsigned>(b)};
    g.shared.assign(shared_bytes + 1024, 0xff);
    g.threads.assign(threads, Thread{});
    g.warps.assign((threads + 31) / 32, Meeting{});
    g.held_up.assign(g.warps.size(), 0);
    g.warpgroups.assign((threads + 127) / 128, GroupMeeting{});
    for (Meeting& meeting : g.barriers) meeting = Meeting{};
    for (int i = 0; i < threads; ++i) {
      Thread& thread = g.threads[i];
      thread.thread = {static_cast<unsigned>(i)};
      thread.lane = i % 32;
      thread.warp = i / 32;
      thread.copies.emplace_back();
      auto top = reinterpret_cast<uintptr_t>(g.stacks[i].data() + kStackBytes) / 16 * 16;
      auto* words = reinterpret_cast<void**>(top);
      words[-1] = nullptr;  // alignment of the entry's frame
      words[-2] = reinterpret_cast<void*>(&cula_fiber_entry);
      for (int r = 3; r <= 8; ++r) words[-r] = nullptr;
      thread.stack_pointer = words - 8;
    }
    g.running = threads;
    int64_t idle_turns = 0;
    while (g.running > 0) {
      const int before = g.running;
      if (g.random() % 4 == 0) g.held_up[g.random() % g.held_up.size()] = static_cast<int>(g.random() % 8);
      for (int i = 0; i < threads; ++i) {
        if (g.threads[i].done || g.held_up[i / 32] > 0) continue;
        g.current = i;
        cula_switch_stack(&g.scheduler_stack, g.threads[i].stack_pointer);
      }
      for (int& turns : g.held_up) {
        if (turns > 0) --turns;
      }
      idle_turns = g.running == before ? idle_turns + 1 : 0;
      if (idle_turns > 50'000'000) fail("no progress: a barrier is not reached by all", "deadlock");
    }
  }
}

}  // namespace cula::emulator

#include "common/device/launch.cuh"

namespace cula::device {

DeviceLimits device_limits() {
  const auto setting = [](const char* name, int otherwise) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atoi(text) : otherwise;
  };
  return {setting("CULA_EMULATED_MULTIPROCESSORS", 4), setting("CULA_EMULATED_SHARED_BYTES", 227 * 1024), 228 * 1024};
}

}  // namespace cula::device
