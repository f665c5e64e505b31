// The plan as a pure function of a problem.
#include <algorithm>
#include <cmath>
#include <thread>
#include <tuple>

#include "gdn/cpu/batches.h"
#include "gdn/schedules.h"
#include "gdn/segments.h"
#include "operator_case.h"

namespace cula::test {
namespace {

gdn::Problem problem_of(int64_t B, int64_t T) { return make_case(DType::kFloat32, B, T, 2, 4, 64, 96).problem; }

// Chunks and sequences, found token by token.
void check_ranges(const gdn::Problem& problem) {
  const gdn::Plan plan = gdn::Plan::make(problem);
  std::vector<std::pair<int64_t, int64_t>> sequences;  // begin, end on the flattened token axis
  if (problem.sequence_offsets) {
    for (size_t n = 0; n + 1 < problem.sequence_offsets->size(); ++n) {
      sequences.emplace_back((*problem.sequence_offsets)[n], (*problem.sequence_offsets)[n + 1]);
    }
  } else {
    for (int64_t b = 0; b < problem.batch; ++b) sequences.emplace_back(b * problem.tokens, (b + 1) * problem.tokens);
  }
  ASSERT_EQ(plan.sequences().size(), sequences.size());
  EXPECT_EQ(problem.num_sequences(), static_cast<int64_t>(sequences.size()));
  size_t next = 0;
  for (size_t n = 0; n < sequences.size(); ++n) {
    const gdn::SequenceRange& sequence = plan.sequences()[n];
    EXPECT_EQ(sequence.begin, sequences[n].first);
    EXPECT_EQ(sequence.length, sequences[n].second - sequences[n].first);
    EXPECT_EQ(sequence.first_chunk, static_cast<int64_t>(next));
    int64_t token = sequence.begin;
    for (int64_t index = 0; token < sequences[n].second; ++index) {
      ASSERT_LT(next, plan.chunks().size());
      const gdn::ChunkRange& chunk = plan.chunks()[next++];
      EXPECT_EQ(chunk.sequence, static_cast<int64_t>(n));
      EXPECT_EQ(chunk.index, index);
      EXPECT_EQ(chunk.begin, token);
      EXPECT_EQ(chunk.length, std::min(problem.chunk_size, sequences[n].second - token));
      token += chunk.length;
    }
    EXPECT_EQ(sequence.num_chunks, static_cast<int64_t>(next) - sequence.first_chunk);
  }
  EXPECT_EQ(next, plan.chunks().size());
  EXPECT_EQ(plan.num_chunks(), static_cast<int64_t>(next));
}

TEST(Plan, RangesOfEqualLengths) {
  for (const int64_t chunk_size : {16, 32, 64}) {
    for (const int64_t B : {0, 1, 3}) {
      for (const int64_t T : {0, 1, 15, 16, 63, 64, 65, 130}) {
        gdn::Problem problem = problem_of(B, T);
        problem.chunk_size = chunk_size;
        check_ranges(problem);
      }
    }
  }
}

TEST(Plan, RangesOfPackedSequences) {
  for (const int64_t chunk_size : {16, 32, 64}) {
    for (const std::vector<int64_t>& offsets :
         {std::vector<int64_t>{0}, {0, 0}, {0, 0, 5, 5, 70, 134, 134}, {0, 1, 2, 3}, {0, 64, 128}, {0, 200}}) {
      gdn::Problem problem = problem_of(1, 200);
      problem.chunk_size = chunk_size;
      problem.sequence_offsets = offsets;
      check_ranges(problem);
    }
  }
  Random random(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> offsets = {0};
    for (int n = 0; n < 10; ++n) offsets.push_back(offsets.back() + static_cast<int64_t>(random.uniform(0, 100)));
    gdn::Problem problem = problem_of(1, offsets.back() + 7);
    problem.sequence_offsets = offsets;
    check_ranges(problem);
  }
}

// Only a backend that hands tensors to another one needs more for some.
TEST(Plan, BackwardWorkspaceForTensors) {
  const gdn::Plan plan = gdn::Plan::make(problem_of(1, 200));
  EXPECT_GT(plan.backward_workspace_bytes(), 0u);
  EXPECT_EQ(plan.forward_workspace_bytes(gdn::ForwardTensors{}), plan.forward_workspace_bytes(false));
  EXPECT_EQ(plan.backward_workspace_bytes(gdn::BackwardTensors{}), plan.backward_workspace_bytes());
}

TEST(Plan, Scale) {
  gdn::Problem problem = problem_of(1, 10);
  EXPECT_DOUBLE_EQ(gdn::Plan::make(problem).scale(), 0.125);
  problem.key_dim = 100;
  EXPECT_DOUBLE_EQ(gdn::Plan::make(problem).scale(), 0.1);
  problem.scale = -3.5;
  EXPECT_EQ(gdn::Plan::make(problem).scale(), -3.5);
  problem.scale = 0;
  EXPECT_EQ(gdn::Plan::make(problem).scale(), 0);
}

TEST(Plan, BackendOnTheCpu) {
  gdn::Problem problem = problem_of(1, 10);
  for (const gdn::Backend wanted : {gdn::Backend::kAuto, gdn::Backend::kCpu}) {
    problem.backend = wanted;
    EXPECT_EQ(gdn::Plan::make(problem).backend(), gdn::Backend::kCpu);
  }
#ifndef CULA_WITH_CUDA
  problem.backend = gdn::Backend::kAuto;
  problem.device = {kDLCUDA, 0};
  expect_error([&] { gdn::Plan::make(problem); }, "RuntimeError", {"CUDA"});
#endif
}

TEST(Plan, Threads) {
  gdn::Problem problem = problem_of(1, 1000);
  EXPECT_GE(gdn::Plan::make(problem).num_threads(), 1);
  problem.num_threads = 5;
  EXPECT_EQ(gdn::Plan::make(problem).num_threads(), 5);
  // Threads that would find nothing to do cost no workspace.
  problem.num_threads = 100'000;
  const gdn::Plan plan = gdn::Plan::make(problem);
  EXPECT_LE(plan.num_threads(), std::max<int64_t>(2 * plan.sequential_units(),
                                                  static_cast<int64_t>(plan.chunks().size()) * problem.value_heads));
}

TEST(Plan, SizesBeyond64Bits) {
  gdn::Problem problem = problem_of(1, 64);
  problem.heads = problem.value_heads = int64_t{1} << 62;
  expect_error([&] { gdn::Plan::make(problem); }, "ValueError", {"64 bits"});
  problem = problem_of(1, 64);
  problem.value_dim = int64_t{1} << 62;
  expect_error([&] { gdn::Plan::make(problem); }, "ValueError", {"64 bits"});
}

// More chunks than a list in memory could hold: a plan counts them, and lists them only for those who run them.
TEST(Plan, NumbersOfAProblemThatNoMachineHolds) {
  gdn::Problem problem = problem_of(1, 1);
  problem.tokens = int64_t{1} << 45;
  const gdn::Plan plan = gdn::Plan::make(problem);
  EXPECT_EQ(plan.num_chunks(), problem.tokens / problem.chunk_size);
  EXPECT_NE(plan.describe().find(std::to_string(plan.num_chunks())), std::string::npos);
}

TEST(Plan, KeepsTheProblem) {
  gdn::Problem problem = problem_of(1, 50);
  problem.sequence_offsets = {{0, 20, 50}};
  problem.use_gate = true;
  const gdn::Plan plan = gdn::Plan::make(problem);
  problem.tokens = 7;
  problem.sequence_offsets.reset();
  EXPECT_EQ(plan.problem().tokens, 50);
  EXPECT_EQ(plan.problem().sequence_offsets, (std::vector<int64_t>{0, 20, 50}));
  EXPECT_TRUE(plan.problem().use_gate);
  const gdn::Plan copy = plan;
  EXPECT_EQ(copy.chunks().size(), plan.chunks().size());
}

TEST(Plan, IsAPureFunction) {
  const gdn::Problem problem = problem_of(3, 700);
  const gdn::Plan first = gdn::Plan::make(problem), second = gdn::Plan::make(problem);
  EXPECT_EQ(first.describe(), second.describe());
  EXPECT_EQ(first.value_block(), second.value_block());
  for (const bool saves : {false, true}) {
    EXPECT_EQ(first.forward_workspace_bytes(saves), second.forward_workspace_bytes(saves));
  }
  EXPECT_EQ(first.backward_workspace_bytes(), second.backward_workspace_bytes());
}

TEST(Plan, ValueBlockCoversSomeColumns) {
  for (const int64_t V : {1, 31, 32, 33, 64, 128, 512}) {
    for (const int threads : {1, 2, 64}) {
      gdn::Problem problem = problem_of(1, 100);
      problem.value_dim = V;
      problem.num_threads = threads;
      const int64_t block = gdn::Plan::make(problem).value_block();
      EXPECT_GE(block, 1);
      EXPECT_LT(block, V + 64);
    }
  }
}

TEST(Batches, TakeEachChunkOfEachKeyHeadOnceInOrder) {
  for (const int threads : {1, 2, 64}) {
    for (const int64_t slot_bytes : {int64_t{1}, gdn::cpu::kBatchBytes / 7, gdn::cpu::kBatchBytes * 2}) {
      gdn::Problem problem = problem_of(1, 2000);
      problem.heads = 3;
      problem.value_heads = 6;
      problem.num_threads = threads;
      problem.sequence_offsets = {{0, 0, 700, 764, 764, 1990}};
      const gdn::Plan plan = gdn::Plan::make(problem);
      const std::vector<gdn::cpu::Batch> batches = gdn::cpu::make_batches(plan, slot_bytes);
      int64_t pair = 0, slot = 0;
      for (const gdn::cpu::Batch& batch : batches) {
        EXPECT_EQ(batch.first_pair, pair);
        EXPECT_EQ(batch.first_slot, slot);
        EXPECT_GT(batch.end_pair, batch.first_pair);
        for (; pair < batch.end_pair; ++pair) {
          const gdn::SequenceRange& range = plan.sequences()[pair / 3];
          for (int64_t i = 0; i < range.num_chunks; ++i, ++slot) {
            const gdn::cpu::ChunkHead found = gdn::cpu::chunk_head_of_slot(plan, slot);
            EXPECT_EQ(found.chunk, range.first_chunk + i);
            EXPECT_EQ(found.head, pair % 3);
            EXPECT_EQ(gdn::cpu::slot_of(plan, found), slot);
          }
        }
        EXPECT_EQ(batch.end_slot, slot);
      }
      EXPECT_EQ(pair, 5 * 3);
      EXPECT_EQ(slot, static_cast<int64_t>(plan.chunks().size()) * 3);
    }
  }
}

// Time of a pass over the sequences: batch by batch, each unit to the thread that is free first.
int64_t makespan(const gdn::Plan& plan, const std::vector<gdn::cpu::Batch>& batches) {
  const gdn::Problem& p = plan.problem();
  int64_t total = 0;
  for (const gdn::cpu::Batch& batch : batches) {
    std::vector<int64_t> threads(plan.num_threads(), 0);
    for (int64_t pair = batch.first_pair; pair < batch.end_pair; ++pair) {
      for (int64_t unit = 0; unit < p.value_heads / p.heads * plan.value_blocks(); ++unit) {
        *std::min_element(threads.begin(), threads.end()) += plan.sequences()[pair / p.heads].num_chunks;
      }
    }
    total += *std::max_element(threads.begin(), threads.end());
  }
  return total;
}

TEST(Batches, KeepTheThreadsAsBusyAsOneBatchWould) {
  const int64_t kLong = 9000;
  const std::vector<std::vector<int64_t>> lengths = {{kLong},
                                                     {kLong, 1, kLong, 1},
                                                     {kLong, 0, 0, 0, kLong, 0, 0, 0},
                                                     {kLong, kLong, 1, 1},
                                                     {kLong, 64, 3000, 64, 500}};
  for (const std::vector<int64_t>& of_sequences : lengths) {
    for (const int threads : {1, 2, 3, 4, 8, 64}) {
      for (const int64_t heads : {1, 3, 4}) {
        for (const int64_t group : {1, 2, 3}) {
          gdn::Problem problem = problem_of(1, 0);
          problem.heads = heads;
          problem.value_heads = heads * group;
          problem.num_threads = threads;
          problem.sequence_offsets = {{0}};
          for (const int64_t length : of_sequences) {
            problem.sequence_offsets->push_back(problem.tokens += length);
          }
          const gdn::Plan plan = gdn::Plan::make(problem);
          const int64_t all_slots = static_cast<int64_t>(plan.chunks().size()) * heads;
          const int64_t all_pairs = static_cast<int64_t>(of_sequences.size()) * heads;
          const int64_t together = makespan(plan, {{0, all_pairs, 0, all_slots}});
          const int64_t apart = makespan(plan, gdn::cpu::make_batches(plan, gdn::cpu::kBatchBytes));
          EXPECT_LE(apart, together + together / 8)
              << of_sequences.size() << " sequences, " << threads << " threads, " << heads << "/" << heads * group;
        }
      }
    }
  }
}

TEST(Batches, WorkspaceOfLongSequencesDoesNotGrowWithTheHeads) {
  gdn::Problem problem = problem_of(1, 32768);
  problem.key_dim = problem.value_dim = 128;
  problem.num_threads = 2;
  problem.heads = problem.value_heads = 2;
  const size_t few = gdn::Plan::make(problem).backward_workspace_bytes();
  problem.heads = problem.value_heads = 64;
  EXPECT_LE(gdn::Plan::make(problem).backward_workspace_bytes(), few);
}

TEST(Plan, DescriptionTellsWhatWasDecided) {
  gdn::Problem problem = problem_of(1, 130);
  problem.dtype = to_dlpack(DType::kBFloat16);
  problem.num_threads = 3;
  const std::string text = gdn::Plan::make(problem).describe();
  for (const char* part : {"cpu", "T=130", "K=64", "V=96", "HV=4", "bfloat16", "chunk=64", "threads: 3", "workspace"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
  }
}

// Byte counts far past 2^32 must not wrap: twice the tokens, about twice the workspace, or no more at all.
TEST(Plan, WorkspaceOfHugeProblems) {
  for (const bool long_sequence : {true, false}) {
    size_t forward[2], backward[2];
    for (int i = 0; i < 2; ++i) {
      gdn::Problem problem = make_case(DType::kFloat32, 1, 64, 16, 64, 256, 512).problem;
      problem.num_threads = 2;
      if (long_sequence) {
        problem.tokens = int64_t{1} << (22 + i);
      } else {
        problem.batch = int64_t{1} << (16 + i);
      }
      const gdn::Plan plan = gdn::Plan::make(problem);
      forward[i] = plan.forward_workspace_bytes(true);
      backward[i] = plan.backward_workspace_bytes();
    }
    EXPECT_GE(forward[1], forward[0]);
    EXPECT_LE(static_cast<double>(forward[1]), 2.1 * static_cast<double>(forward[0]));
    EXPECT_GE(backward[1], backward[0]);
    EXPECT_LE(static_cast<double>(backward[1]), 2.1 * static_cast<double>(backward[0]));
  }
}

// A peak memory that a user can rely on: a few of the operand tensors, whatever the length (CASES 41).
TEST(Plan, Case41_WorkspaceStaysBesideTheOperands) {
  gdn::Problem problem = make_case(DType::kBFloat16, 1, 32768, 16, 32, 128, 128).problem;
  problem.num_threads = 2;
  const gdn::Plan plan = gdn::Plan::make(problem);
  const size_t operands = 2 * 32768 * (2 * 16 * 128 + 32 * 128);  // q, k, v
  EXPECT_LE(plan.forward_workspace_bytes(true), 8 * operands);
  EXPECT_LE(plan.backward_workspace_bytes(), 16 * operands);
}

// Which problems the Hopper backend has kernels for; what is refused is named.
TEST(HopperSchedule, TakesWhatItHasKernelsFor) {
  const gdn::Problem taken = make_case(DType::kBFloat16, 1, 130, 2, 4, 128, 64).problem;
  EXPECT_TRUE(gdn::sm90::takes(taken));
  const auto refuses = [&](auto change, const char* part) {
    gdn::Problem problem = taken;
    change(problem);
    std::string reason;
    EXPECT_FALSE(gdn::sm90::takes(problem, &reason));
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  };
  refuses([](gdn::Problem& p) { p.dtype = {kDLFloat, 32, 1}; }, "float32");
  refuses([](gdn::Problem& p) { p.key_dim = 256; }, "256");
  refuses([](gdn::Problem& p) { p.value_dim = 96; }, "96");
  refuses([](gdn::Problem& p) { p.chunk_size = 32; }, "32");
}

// Blocks of the grid, counted segment by segment.
TEST(HopperSchedule, BlocksCoverEverySegment) {
  for (const std::vector<int64_t>& lengths : std::vector<std::vector<int64_t>>{
           {}, {0}, {1}, {64}, {8192, 8192}, {32768}, {0, 65, 20000, 64}, std::vector<int64_t>(300, 100)}) {
    for (const int64_t heads : {1, 8, 64}) {
      for (const int64_t value_dim : {64, 128}) {
        const gdn::sm90::Schedule schedule = gdn::sm90::choose_schedule(lengths, heads, value_dim);
        ASSERT_GE(schedule.value_tiles, 1);
        ASSERT_LE(64 * schedule.value_tiles, value_dim);
        int64_t segments = 0;
        for (const int64_t length : lengths) {
          int64_t count = 1;
          for (int64_t left = (length + 63) / 64; schedule.segment_chunks != 0 && left > schedule.segment_chunks;
               left -= schedule.segment_chunks) {
            ++count;
          }
          segments += count;
        }
        EXPECT_EQ(schedule.blocks, segments * heads * (value_dim / 64 / schedule.value_tiles));
      }
    }
  }
}

TEST(HopperSchedule, FillsTheMachine) {
  using gdn::sm90::choose_schedule;
  // Heads enough: a block each. Half of them: a block a half. Few, and long: segments. Few and short: neither helps.
  const gdn::sm90::Schedule many = choose_schedule(std::vector<int64_t>(4, 8192), 64, 128);
  EXPECT_EQ(many.value_tiles, 2);
  EXPECT_EQ(many.segment_chunks, 0);
  const gdn::sm90::Schedule half = choose_schedule({2048}, 64, 128);
  EXPECT_EQ(half.value_tiles, 1);
  EXPECT_EQ(half.segment_chunks, 0);
  const gdn::sm90::Schedule few = choose_schedule({32768}, 8, 128);
  EXPECT_GT(few.segment_chunks, 0);
  EXPECT_GE(few.blocks, 64);
  EXPECT_LE(few.blocks, gdn::sm90::kMultiprocessors);
  EXPECT_EQ(choose_schedule({512}, 8, 128).segment_chunks, 0);
  // Three segments and two take the same time where gates forget, two less where they do not.
  for (const auto& lengths : {std::vector<int64_t>{8192}, std::vector<int64_t>(4, 8192)}) {
    EXPECT_EQ(choose_schedule(lengths, lengths.size() == 1 ? 32 : 8, 128).segment_chunks, 64);
  }
  EXPECT_NE(few.describe().find("segments"), std::string::npos);
}

TEST(HopperSchedule, LongestFirst) {
  using gdn::sm90::choose_schedule;
  // Where sequences differ and not all blocks run at once.
  const std::vector<int64_t> mixed = {100, 4000, 64, 0, 9000, 700};
  const gdn::sm90::Schedule ordered = choose_schedule(mixed, 64, 128);
  EXPECT_EQ(ordered.segment_chunks, 0);
  EXPECT_TRUE(ordered.longest_first);
  EXPECT_NE(ordered.describe().find("longest sequences first"), std::string::npos);
  EXPECT_FALSE(choose_schedule(std::vector<int64_t>(6, 4000), 64, 128).longest_first);
  // The same number of chunks.
  EXPECT_FALSE(choose_schedule({3970, 4000, 4032, 4032, 4032}, 64, 128).longest_first);
  EXPECT_FALSE(choose_schedule({100, 700}, 16, 128).longest_first);
  // Too many to compare each with each.
  std::vector<int64_t> many(gdn::sm90::kMostOrdered + 1, 64);
  many[0] = 100;
  EXPECT_FALSE(choose_schedule(many, 64, 128).longest_first);
}

gdn::sm90::BackwardSizes backward_sizes(const std::vector<int64_t>& lengths, int64_t value_heads, int64_t dim,
                                        bool packed) {
  gdn::sm90::BackwardSizes sizes;
  sizes.value_heads = value_heads;
  sizes.key_dim = sizes.value_dim = dim;
  int64_t token = 0;
  for (const int64_t length : lengths) {
    const int64_t chunks = (length + 63) / 64;
    const int64_t n = static_cast<int64_t>(sizes.sequences.size());
    sizes.sequences.push_back({packed ? token / 64 + n : n * chunks, chunks});
    token += length;
    if (!packed) sizes.slots_per_row = chunks;
  }
  const int64_t count = static_cast<int64_t>(lengths.size());
  sizes.slots = packed ? token / 64 + count : count * sizes.slots_per_row;
  return sizes;
}

TEST(HopperBackwardSchedule, WindowsBoundMemoryAndPartNoSegment) {
  const gdn::sm90::BackwardCosts costs;
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{0},
                                              {1},
                                              {64},
                                              {4097},
                                              {32768},
                                              {65536},
                                              {8192, 8192},
                                              std::vector<int64_t>(8, 4096),
                                              std::vector<int64_t>(40, 1000),
                                              std::vector<int64_t>(300, 16),
                                              {0, 30000, 5, 0, 2000}}) {
    const bool equal = std::equal(lengths.begin() + 1, lengths.end(), lengths.begin());
    for (const bool packed : {false, true}) {
      if (!packed && !equal) continue;
      for (const int64_t heads : {1, 4, 32, 64}) {
        for (const int64_t dim : {64, 128}) {
          const gdn::sm90::BackwardSizes sizes = backward_sizes(lengths, heads, dim, packed);
          const gdn::sm90::BackwardSchedule schedule = choose_backward_schedule(sizes, costs);
          SCOPED_TRACE(schedule.describe());
          ASSERT_GT(schedule.window_slots, 0);
          // S, D and V' of each value head.
          EXPECT_EQ(sizes.slot_bytes(), 2 * heads * (2 * dim * dim + 64 * dim));
          EXPECT_EQ(schedule.windows,
                    std::max<int64_t>(1, (sizes.slots + schedule.window_slots - 1) / schedule.window_slots));
          EXPECT_LE(std::min(schedule.window_slots, sizes.slots) * sizes.slot_bytes(),
                    std::max(costs.window_bytes, sizes.slot_bytes()));
          // Beyond small inputs, what a window keeps is not much more than half.
          if (sizes.slots * sizes.slot_bytes() > 2 * costs.small_bytes) {
            EXPECT_LE(16 * schedule.window_slots, 9 * sizes.slots + 16);
          }
          if (schedule.segment_chunks != 0) {
            EXPECT_EQ(schedule.window_slots % schedule.segment_chunks, 0);
          } else if (schedule.windows > 1) {
            ASSERT_GT(sizes.slots_per_row, 0);
            EXPECT_EQ(schedule.window_slots % sizes.slots_per_row, 0);
          }
        }
      }
    }
  }
}

TEST(HopperBackwardSchedule, FillsTheMachine) {
  const auto choose = [](const std::vector<int64_t>& lengths, int64_t heads, bool packed) {
    return choose_backward_schedule(backward_sizes(lengths, heads, 128, packed), {});
  };
  // Few heads of a long sequence are cut; enough sequences run whole.
  for (const int64_t heads : {4, 8, 16}) {
    for (const int64_t length : {8192, 32768}) {
      EXPECT_GE(choose({length}, heads, true).blocks, gdn::sm90::kMultiprocessors / 2) << heads << " x " << length;
    }
  }
  EXPECT_EQ(choose(std::vector<int64_t>(8, 4096), 32, false).segment_chunks, 0);
  // In one window packed sequences are cut as rows are, whatever slots lie between them.
  for (const size_t count : {2, 4, 8}) {
    const std::vector<int64_t> lengths(count, 8192);
    const gdn::sm90::BackwardSchedule packed = choose(lengths, 4, true);
    ASSERT_EQ(packed.windows, 1);
    EXPECT_EQ(packed.segment_chunks, choose(lengths, 4, false).segment_chunks) << count;
    EXPECT_EQ(packed.blocks, choose(lengths, 4, false).blocks) << count;
  }
  // Packed sequences stay whole where windows can end between them: four of 65 slots in each.
  const gdn::sm90::BackwardSchedule packed = choose(std::vector<int64_t>(8, 4096), 32, true);
  EXPECT_EQ(packed.segment_chunks, 260);
  EXPECT_EQ(packed.windows, 2);
  EXPECT_EQ(choose({64}, 1, false).segment_chunks, 0);
}

TEST(HopperSchedule, SequencesStayWholeWhereThatIsAskedFor) {
  for (const int64_t batch : {1, 3}) {
    const gdn::Plan plan = gdn::Plan::make(make_case(DType::kBFloat16, batch, 65536, 2, 2, 128, 128).problem);
    EXPECT_NE(gdn::sm90::choose_schedule(plan).segment_chunks, 0);
    EXPECT_EQ(gdn::sm90::choose_schedule(plan, false).segment_chunks, 0);
    EXPECT_NE(gdn::sm90::choose_backward_schedule(plan).segment_chunks, 0);
    const gdn::sm90::BackwardSchedule whole = gdn::sm90::choose_backward_schedule(plan, {}, false);
    EXPECT_EQ(whole.segment_chunks, 0);
    EXPECT_EQ(whole.window_slots % 1024, 0);  // of whole rows
  }
}

TEST(Schedules, AreChosenOnce) {
  gdn::Problem problem = problem_of(1, 5000);
  problem.heads = problem.value_heads = 16;
  problem.key_dim = problem.value_dim = 128;
  problem.num_threads = 2;
  const gdn::Plan plan = gdn::Plan::make(problem);
  const gdn::Schedules& schedules = plan.schedules();
  EXPECT_EQ(schedules.forward_batches(plan).size(), 1u);
  EXPECT_GT(schedules.backward_batches(plan).size(), 1u);
  for (const auto* batches : {&schedules.forward_batches(plan), &schedules.backward_batches(plan)}) {
    EXPECT_EQ(batches->back().end_slot, static_cast<int64_t>(plan.chunks().size()) * problem.heads);
  }
  const gdn::Plan copy = plan;
  EXPECT_EQ(&copy.schedules(), &schedules);
  // By several threads that ask at once.
  const gdn::Plan fresh = gdn::Plan::make(problem);
  std::vector<const void*> seen(8);
  std::vector<std::thread> threads;
  for (const void*& place : seen) {
    threads.emplace_back([&] { place = fresh.schedules().backward_batches(fresh).data(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(seen.begin(), seen.end(), fresh.schedules().backward_batches(fresh).data()), 8);
}

// Lengths of sequences that a batch holds beside one of kLength tokens.
constexpr int64_t kLength = 5000;
const std::vector<std::vector<int64_t>> kNeighbours = {
    {}, {0}, {1, 0, 63}, {64, 40000}, {kLength, kLength, kLength}, std::vector<int64_t>(200, 70)};

// A problem whose sequences are the neighbours and, at some place among them, one of kLength tokens.
gdn::Problem with_neighbours(gdn::Problem problem, std::vector<int64_t> lengths, size_t place) {
  lengths.insert(lengths.begin() + static_cast<int64_t>(std::min(place, lengths.size())), kLength);
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : lengths) offsets.push_back(offsets.back() + length);
  problem.tokens = offsets.back();
  problem.sequence_offsets = offsets;
  return problem;
}

// What changes bits is the same for a sequence alone and among any others; without the flag it is not.
TEST(BatchInvariance, SchedulesDoNotFollowTheBatch) {
  struct Choice {
    bool narrow;
    int64_t general_segment, forward_segment, backward_segment;
    bool operator==(const Choice&) const = default;
  };
  int differ = 0, cut = 0;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const int64_t heads : {1, 2, 8, 32, 128}) {
      for (const int64_t dim : {64, 128}) {
        for (const int64_t chunk_size : {16, 64}) {
          gdn::Problem problem = make_case(dtype, 1, kLength, heads, heads, dim, dim).problem;
          problem.chunk_size = chunk_size;
          const auto choice = [&](bool invariant, const std::vector<int64_t>& neighbours, size_t place) {
            problem.batch_invariant = invariant;
            const gdn::Plan plan = gdn::Plan::make(with_neighbours(problem, neighbours, place));
            const gdn::ScanSchedule general = choose_scan_schedule(plan);
            const gdn::sm90::BackwardSchedule backward = gdn::sm90::choose_backward_schedule(plan);
            // Nothing of a packed sequence is carried from window to window.
            EXPECT_TRUE(!invariant || backward.windows == 1);
            return Choice{general.narrow, general.segments.chunks, gdn::sm90::choose_schedule(plan).segment_chunks,
                          backward.segment_chunks};
          };
          const Choice alone = choice(true, {}, 0), own = choice(false, {}, 0);
          EXPECT_EQ(alone.backward_segment, 0);
          cut += alone.general_segment != 0 || alone.forward_segment != 0;
          for (const std::vector<int64_t>& neighbours : kNeighbours) {
            for (const size_t place : {size_t{0}, size_t{1}, neighbours.size()}) {
              EXPECT_EQ(choice(true, neighbours, place), alone) << heads << " heads, dim " << dim;
            }
            differ += choice(false, neighbours, 0) != own;
          }
        }
      }
    }
  }
  EXPECT_GT(cut, 5);
  EXPECT_GT(differ, 20);
}

// The same of rows of a batch; in backward, windows hold whole rows, however long.
TEST(BatchInvariance, RowsAreScheduledAsPackedSequences) {
  for (const int64_t heads : {2, 32}) {
    for (const int64_t tokens : {100, 5000, 65536}) {
      gdn::Problem problem = make_case(DType::kBFloat16, 1, tokens, heads, heads, 128, 128).problem;
      problem.batch_invariant = true;
      const auto choose = [&](int64_t batch) {
        problem.batch = batch;
        const gdn::Plan plan = gdn::Plan::make(problem);
        const gdn::sm90::BackwardSchedule backward = gdn::sm90::choose_backward_schedule(plan);
        EXPECT_EQ(backward.segment_chunks, 0);
        const int64_t row_slots = (tokens + 63) / 64;
        EXPECT_EQ(backward.windows > 1 ? backward.window_slots % row_slots : 0, 0);
        EXPECT_GE(backward.windows * backward.window_slots, batch * row_slots);
        return std::make_tuple(choose_scan_schedule(plan).narrow, choose_scan_schedule(plan).segments.chunks,
                               gdn::sm90::choose_schedule(plan).segment_chunks);
      };
      const auto alone = choose(1);
      for (const int64_t batch : {2, 3, 16}) EXPECT_EQ(choose(batch), alone) << heads << " heads, " << tokens;
    }
  }
  gdn::Problem rows = make_case(DType::kBFloat16, 1, 8192, 32, 32, 128, 128).problem;
  rows.batch_invariant = true;
  rows.batch = 16;
  EXPECT_GT(gdn::sm90::choose_backward_schedule(gdn::Plan::make(rows)).windows, 1);
}

TEST(BatchInvariance, IsPrinted) {
  gdn::Problem problem = problem_of(2, 300);
  EXPECT_EQ(gdn::Plan::make(problem).describe().find("batch-invariant"), std::string::npos);
  problem.batch_invariant = true;
  EXPECT_NE(gdn::Plan::make(problem).describe().find("batch-invariant: as always"), std::string::npos);
}

}  // namespace
}  // namespace cula::test
