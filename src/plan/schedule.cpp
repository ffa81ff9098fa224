// SPDX-License-Identifier: Apache-2.0
// Runs tiles in launch order on processors, event by event, with turns at dq and clusters that
// serve units.
#include "plan/schedule.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <queue>
#include <stdexcept>

namespace flashgrad::plan {
namespace {

using Launch = Policy::Launch;
using Walk = Policy::Walk;
using Turns = Policy::Turns;

// A number in [0, 1) that depends on a and b only.
double pattern(std::uint64_t a, std::uint64_t b) {
  std::uint64_t x = a * 0x9e3779b97f4a7c15U + b * 0xbf58476d1ce4e5b9U + 0x94d049bb133111ebU;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-53;
}

// Which query block, among all of a head and of all heads, a tile visits at a step.
std::int64_t visited(const WorkTile& tile, Walk walk, std::int64_t step,
                     std::int64_t heads_stride) {
  const std::int64_t length = tile.end - tile.begin;
  const std::int64_t head = step / length;
  std::int64_t at = step % length;
  if (walk == Walk::kDescending) {
    at = length - 1 - at;
  }
  return tile.slot + head * heads_stride + tile.begin + at;
}

struct Event {
  double time;
  std::int64_t sequence;  // of events, so that ties have one order
  enum class Kind : std::uint8_t { kReadyToAdd, kTurnPassed, kTileDone } kind;
  std::int64_t index;  // a running tile, or a query block
  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : sequence > other.sequence;
  }
};

struct Running {
  std::size_t tile = 0;
  int processor = 0;
  std::int64_t step = 0;
  double begin = 0;
  double waited_before = 0;
  double compute_done = 0;       // of `step`
  std::vector<double> add_done;  // of the last slack + 1 steps, by step modulo their number
};

// What is left to do with a unit whose clusters wait for each other.
struct Unit {
  std::int64_t adding = 0;     // tiles that have not ended
  std::int64_t preparing = 0;  // clusters that have not yet
  std::int64_t finishing = 0;
};

class Simulation {
 public:
  // `keeps_adds`: of tiles that wait for no turns too.
  Simulation(const ScheduleProblem& problem, const std::vector<WorkTile>& tiles,
             const Policy& policy, const Machine& machine, bool keeps_adds)
      : tiles_(tiles),
        machine_(machine),
        turns_(problem.backward ? policy.turns : Turns::kFree),
        keeps_adds_(keeps_adds || turns_ != Turns::kFree) {
    first_step_.push_back(0);
    for (const WorkTile& tile : tiles) {
      first_step_.push_back(first_step_.back() + static_cast<std::size_t>(tile.steps));
    }
    if (keeps_adds_) {
      result_.add_times.resize(first_step_.back());
    }
    if (turns_ == Turns::kKernel) {
      take_turns();
    } else if (turns_ != Turns::kFree) {
      assign_turns(problem, policy);
    }
    for (const WorkTile& tile : tiles) {
      count(tile, 1);
    }
  }

  Timeline run() {
    for (int processor = 0; processor < machine_.processors; ++processor) {
      start_next(processor, 0);
    }
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      switch (event.kind) {
        case Event::Kind::kReadyToAdd:
          ready_to_add(static_cast<std::size_t>(event.index), event.time);
          break;
        case Event::Kind::kTurnPassed:
          pass_turn(event.index, event.time);
          break;
        case Event::Kind::kTileDone:
          finish(static_cast<std::size_t>(event.index), event.time);
          break;
      }
    }
    result_.deadlock = result_.intervals.size() < tiles_.size();
    const double capacity = machine_.processors * result_.makespan;
    if (capacity > 0) {
      double busy = 0;
      double waiting = 0;
      double serving = 0;
      for (const Interval& interval : result_.intervals) {
        busy += interval.end - interval.begin;
        waiting += interval.waiting;
        serving += interval.serves ? interval.end - interval.begin - interval.waiting : 0;
      }
      result_.idle = 1 - busy / capacity;
      result_.waiting = waiting / capacity;
      result_.serving = serving / capacity;
    }
    return std::move(result_);
  }

 private:
  // The kernel's own; a block's first turn is the lowest.
  void take_turns() {
    for (const WorkTile& tile : tiles_) {
      block_.insert(block_.end(), tile.visits.begin(), tile.visits.end());
      turn_.insert(turn_.end(), tile.turns.begin(), tile.turns.end());
    }
    for (std::size_t i = 0; i < block_.size(); ++i) {
      const auto [first, added] = next_turn_.emplace(block_[i], turn_[i]);
      first->second = std::min(first->second, turn_[i]);
    }
  }

  // The rank of every visit among those of its query block, and the block of every step.
  void assign_turns(const ScheduleProblem& problem, const Policy& policy) {
    std::int64_t heads_stride = 0;
    for (const WorkTile& tile : tiles_) {
      heads_stride = std::max(heads_stride, tile.slot + tile.end);
    }
    std::vector<double> planned;
    if (turns_ == Turns::kPlanned) {
      Policy free = policy;
      free.turns = Turns::kFree;
      planned = Simulation(problem, tiles_, free, machine_, true).run().add_times;
    }
    struct Visit {
      double key;
      std::size_t step;  // among all tiles' steps
    };
    std::map<std::int64_t, std::vector<Visit>> visits;
    block_.resize(first_step_.back());
    turn_.resize(first_step_.back());
    for (std::size_t t = 0; t < tiles_.size(); ++t) {
      for (std::int64_t step = 0; step < tiles_[t].steps; ++step) {
        const std::size_t at = first_step_[t] + static_cast<std::size_t>(step);
        block_[at] = visited(tiles_[t], policy.walk, step, heads_stride);
        const double key = turns_ == Turns::kKeyBlock ? static_cast<double>(tiles_[t].first_row)
                           : turns_ == Turns::kStep   ? static_cast<double>(step)
                                                      : planned[at];
        visits[block_[at]].push_back({key, at});
      }
    }
    for (auto& [block, list] : visits) {
      std::stable_sort(list.begin(), list.end(),
                       [](const Visit& x, const Visit& y) { return x.key < y.key; });
      for (std::size_t turn = 0; turn < list.size(); ++turn) {
        turn_[list[turn].step] = static_cast<std::int64_t>(turn);
      }
    }
  }

  double step_cycles(const Running& running) const {
    const double slow =
        machine_.processor_spread * pattern(1, static_cast<std::uint64_t>(running.processor));
    const double noise =
        machine_.jitter == 0
            ? 0
            : machine_.jitter * pattern(2 + running.tile, static_cast<std::uint64_t>(running.step));
    const double turn = turns_ == Turns::kFree ? 0 : machine_.turn_cycles;
    return machine_.step_cycles * (1 + slow + noise) + turn;
  }

  // Cycles of all that a tile does itself.
  double work_cycles(const Running& running) const {
    const WorkTile& tile = tiles_[running.tile];
    if (tile.serves) {
      return tile.served_bytes / machine_.served_bytes_per_clk;
    }
    Running replay = running;
    replay.step = 0;
    if (machine_.jitter == 0) {
      return machine_.tile_cycles + static_cast<double>(tile.steps) * step_cycles(replay);
    }
    double work = machine_.tile_cycles;
    for (; replay.step < tile.steps; ++replay.step) {
      work += step_cycles(replay);
    }
    return work;
  }

  void push(double time, Event::Kind kind, std::int64_t index) {
    events_.push({time, num_events_++, kind, index});
  }

  // Adds `by` to what is left to do with the units that the tile is concerned with.
  void count(const WorkTile& tile, int by) {
    if (!tile.serves) {
      units_[tile.unit].adding += by;
      return;
    }
    if (tile.prepares >= 0) {
      units_[tile.prepares].preparing += by;
    }
    if (tile.finishes >= 0) {
      units_[tile.finishes].finishing += by;
    }
  }

  // Whether nothing that the tile waits for before its first step is left to do.
  bool may_begin(const WorkTile& tile) const {
    const auto done = [this](std::int64_t unit, std::int64_t Unit::*left) {
      const auto at = units_.find(unit);
      return unit < 0 || at == units_.end() || at->second.*left == 0;
    };
    return tile.serves ? done(tile.finishes, &Unit::adding)
                       : done(tile.awaits_prepared, &Unit::preparing) &&
                             done(tile.awaits_finished, &Unit::finishing);
  }

  void start_next(int processor, double time) {
    if (next_ == tiles_.size()) {
      return;
    }
    Running running;
    running.tile = next_++;
    running.processor = processor;
    running.begin = time;
    running_.push_back(std::move(running));
    const std::size_t index = running_.size() - 1;
    if (may_begin(tiles_[running_[index].tile])) {
      begin(index, time);
    } else {
      held_.push_back(index);
    }
  }

  void begin(std::size_t index, double time) {
    Running& running = running_[index];
    running.waited_before = time - running.begin;
    const WorkTile& tile = tiles_[running.tile];
    if (!tile.serves && ++heads_in_use_[tile.unit] == 1) {
      bytes_in_use_ += tile.unit_bytes;
      result_.peak_bytes = std::max(result_.peak_bytes, bytes_in_use_);
      result_.peak_heads = std::max(result_.peak_heads, static_cast<double>(heads_in_use_.size()));
    }
    if (turns_ == Turns::kFree) {
      // Nobody has to wait from here on.
      if (keeps_adds_) {
        double done = time + machine_.tile_cycles;
        for (; running.step < tile.steps; ++running.step) {
          done += step_cycles(running);
          result_.add_times[step_index(running)] = done;
        }
      }
      push(time + work_cycles(running), Event::Kind::kTileDone, static_cast<std::int64_t>(index));
      return;
    }
    running.add_done.resize(static_cast<std::size_t>(machine_.slack) + 1, time);
    running.compute_done = time + machine_.tile_cycles + step_cycles(running);
    push(running.compute_done, Event::Kind::kReadyToAdd, static_cast<std::int64_t>(index));
  }

  std::size_t step_index(const Running& running) const {
    return first_step_[running.tile] + static_cast<std::size_t>(running.step);
  }

  void ready_to_add(std::size_t index, double time) {
    Running& running = running_[index];
    const std::int64_t block = block_[step_index(running)];
    if (next_turn_[block] != turn_[step_index(running)]) {
      waiting_[block].push_back(index);
      return;
    }
    push(time + machine_.signal_cycles, Event::Kind::kTurnPassed, block);
    result_.add_times[step_index(running)] = time;
    const std::size_t stages = running.add_done.size();
    running.add_done[static_cast<std::size_t>(running.step) % stages] = time;
    if (++running.step == tiles_[running.tile].steps) {
      push(time, Event::Kind::kTileDone, static_cast<std::int64_t>(index));
      return;
    }
    // The stage of this step was last used `slack` + 1 steps ago.
    const double stage_free = running.add_done[static_cast<std::size_t>(running.step) % stages];
    running.compute_done = std::max(running.compute_done, stage_free) + step_cycles(running);
    push(std::max(running.compute_done, time), Event::Kind::kReadyToAdd,
         static_cast<std::int64_t>(index));
  }

  void pass_turn(std::int64_t block, double time) {
    const std::int64_t turn = ++next_turn_[block];
    std::vector<std::size_t>& list = waiting_[block];
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (turn_[step_index(running_[list[i]])] == turn) {
        const std::size_t index = list[i];
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
        ready_to_add(index, time);
        return;
      }
    }
  }

  void finish(std::size_t index, double time) {
    const Running& running = running_[index];
    const WorkTile& tile = tiles_[running.tile];
    const int processor = running.processor;
    result_.intervals.push_back({processor, tile.unit, tile.first_row, running.begin, time,
                                 std::max(time - running.begin - work_cycles(running), 0.0),
                                 running.waited_before, tile.serves});
    result_.makespan = std::max(result_.makespan, time);
    if (!tile.serves) {
      const auto in_use = heads_in_use_.find(tile.unit);
      if (--in_use->second == 0) {
        heads_in_use_.erase(in_use);
        bytes_in_use_ -= tile.unit_bytes;
      }
    }
    count(tile, -1);
    const auto able = std::stable_partition(held_.begin(), held_.end(), [this](std::size_t held) {
      return !may_begin(tiles_[running_[held].tile]);
    });
    const std::vector<std::size_t> released(able, held_.end());
    held_.erase(able, held_.end());
    for (const std::size_t other : released) {
      begin(other, time);
    }
    start_next(processor, time);
  }

  const std::vector<WorkTile>& tiles_;
  const Machine& machine_;
  Turns turns_;
  bool keeps_adds_;
  std::vector<std::size_t> first_step_;  // of each tile, among all steps
  std::vector<std::int64_t> block_;      // of each step
  std::vector<std::int64_t> turn_;       // of each step
  std::map<std::int64_t, std::int64_t> next_turn_;
  std::map<std::int64_t, std::vector<std::size_t>> waiting_;
  std::map<std::int64_t, Unit> units_;
  std::vector<std::size_t> held_;  // running tiles that may not begin yet
  std::map<std::int64_t, int> heads_in_use_;
  double bytes_in_use_ = 0;
  std::vector<Running> running_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::int64_t num_events_ = 0;
  std::size_t next_ = 0;
  Timeline result_;
};

}  // namespace

const std::vector<Policy>& policies(bool backward) {
  static const std::vector<Policy> kForwardPolicies = {
      {"natural", "one head after the other, query blocks ascending", Launch::kNatural, false,
       Walk::kDescending, Turns::kFree},
      {"sections", "sections of heads, longest tiles first: the sm90 forward's",
       Launch::kLongestFirst, true, Walk::kDescending, Turns::kFree},
  };
  static const std::vector<Policy> kBackwardPolicies = {
      {"natural", "one head after the other, key blocks ascending", Launch::kNatural, false,
       Walk::kDescending, Turns::kFree},
      {"sections", "sections of heads, key blocks ascending: the sm90 backward's if none serve",
       Launch::kNatural, true, Walk::kDescending, Turns::kFree},
      {"units", "sections of heads whose units some clusters serve: the sm90 backward's if it can",
       Launch::kNatural, true, Walk::kDescending, Turns::kFree, true},
      {"longest-first", "sections of heads, sorted by work", Launch::kLongestFirst, true,
       Walk::kDescending, Turns::kFree},
      {"turns-natural", "natural, query blocks ascending, turns by key block", Launch::kNatural,
       false, Walk::kAscending, Turns::kKeyBlock},
      {"turns-sm90", "the ordered sm90 backward's: sections, its own walk and turns",
       Launch::kNatural, true, Walk::kDescending, Turns::kKernel},
      {"turns-shortest-first", "one head after the other, shortest first, turns by step",
       Launch::kShortestFirst, false, Walk::kAscending, Turns::kStep},
      {"turns-shortest-swizzled", "sections of heads, shortest first: FlashAttention-4's",
       Launch::kShortestFirst, true, Walk::kAscending, Turns::kStep},
      {"turns-planned", "longest first, turns as a free run takes them", Launch::kLongestFirst,
       true, Walk::kDescending, Turns::kPlanned},
  };
  return backward ? kBackwardPolicies : kForwardPolicies;
}

const Policy& find_policy(bool backward, const std::string& name) {
  std::string names;
  for (const Policy& policy : policies(backward)) {
    if (name == policy.name) {
      return policy;
    }
    names += (names.empty() ? "" : ", ") + std::string(policy.name);
  }
  throw std::invalid_argument("no order '" + name + "', want one of: " + names);
}

Timeline simulate(const ScheduleProblem& problem, const std::vector<WorkTile>& tiles,
                  const Policy& policy, const Machine& machine) {
  return Simulation(problem, tiles, policy, machine, false).run();
}

double unit_bytes(const ScheduleProblem& problem, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  const auto d = static_cast<double>(problem.head_dim);
  const auto dv = static_cast<double>(problem.width_v());
  const auto group = static_cast<double>(problem.heads_q) / static_cast<double>(problem.heads_kv);
  return problem.backward ? group * static_cast<double>(seqlen_q) * (2 * d + 2 * dv + 4 * d)
                          : static_cast<double>(seqlen_kv) * 2 * (d + dv);
}

}  // namespace flashgrad::plan
