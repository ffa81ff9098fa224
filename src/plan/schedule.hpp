// SPDX-License-Identifier: Apache-2.0
// In what order tiles run on the processors of a GPU, and what that costs: idle processors at the
// end, waiting for turns at dq, and how much of the tensors is in use at a time. The tiles and
// their orders come from the code that the sm90 kernels run (fwd_schedule.hpp, key_tile.cuh,
// unit_pipeline.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/mask.hpp"
#include "core/problem.hpp"

namespace flashgrad::plan {

struct ScheduleProblem {
  bool backward = true;
  std::int64_t batch = 1;
  std::int64_t seqlen_q = 0;  // of each batch entry, unless packed
  std::int64_t seqlen_kv = 0;
  std::vector<std::int32_t> packed_q;  // lengths of a packed batch; empty: fixed length
  std::vector<std::int32_t> packed_kv;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 1;
  std::int64_t head_dim = 128;
  std::int64_t head_dim_v = 0;  // 0: head_dim
  BandMask mask;
  // Heads whose tiles are launched together: swizzled, unless packed. Then a section of each
  // sequence's own heads follows from the L2 in the kernels' order; other orders keep to this one.
  std::int64_t section = 1;
  double l2_bytes = 60 << 20;
  bool incomplete_first = true;  // of the forward's tiles, in the kernels' order (sm90::tile_rows)
  std::int64_t head_parts = 1;   // of heads_kv that are parts of one head of k and v (in_parts)

  [[nodiscard]] std::int64_t width_v() const { return head_dim_v > 0 ? head_dim_v : head_dim; }
  // As the kernels' headers take it, with all gradients wanted.
  [[nodiscard]] Problem to_problem() const;
};

struct WorkTile {
  std::int64_t unit = 0;      // the head (and batch entry) whose tensors it reads
  std::int64_t sequence = 0;  // of the batch
  std::int64_t head = 0;
  std::int64_t first_row = 0;  // first key (backward) or query (forward)
  // Backward: query blocks [begin, end) of 64 rows of each of the group's heads, from number
  // `slot` on among all blocks of a head. Forward: key blocks.
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t slot = 0;
  std::int64_t steps = 0;
  double unit_bytes = 0;  // of the tensors that the unit's tiles share
  // With the kernel's turns: the query block of each step, and the tile's turn there.
  std::vector<std::int64_t> visits;
  std::vector<std::int64_t> turns;
  // Where units are served: units that have to be prepared, and finished, before it starts its
  // steps; -1: none.
  std::int64_t awaits_prepared = -1;
  std::int64_t awaits_finished = -1;
  // Of a cluster that serves unit `unit` instead of computing a tile of it: the units that it
  // prepares, and finishes once their tiles have ended, and the bytes that it moves. Units beyond
  // the last are served by several, each with a part.
  bool serves = false;
  std::int64_t prepares = -1;
  std::int64_t finishes = -1;
  double served_bytes = 0;
};

// How a launch order, a walk over the steps of a tile and the turns at dq go together.
struct Policy {
  const char* name;
  const char* description;
  enum class Launch : std::uint8_t {
    kNatural,        // the kernel's: in sections of heads, ascending blocks
    kLongestFirst,   // in each section, by the number of steps
    kShortestFirst,  // likewise
  } launch;
  bool swizzled;  // sections of ScheduleProblem::section heads; otherwise of one
  enum class Walk : std::uint8_t { kDescending, kAscending } walk;  // the kernel's has its own
  enum class Turns : std::uint8_t {
    kFree,      // whoever is ready adds to dq: the bits change from run to run
    kKeyBlock,  // ascending key blocks
    kStep,      // in the order of the steps at which the tiles come to a query block
    kKernel,    // as the ordered sm90 kernels do: by key block, rotated where a mask hides nothing
    kPlanned,   // in the order of a run without turns: depends on the whole batch and the machine
  } turns;
  bool serves = false;  // some clusters prepare and finish units for the others
};

const std::vector<Policy>& policies(bool backward);
const Policy& find_policy(bool backward, const std::string& name);

// The tiles of a problem with work to do, in launch order. `tile_n` x `cluster` keys (backward:
// 128 or 256, 1 or 2) or `tile_n` keys of a step (forward: 80, 96 or 128).
struct TileSize {
  int rows = 128;  // forward
  int keys = 128;
  int cluster = 1;
  int max_round = 32;  // of rotating tiles: at most half of the processors (bwd_launch.cu)
  int slots = 132;     // tiles, or clusters of tiles, that run at a time
};
std::vector<WorkTile> launch_order(const ScheduleProblem& problem, const Policy& policy,
                                   const TileSize& tile);

// How the units of a call pass through the sm90 backward's main kernel (unit_pipeline.hpp), as its
// launch plans it (bwd_plan.hpp) for `tile.slots` SMs or clusters, in sections of
// ScheduleProblem::section units.
struct ServedUnits {
  std::string why_not;  // empty: they are served
  std::int64_t section = 0;
  std::int64_t slots = 0;
  std::int64_t lead = 0;
  std::int64_t lag = 0;
  std::int64_t last_parts = 0;
  double slot_bytes = 0;  // f32 sums of dq of a unit
};
ServedUnits served_units(const ScheduleProblem& problem, const TileSize& tile);
// The launch's own section of units; 0 if it serves none.
std::int64_t planned_section(const ScheduleProblem& problem, const TileSize& tile);
// `launch_order` of a policy that serves; throws std::invalid_argument with `why_not`.
std::vector<WorkTile> served_order(const ScheduleProblem& problem, const TileSize& tile);

// The call as the sm90 backward's launch sees it: its key heads in parts (bwd_plan.hpp).
ScheduleProblem in_parts(ScheduleProblem problem, bool deterministic, int num_multiprocessors);

// What the kernels before and after the backward's main one move, up to head dim 128.
struct EndBytes {
  double prepare = 0;
  double sum = 0;     // of parts; 0: there is no such kernel
  double finish = 0;  // likewise
};
EndBytes end_bytes(const ScheduleProblem& problem, const Policy& policy, const TileSize& tile);

// The backward above head dim 128 runs in passes, each a kernel for the keys and one for dq
// (docs/gpu-backward.md), with the workspace that it prefers. A tile of a cluster appears once.
struct WidePassTiles {
  std::vector<WorkTile> keys;
  std::vector<WorkTile> queries;
};
std::vector<WidePassTiles> wide_launch_order(const ScheduleProblem& problem,
                                             int num_multiprocessors, std::int64_t l2_bytes);
int wide_cluster(const ScheduleProblem& problem);  // CTAs of a cluster, in both kernels

struct Machine {
  int processors = 132;  // SMs, or clusters
  double step_cycles = 2560;
  double tile_cycles = 0;       // of a tile besides its steps: filling and emptying the pipeline
  double signal_cycles = 0;     // from an addition to dq until another processor sees it
  double turn_cycles = 0;       // that a step takes longer with turns: polling and the fence
  int slack = 1;                // steps that the products may be ahead of the additions
  double jitter = 0;            // steps take up to this share longer, by a fixed pattern
  double processor_spread = 0;  // and processors are slower by up to this share
  double served_bytes_per_clk = 64;  // that a processor moves which serves a unit
};

struct Interval {
  int processor;
  std::int64_t unit;
  std::int64_t first_row;
  double begin;
  double end;
  double waiting;         // all of it
  double waiting_before;  // before its first step
  bool serves;
};

struct Timeline {
  double makespan = 0;  // cycles
  double idle = 0;      // shares of processors x makespan
  double waiting = 0;
  double peak_heads = 0;  // units in use at a time
  double peak_bytes = 0;  // and their tensors
  bool deadlock = false;  // every processor waits for a tile that has not started
  std::vector<Interval> intervals;
  double serving = 0;             // share of processors x makespan that serves units
  std::vector<double> add_times;  // with turns: of all steps, in the order of tiles and walks
};

Timeline simulate(const ScheduleProblem& problem, const std::vector<WorkTile>& tiles,
                  const Policy& policy, const Machine& machine);

// Bytes that the tiles of a head share: q, dout and the f32 dq sums (backward), k and v (forward).
double unit_bytes(const ScheduleProblem& problem, std::int64_t seqlen_q, std::int64_t seqlen_kv);

// Heads that the sm90 kernels launch together: those whose such bytes fill a share of the L2, and
// in the backward as many as fill `processors` SMs or clusters (section_order.hpp,
// units_per_section in fwd_launch.cu).
std::int64_t kernel_section(const ScheduleProblem& problem, const Policy& policy,
                            const TileSize& tile, int processors, double l2_bytes);

// 0 and the sums of the first one, two, ... lengths.
std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths);

}  // namespace flashgrad::plan
