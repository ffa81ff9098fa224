// SPDX-License-Identifier: Apache-2.0
// Tile programs in the simulator: right numbers, the bytes of the account, and faults that are
// found.
#include "plan/simulator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "plan/account.hpp"
#include "plan/judge.hpp"

namespace flashgrad::plan {
namespace {

void expect_right(HeadData& data) {
  const std::vector<check::OutputResult> results = judge_gradients(data);
  EXPECT_EQ(results.size(), 3U);
  for (const check::OutputResult& result : results) {
    EXPECT_TRUE(result.ok) << result.name << ": error " << result.error << ", bound "
                           << result.bound << " " << result.reason;
  }
}

std::string messages(const std::vector<Fault>& faults) {
  std::string text;
  for (const Fault& fault : faults) {
    text += fault.message + "\n";
  }
  return text;
}

class PlanProgram : public testing::TestWithParam<const char*> {
 protected:
  const ProgramChoice& program() const { return find_program(GetParam()); }
  HeadData head(int queries, int keys, bool causal, std::uint64_t seed) const {
    return random_head(queries, keys, program().head_dim, causal, seed, program().head_dim_v);
  }
};

INSTANTIATE_TEST_SUITE_P(All, PlanProgram,
                         testing::Values("fa4", "fa4-2cta", "sm90-d64", "sm90-d96", "sm90-d128",
                                         "sm90-d128-cluster", "sm90-d128-ordered",
                                         "sm90-wide-d192-v128", "sm90-wide-d192", "sm90-wide-d256",
                                         "sm90-wide-dq-d192", "sm90-wide-dq-d256"),
                         [](const testing::TestParamInfo<const char*>& param) {
                           std::string name = param.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(PlanProgram, GradientsAreRight) {
  for (const bool causal : {false, true}) {
    HeadData data = head(512, 512, causal, 1);
    const SimulationResult result = run_backward(program(), data);
    EXPECT_TRUE(result.faults.empty()) << messages(result.faults);
    expect_right(data);
  }
}

// The order in which agents run is free where barriers leave it free, and changes nothing.
TEST_P(PlanProgram, AnyOrderOfEventsGivesTheSameBits) {
  HeadData first = head(256, 256, false, 2);
  HeadData second = first;
  run_backward(program(), first, 1);
  const SimulationResult result = run_backward(program(), second, 12345);
  EXPECT_TRUE(result.faults.empty()) << messages(result.faults);
  EXPECT_EQ(first.dk, second.dk);
  EXPECT_EQ(first.dv, second.dv);
  EXPECT_EQ(first.dq, second.dq);
}

TEST_P(PlanProgram, BytesAreThoseOfTheAccount) {
  HeadData data = head(512, 256, false, 3);
  const Program built = program().make(data, 0);
  const SimulationResult result = run(built, data);
  const auto expected = shared_bytes_by_use(find_kernel(program().kernel));
  for (const auto& bytes : result.shared_bytes) {
    for (std::size_t use = 0; use < kNumUses; ++use) {
      EXPECT_EQ(bytes[use], expected[use] * built.steps) << name_of(static_cast<Use>(use));
    }
  }
}

// A role and the barrier that it waits for, whatever the CTA.
using Wait = std::pair<std::string, std::string>;

// Waits that other waits imply.
std::set<Wait> implied_waits(const std::string& program) {
  // The sm90 loader's, who is of the dq warpgroup: before it reaches them it has waited for dS of
  // the step, and so for all that the consumers had waited for.
  const std::string loader = "dq and loads";
  if (program == "sm90-d64" || program == "sm90-d96" || program == "sm90-d128") {
    return {{loader, "k_full"}, {loader, "q_empty"}, {loader, "do_empty"}};
  }
  if (program == "sm90-d128-cluster") {
    return {{loader, "k_full"}, {loader, "peer_ds_empty"}};
  }
  if (program == "sm90-d128-ordered") {
    return {{loader, "k_full"}};
  }
  // Who has waited for P has waited for the Q that it is made of, and for P's last products.
  std::set<Wait> waits;
  if (program.find("sm90-wide-d") == 0 && program.find("dq") == std::string::npos) {
    waits = {{"dS", "q_full"}, {"dS", "done"}};
  }
  // As many stages of Q as slots: dS releases Q after the slot.
  if (program == "sm90-wide-d192-v128") {
    waits.insert({"P", "p_empty"});
  }
  return waits;
}

// Every wait but those is needed: without it the program is reported as faulty, with this number of
// steps or that.
TEST_P(PlanProgram, EveryWaitThatIsLeftOutIsMissed) {
  std::set<std::tuple<std::string, int, std::string>> all;
  std::set<std::tuple<std::string, int, std::string>> missed;
  for (const int queries : {512, program().keys == 0 ? 1024 : 640}) {
    const HeadData data = head(queries, 256, false, 4);
    const Program built = program().make(data, 0);
    for (const WaitSite& site : wait_sites(built)) {
      HeadData fresh = data;
      all.emplace(site.role, site.cta, site.barrier);
      if (!run(without(built, site), fresh).faults.empty()) {
        missed.emplace(site.role, site.cta, site.barrier);
      }
    }
  }
  EXPECT_GE(all.size(), 10U);
  std::set<Wait> unmissed;
  for (const auto& site : all) {
    if (!missed.contains(site)) {
      unmissed.emplace(std::get<0>(site), std::get<2>(site));
    }
  }
  EXPECT_EQ(unmissed, implied_waits(program().name));
}

Role& role_of(Program& program, const std::string& name, int cta = 0) {
  return *std::find_if(program.roles.begin(), program.roles.end(),
                       [&](const Role& role) { return role.name == name && role.cta == cta; });
}

// Three faults in three programs, each reported with its tile and the names of what is wrong.

// dQ takes the columns of dS while dK still has to read it.
TEST(PlanFaults, ColumnsOverwrittenWhileLive) {
  HeadData data = random_head(512, 128, 128, false, 5);
  Program program = find_program("fa4").make(data, 0);
  std::vector<Operation>& operations = role_of(program, "products").operations;
  const auto find = [&](const char* name) {
    return std::find_if(operations.begin(), operations.end(), [&](const Operation& operation) {
      return operation.name == name && operation.step == 2;
    });
  };
  std::iter_swap(find("dK"), find("dQ"));
  const SimulationResult result = run(program, data);
  ASSERT_FALSE(result.faults.empty());
  EXPECT_EQ(result.faults[0].kind, Fault::Kind::kOverwritten);
  EXPECT_EQ(result.faults[0].message,
            "tile 2: dK (the tensor cores of CTA 0) reads dS of tile 1 in columns 128..191: it was "
            "overwritten by dQ of tile 1, written by the tensor cores of CTA 0");
}

// The relay says that the peer's half of dS has landed without having waited for it.
TEST(PlanFaults, ExchangeNotWaitedFor) {
  HeadData data = random_head(512, 256, 128, false, 6);
  const Program program =
      without(find_program("fa4-2cta").make(data, 0), {"relay", 1, "dS landed"});
  const SimulationResult result = run(program, data);
  ASSERT_FALSE(result.faults.empty());
  const std::string& message = result.faults[0].message;
  EXPECT_NE(message.find("dQ (the tensor cores of CTA 0) reads dS of tile"), std::string::npos)
      << message;
}

// The dq warpgroup of CTA 1 reads the wrong stage of its peer's dS in one step.
TEST(PlanFaults, WrongStage) {
  HeadData data = random_head(512, 256, 128, false, 7);
  Program program = find_program("sm90-d128-cluster").make(data, 0);
  int reads = 0;
  for (Operation& operation : role_of(program, "dq and loads", 1).operations) {
    for (Access& access : operation.reads) {
      if (access.view.place == "peer's dS" && ++reads == 4) {
        access.view.offset -= static_cast<int>(access.view.bytes());
      }
    }
  }
  const SimulationResult result = run(program, data);
  ASSERT_FALSE(result.faults.empty());
  EXPECT_NE(
      result.faults[0].message.find("tile 3: dQ (the tensor cores of CTA 1) reads dS of tile 3 "
                                    "in peer's dS: it still holds dS of tile 2"),
      std::string::npos)
      << result.faults[0].message;
}

// Above head dim 128 dS is written over P: the first queries' before the others' P has been read.
TEST(PlanFaults, HandOverOverwritten) {
  HeadData data = random_head(512, 128, 256, false, 10);
  Program program = find_program("sm90-wide-d256").make(data, 0);
  std::vector<Operation>& operations = role_of(program, "dS").operations;
  const auto of_step_4 = [&](const char* name, int skip) {
    return std::find_if(operations.begin(), operations.end(),
                        [&, skip](const Operation& o) mutable {
                          return o.name == name && o.step == 4 &&
                                 o.kind == Operation::Kind::kCompute && skip-- == 0;
                        });
  };
  std::iter_swap(of_step_4("P", 3), of_step_4("dS", 0));
  const SimulationResult result = run(program, data);
  ASSERT_FALSE(result.faults.empty());
  EXPECT_NE(messages(result.faults)
                .find("tile 4: P (dS of CTA 0) reads P of tile 4 in slot: it was "
                      "overwritten by dS of tile 4"),
            std::string::npos)
      << messages(result.faults);
}

// The dq kernel gives a stage back under the product that still reads it.
TEST(PlanFaults, StageReleasedUnderItsProduct) {
  HeadData data = random_head(512, 512, 192, false, 11, 128);
  Program program = find_program("sm90-wide-dq-d192").make(data, 0);
  for (Operation& operation : role_of(program, "consumer 1").operations) {
    if (operation.kind == Operation::Kind::kWaitProducts) {
      operation.number = 2;
    }
  }
  const SimulationResult result = run(program, data);
  ASSERT_FALSE(result.faults.empty());
  EXPECT_NE(result.faults[0].message.find("while the tensor cores of CTA 0 may still read"),
            std::string::npos)
      << result.faults[0].message;
}

// The images of dS are swapped in global memory: no barrier is at fault, the gradient is.
TEST(PlanFaults, WrongImageOfDs) {
  HeadData data = random_head(256, 256, 256, false, 12);
  const ProgramChoice& keys = find_program("sm90-wide-d256");
  for (int first_key = 0; first_key < 256; first_key += keys.keys) {
    EXPECT_TRUE(run(keys.make(data, first_key), data).faults.empty());
  }
  std::swap_ranges(data.ds.begin(), data.ds.begin() + 64 * 64, data.ds.begin() + 64 * 64);
  EXPECT_TRUE(run(find_program("sm90-wide-dq-d256").make(data, 0), data).faults.empty());
  for (const check::OutputResult& output : judge_gradients(data)) {
    EXPECT_EQ(output.ok, output.name != std::string("dq")) << output.name;
  }
}

TEST(PlanFaults, ArrivalThatNeverComes) {
  HeadData data = random_head(512, 128, 128, false, 8);
  Program program = find_program("fa4").make(data, 0);
  const auto p_full = [&](const Operation& operation) {
    return operation.kind == Operation::Kind::kArrive && operation.step == 1 &&
           program.barriers[static_cast<std::size_t>(operation.barriers[0])].name == "P full";
  };
  std::erase_if(role_of(program, "softmax").operations, p_full);
  const SimulationResult result = run(program, data);
  ASSERT_FALSE(result.faults.empty());
  EXPECT_EQ(result.faults[0].kind, Fault::Kind::kDeadlock);
  EXPECT_NE(messages(result.faults).find("products of CTA 0 waits for ever for P full"),
            std::string::npos)
      << messages(result.faults);
}

TEST(PlanFaults, TooManyColumns) {
  HeadData data = random_head(128, 128, 128, false, 9);
  Program program = find_program("fa4").make(data, 0);
  program.tensor_regions.push_back({"another accumulator", 512, 128});
  const SimulationResult result = run(program, data);
  ASSERT_FALSE(result.faults.empty());
  EXPECT_EQ(result.faults[0].kind, Fault::Kind::kDoesNotFit);
  EXPECT_EQ(result.faults[0].message, "columns of tensor memory: 640 of 512");
}

}  // namespace
}  // namespace flashgrad::plan
