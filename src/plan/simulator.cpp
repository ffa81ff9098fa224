// SPDX-License-Identifier: Apache-2.0
// The engine of the simulator: agents that take turns, barriers that carry clocks.
#include "plan/simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>

#include "plan/simulator_memory.hpp"

namespace flashgrad::plan {
namespace {

constexpr std::size_t kMaxFaults = 8;

struct Phase {
  int arrivals = 0;
  Clock clock;
};

struct Job {  // of a pipe or a copy engine
  const Operation* operation;
  int agent;
};

class Engine {
 public:
  Engine(const Program& program, HeadData& data, std::uint64_t seed)
      : program_(program), random_(seed), memories_(program, data, agents_, result_.faults) {
    result_.shared_bytes.resize(static_cast<std::size_t>(program.ctas));
    for (auto& uses : result_.shared_bytes) {
      uses.fill(0);
    }
  }

  SimulationResult run() {
    check_capacity();
    for (const Role& role : program_.roles) {
      add_agent(role.name, role.cta);
    }
    for (int pipe = 0; pipe < program_.pipes; ++pipe) {
      add_agent("the tensor cores", 0);
    }
    pipes_.resize(static_cast<std::size_t>(program_.pipes));
    pipe_groups_.resize(pipes_.size());
    phases_.resize(program_.barriers.size());
    position_.resize(program_.roles.size());
    copies_.resize(program_.roles.size());
    while (result_.faults.size() < kMaxFaults && step_someone()) {
    }
    if (result_.faults.size() < kMaxFaults) {
      check_finished();
    }
    memories_.read_back();
    result_.faults.resize(std::min(result_.faults.size(), kMaxFaults));
    return std::move(result_);
  }

 private:
  void fault(Fault::Kind kind, const std::string& message) {
    result_.faults.push_back({kind, message});
  }

  void check_capacity() {
    const auto check = [this](const std::vector<Region>& regions, int limit, const char* what) {
      int end = 0;
      for (const Region& region : regions) {
        end = std::max(end, region.offset + region.size);
      }
      if (end > limit) {
        fault(Fault::Kind::kDoesNotFit, fmt::format("{}: {} of {}", what, end, limit));
      }
    };
    check(program_.shared_regions, kSharedBytes, "bytes of shared memory");
    check(program_.tensor_regions, kTensorColumns, "columns of tensor memory");
  }

  int add_agent(const std::string& name, int cta) {
    Agent agent;
    agent.name = name;
    agent.cta = cta;
    agent.clock.resize(agents_.size() + 1);
    agent.clock.back() = 1;
    agents_.push_back(std::move(agent));
    return static_cast<int>(agents_.size()) - 1;
  }

  Agent& agent(int index) { return agents_[static_cast<std::size_t>(index)]; }
  int pipe_agent(int pipe) const { return static_cast<int>(program_.roles.size()) + pipe; }

  // What the agent does from now on is not what others have learned of it.
  void tick(int index) { ++agent(index).clock[static_cast<std::size_t>(index)]; }

  void count(const Access& access) {
    if (access.view.store == Store::kShared && access.use >= 0) {
      result_.shared_bytes[static_cast<std::size_t>(access.view.owner)]
                          [static_cast<std::size_t>(access.use)] += access.view.bytes();
    }
  }

  void execute(const Operation& operation, int by, std::size_t lane) {
    result_.trace.push_back({static_cast<int>(lane), operation.name, operation.step});
    std::vector<Matrix> inputs;
    for (const Access& access : operation.reads) {
      inputs.push_back(memories_.read(operation, access, by));
      count(access);
    }
    const std::vector<Matrix> outputs =
        operation.function ? operation.function(inputs)
                           : std::vector<Matrix>(operation.writes.size(), inputs.at(0));
    for (std::size_t i = 0; i < operation.writes.size(); ++i) {
      memories_.write(operation, operation.writes[i], outputs.at(i), by);
      count(operation.writes[i]);
    }
  }

  void arrive(const Operation& operation, int by) {
    for (const int barrier : operation.barriers) {
      std::vector<Phase>& phases = phases_[static_cast<std::size_t>(barrier)];
      const int count = program_.barriers[static_cast<std::size_t>(barrier)].count;
      if (phases.empty() || phases.back().arrivals == count) {
        phases.emplace_back();
      }
      ++phases.back().arrivals;
      join(phases.back().clock, agent(by).clock);
    }
    tick(by);
  }

  // Whether the role's next operation can go on.
  bool is_ready(std::size_t role) const {
    const std::vector<Operation>& operations = program_.roles[role].operations;
    if (position_[role] == operations.size()) {
      return false;
    }
    const Operation& next = operations[position_[role]];
    switch (next.kind) {
      case Operation::Kind::kWait: {
        const auto barrier = static_cast<std::size_t>(next.barriers.at(0));
        const auto phase = static_cast<std::size_t>(next.number);
        return next.number < 0 ||
               (phase < phases_[barrier].size() &&
                phases_[barrier][phase].arrivals == program_.barriers[barrier].count);
      }
      case Operation::Kind::kWaitProducts: {
        const auto pipe = static_cast<std::size_t>(program_.roles[role].pipe);
        const auto left = std::count_if(
            pipes_[pipe].begin(), pipes_[pipe].end(),
            [](const Job& job) { return job.operation->kind == Operation::Kind::kCommit; });
        return left <= next.number;
      }
      case Operation::Kind::kWaitCopies:
        return static_cast<int>(pending_copies(role)) <= next.number;
      default:
        return true;
    }
  }

  std::size_t pending_copies(std::size_t role) const {
    return static_cast<std::size_t>(std::count_if(copies_[role].begin(), copies_[role].end(),
                                                  [](const Job& job) { return job.agent >= 0; }));
  }

  void step_role(std::size_t role) {
    const Role& r = program_.roles[role];
    const Operation& operation = r.operations[position_[role]++];
    const auto self = static_cast<int>(role);
    switch (operation.kind) {
      case Operation::Kind::kCompute:
        execute(operation, self, role);
        break;
      case Operation::Kind::kProduct:
      case Operation::Kind::kCommit: {
        pipes_[static_cast<std::size_t>(r.pipe)].push_back({&operation, self});
        issued_clocks_[static_cast<const void*>(&operation)] = agent(self).clock;
        tick(self);
        break;
      }
      case Operation::Kind::kCopy: {
        const int copy = add_agent(
            fmt::format("the copy of {} of tile {}", operation.name, operation.step), r.cta);
        join(agent(copy).clock, agent(self).clock);
        tick(self);
        copies_[role].push_back({&operation, copy});
        break;
      }
      case Operation::Kind::kWaitProducts: {
        // All groups but the last `number` are done.
        std::vector<Clock>& groups = pipe_groups_[static_cast<std::size_t>(r.pipe)];
        const auto left = std::count_if(
            pipes_[static_cast<std::size_t>(r.pipe)].begin(),
            pipes_[static_cast<std::size_t>(r.pipe)].end(),
            [](const Job& job) { return job.operation->kind == Operation::Kind::kCommit; });
        // Groups beyond those asked for may be done by luck; they don't count.
        const auto done = static_cast<std::ptrdiff_t>(groups.size()) - (operation.number - left);
        if (done > 0) {
          join(agent(self).clock, groups[static_cast<std::size_t>(done - 1)]);
        }
        break;
      }
      case Operation::Kind::kWaitCopies: {
        std::vector<Clock>& done = done_copies_[role];
        const auto left = static_cast<std::ptrdiff_t>(pending_copies(role));
        const auto counted = static_cast<std::ptrdiff_t>(done.size()) - (operation.number - left);
        for (std::ptrdiff_t i = 0; i < counted; ++i) {
          join(agent(self).clock, done[static_cast<std::size_t>(i)]);
        }
        break;
      }
      case Operation::Kind::kArrive:
        arrive(operation, self);
        break;
      case Operation::Kind::kWait:
        if (operation.number >= 0) {
          join(agent(self).clock, phases_[static_cast<std::size_t>(operation.barriers[0])]
                                         [static_cast<std::size_t>(operation.number)]
                                             .clock);
        }
        break;
    }
  }

  void step_pipe(std::size_t pipe) {
    const Job job = pipes_[pipe].front();
    pipes_[pipe].pop_front();
    const int self = pipe_agent(static_cast<int>(pipe));
    agent(self).cta = program_.roles[static_cast<std::size_t>(job.agent)].cta;
    join(agent(self).clock, issued_clocks_[static_cast<const void*>(job.operation)]);
    if (job.operation->kind == Operation::Kind::kProduct) {
      execute(*job.operation, self, 2 * program_.roles.size() + pipe);
    } else {
      pipe_groups_[pipe].push_back(agent(self).clock);
      arrive(*job.operation, self);
    }
  }

  void step_copy(std::size_t role) {
    // Bulk copies of one role may overtake each other; those that are waited for by number do not.
    const auto job = std::find_if(copies_[role].begin(), copies_[role].end(),
                                  [](const Job& j) { return j.agent >= 0; });
    const Job taken = *job;
    job->agent = -1;
    execute(*taken.operation, taken.agent, program_.roles.size() + role);
    done_copies_[role].push_back(agent(taken.agent).clock);
    arrive(*taken.operation, taken.agent);
  }

  // Lets one agent that can go on do so; false if none can.
  bool step_someone() {
    const std::size_t roles = program_.roles.size();
    std::vector<std::size_t> able;
    for (std::size_t role = 0; role < roles; ++role) {
      if (is_ready(role)) {
        able.push_back(role);
      }
      if (pending_copies(role) > 0) {
        able.push_back(roles + role);
      }
    }
    for (std::size_t pipe = 0; pipe < pipes_.size(); ++pipe) {
      if (!pipes_[pipe].empty()) {
        able.push_back(2 * roles + pipe);
      }
    }
    if (able.empty()) {
      return false;
    }
    random_ = random_ * 6364136223846793005U + 1442695040888963407U;
    const std::size_t chosen = able[(random_ >> 33) % able.size()];
    if (chosen < roles) {
      step_role(chosen);
    } else if (chosen < 2 * roles) {
      step_copy(chosen - roles);
    } else {
      step_pipe(chosen - 2 * roles);
    }
    return true;
  }

  void check_finished() {
    for (std::size_t role = 0; role < program_.roles.size(); ++role) {
      const Role& r = program_.roles[role];
      if (position_[role] < r.operations.size()) {
        const Operation& next = r.operations[position_[role]];
        const std::string barrier =
            next.barriers.empty()
                ? std::string("its own work")
                : program_.barriers[static_cast<std::size_t>(next.barriers[0])].name;
        fault(Fault::Kind::kDeadlock,
              fmt::format("tile {}: {} of CTA {} waits for ever for {}, phase {}", next.step,
                          r.name, r.cta, barrier, next.number));
      }
    }
  }

  const Program& program_;
  std::uint64_t random_;
  SimulationResult result_;
  std::vector<Agent> agents_;               // roles, pipes, then copies
  std::vector<std::vector<Phase>> phases_;  // of each barrier
  std::vector<std::deque<Job>> pipes_;
  std::vector<std::vector<Clock>> pipe_groups_;  // of each pipe: clocks of its finished groups
  std::vector<std::size_t> position_;            // of each role
  std::vector<std::vector<Job>> copies_;         // of each role; agent -1: done
  std::map<std::size_t, std::vector<Clock>> done_copies_;
  std::map<const void*, Clock> issued_clocks_;
  Memories memories_;
};

}  // namespace

View View::part(int row, int num_rows, int column, int num_columns) const {
  View view = *this;
  view.offset += row * stride + column * size_of(element);
  view.rows = num_rows;
  view.columns = num_columns;
  return view;
}

SimulationResult run(const Program& program, HeadData& data, std::uint64_t seed) {
  return Engine(program, data, seed).run();
}

std::vector<WaitSite> wait_sites(const Program& program) {
  std::vector<WaitSite> sites;
  for (const Role& role : program.roles) {
    for (const Operation& operation : role.operations) {
      if (operation.kind != Operation::Kind::kWait) {
        continue;
      }
      const std::string& name =
          program.barriers[static_cast<std::size_t>(operation.barriers[0])].name;
      const auto same = [&](const WaitSite& site) {
        return site.role == role.name && site.cta == role.cta && site.barrier == name;
      };
      if (std::none_of(sites.begin(), sites.end(), same)) {
        sites.push_back({role.name, role.cta, name});
      }
    }
  }
  return sites;
}

Program without(const Program& program, const WaitSite& site) {
  Program changed = program;
  for (Role& role : changed.roles) {
    if (role.name == site.role && role.cta == site.cta) {
      std::erase_if(role.operations, [&](const Operation& operation) {
        return operation.kind == Operation::Kind::kWait &&
               program.barriers[static_cast<std::size_t>(operation.barriers[0])].name ==
                   site.barrier;
      });
    }
  }
  return changed;
}

}  // namespace flashgrad::plan
