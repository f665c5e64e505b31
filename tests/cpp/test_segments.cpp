// The split of long sequences as a pure function of sizes.
#include <gtest/gtest.h>

#include <vector>

#include "gdn/segments.h"

namespace cula::test {
namespace {

gdn::ScanWork work_of(int64_t sequences, int64_t longest, int64_t blocks) {
  gdn::ScanWork work;
  work.sequences = sequences;
  work.longest = longest;
  work.blocks = blocks;
  work.summary_blocks = 2 * blocks;
  work.multiprocessors = 132;
  work.residency = 2;
  return work;
}

TEST(Segments, FullMachineStaysWhole) {
  EXPECT_FALSE(gdn::choose_segments(work_of(8, 512, 64)));
  EXPECT_FALSE(gdn::choose_segments(work_of(132, 4096, 2)));
}

TEST(Segments, FewUnitsAreSplit) {
  const gdn::Segments segments = gdn::choose_segments(work_of(1, 512, 4));
  ASSERT_TRUE(segments);
  EXPECT_GE(segments.of(512), 4);
  EXPECT_LT(gdn::scan_time(work_of(1, 512, 4), segments), 0.5 * gdn::scan_time(work_of(1, 512, 4), {}));
}

TEST(Segments, ShortSequencesStayWhole) {
  for (const int64_t longest : {0, 1, 8, 15}) EXPECT_FALSE(gdn::choose_segments(work_of(1, longest, 1))) << longest;
}

TEST(Segments, NothingToDo) {
  EXPECT_FALSE(gdn::choose_segments({}));
  EXPECT_FALSE(gdn::choose_segments(work_of(0, 0, 4)));
}

// What is chosen is never slower by the model than running whole, and no shorter than what pipelines need.
TEST(Segments, ChoiceGains) {
  int split = 0;
  for (const int64_t sequences : {1, 2, 3, 8, 40}) {
    for (const int64_t longest : {16, 63, 64, 200, 512, 2048}) {
      for (const int64_t blocks : {1, 2, 8, 32, 128}) {
        const gdn::ScanWork work = work_of(sequences, longest, blocks);
        const gdn::Segments segments = gdn::choose_segments(work);
        EXPECT_LE(gdn::scan_time(work, segments), gdn::scan_time(work, {}));
        if (!segments) continue;
        ++split;
        EXPECT_GE(segments.chunks, 8);
        EXPECT_GE(segments.of(longest), 2);
      }
    }
  }
  EXPECT_GT(split, 10);
}

// Places that kernels compute one by one from the chunks' places never meet, for any lengths.
TEST(Segments, PlacesAreDisjoint) {
  const std::vector<std::vector<int64_t>> lengths = {
      {5}, {0, 0, 0}, {1, 0, 7, 64, 0}, {640, 1, 1, 1, 700, 0, 63, 65}, {64, 64, 64, 128, 4096}};
  for (const int64_t chunk_size : {16, 64}) {
    for (const int64_t chunks : {1, 2, 3, 8}) {
      const gdn::Segments segments = {chunks};
      for (const std::vector<int64_t>& sequences : lengths) {
        int64_t begin = 0;
        int64_t next_place = 0;
        const int64_t count = static_cast<int64_t>(sequences.size());
        for (int64_t n = 0; n < count; ++n) {
          const int64_t first_slot = begin / chunk_size + n;
          const int64_t place = first_slot / chunks + n;
          EXPECT_GE(place, next_place);
          next_place = place + segments.of((sequences[n] + chunk_size - 1) / chunk_size);
          begin += sequences[n];
        }
        EXPECT_LE(next_place, segments.places(begin / chunk_size + count, count));
      }
    }
  }
}

gdn::ScanSchedule schedule_of(int64_t sequences, int64_t chunks, int64_t heads, int64_t key_dim, int64_t value_dim,
                              int64_t element_bytes = 2) {
  return gdn::choose_scan_schedule({sequences, chunks, sequences * chunks, heads, key_dim, value_dim, element_bytes});
}

TEST(ScanSchedule, ManyUnitsTakeWideBlocks) {
  const gdn::ScanSchedule schedule = schedule_of(4, 128, 32, 128, 128);
  EXPECT_FALSE(schedule.narrow);
  EXPECT_FALSE(schedule.segments);
}

TEST(ScanSchedule, FewUnitsTakeNarrowBlocks) {
  const gdn::ScanSchedule schedule = schedule_of(1, 512, 32, 128, 128);
  EXPECT_TRUE(schedule.narrow);
  EXPECT_FALSE(schedule.segments);
}

TEST(ScanSchedule, FewerAreSplit) {
  EXPECT_TRUE(schedule_of(1, 512, 8, 64, 64).segments);
  EXPECT_TRUE(schedule_of(1, 512, 2, 128, 128).segments);
}

// What two more kernels cost is as much as few chunks gain.
TEST(ScanSchedule, SequencesOfFewChunksStayWhole) {
  EXPECT_FALSE(schedule_of(1, 32, 8, 128, 128).segments);
  EXPECT_FALSE(schedule_of(1, 64, 16, 128, 128).segments);
  EXPECT_TRUE(schedule_of(1, 128, 8, 128, 128).segments);
}

TEST(ScanSchedule, WideBlocksNeedRegisters) {
  EXPECT_TRUE(schedule_of(64, 64, 32, 256, 512).narrow);
  EXPECT_TRUE(schedule_of(64, 64, 32, 128, 128, 4).narrow);
  EXPECT_FALSE(schedule_of(64, 64, 32, 64, 64, 4).narrow);
  EXPECT_TRUE(schedule_of(64, 64, 32, 64, 32).narrow);  // nothing for the other half of a wide block
}

TEST(ScanSchedule, SequencesStayWholeWhereThatIsAskedFor) {
  const gdn::ScanSizes sizes = {1, 512, 512, 2, 128, 128, 2};
  EXPECT_TRUE(gdn::choose_scan_schedule(sizes).segments);
  EXPECT_FALSE(gdn::choose_scan_schedule(sizes, false).segments);
}

TEST(SummarySchedule, WideBlocksWhereTheyFillTheMachine) {
  const auto narrow = [](int64_t heads, int64_t key_dim, bool with_map, int64_t element_bytes = 2) {
    const gdn::ScanSizes sizes = {1, 128, 128, heads, key_dim, 128, element_bytes};
    return gdn::choose_summary_schedule(sizes, with_map).narrow;
  };
  EXPECT_FALSE(narrow(32, 128, true));  // 128 wide blocks, a multiprocessor each
  EXPECT_TRUE(narrow(32, 128, false));  // 64, or 128 narrow ones
  EXPECT_TRUE(narrow(16, 128, true));
  EXPECT_TRUE(narrow(32, 256, true));  // wide blocks have no registers for so many keys
  EXPECT_TRUE(narrow(32, 128, true, 4));
}

TEST(ScanSchedule, NothingToDo) { EXPECT_FALSE(schedule_of(0, 0, 4, 64, 64).segments); }

TEST(ScanSchedule, Printable) {
  EXPECT_EQ(schedule_of(4, 128, 32, 128, 128).describe(128), "blocks of 64 value columns, sequences whole");
}

TEST(Segments, Printable) {
  EXPECT_EQ(gdn::Segments{}.describe(512), "sequences whole");
  EXPECT_EQ(gdn::Segments{64}.describe(512), "segments of 64 chunks, 8 in the longest sequence");
}

}  // namespace
}  // namespace cula::test
