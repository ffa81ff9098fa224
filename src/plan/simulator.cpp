// SPDX-License-Identifier: Apache-2.0
// The engine of the simulator: agents with vector clocks, memories that know what they hold.
#include "plan/simulator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "core/dtype.hpp"

namespace flashgrad::plan {
namespace {

constexpr std::size_t kMaxFaults = 8;
constexpr int kCellBytes = 64;

using Clock = std::vector<std::uint32_t>;

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (std::size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

struct Moment {
  int agent = -1;
  std::uint32_t time = 0;
};

bool is_before(const Moment& moment, const Clock& clock) {
  const auto agent = static_cast<std::size_t>(moment.agent);
  return moment.agent < 0 || (agent < clock.size() && clock[agent] >= moment.time);
}

// What a few neighbouring bytes hold: the value's name, who wrote it, who has read it since.
struct Cell {
  std::string value;
  int step = -1;
  bool written = false;
  bool adds = false;
  Moment write;
  std::vector<Moment> reads;
  std::vector<std::pair<std::string, int>> before;  // values that were overwritten
};

struct Space {
  std::vector<std::uint8_t> bytes;
  std::vector<Cell> cells;
};

struct Agent {
  std::string name;
  int cta = 0;
  Clock clock;
};

struct Phase {
  int arrivals = 0;
  Clock clock;
};

struct Job {  // of a pipe or a copy engine
  const Operation* operation;
  int agent;
};

std::size_t address(const View& view, int row, int column) {
  if (view.fold > 0 && column >= view.fold) {
    row += view.rows;
    column -= view.fold;
  }
  return static_cast<std::size_t>(view.offset) +
         static_cast<std::size_t>(row) * static_cast<std::size_t>(view.stride) +
         static_cast<std::size_t>(column * size_of(view.element));
}

class Engine {
 public:
  Engine(const Program& program, HeadData& data, std::uint64_t seed)
      : program_(program), data_(data), random_(seed) {
    result_.shared_bytes.resize(static_cast<std::size_t>(program.ctas));
    for (auto& uses : result_.shared_bytes) {
      uses.fill(0);
    }
  }

  SimulationResult run() {
    check_capacity();
    make_spaces();
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
    read_back();
    return std::move(result_);
  }

 private:
  void fault(Fault::Kind kind, const std::string& message) {
    if (result_.faults.size() < kMaxFaults) {
      result_.faults.push_back({kind, message});
    }
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
    check(program_.shared_regions, 227 * 1024, "bytes of shared memory");
    check(program_.tensor_regions, kTensorColumns, "columns of tensor memory");
  }

  void make_spaces() {
    const auto make = [](std::size_t bytes, std::size_t cells) {
      Space space;
      space.bytes.resize(bytes);
      space.cells.resize(cells);
      return space;
    };
    const auto by_cells = [&](std::size_t bytes) { return make(bytes, bytes / kCellBytes + 1); };
    for (int cta = 0; cta < program_.ctas; ++cta) {
      spaces_[0].push_back(by_cells(256 * 1024));
      // A cell of tensor memory is a column of all lanes; room beyond its end keeps an overflow
      // a fault of the program, not of the simulator.
      spaces_[1].push_back(
          make(std::size_t{kTensorLanes} * kTensorRowBytes * 2, std::size_t{kTensorColumns} * 2));
    }
    for (const int bytes : program_.register_bytes) {
      spaces_[2].push_back(by_cells(static_cast<std::size_t>(bytes)));
    }
    for_each_global([&](const void* source, std::size_t bytes, bool input) {
      Space space = by_cells(bytes);
      std::memcpy(space.bytes.data(), source, bytes);
      for (Cell& cell : space.cells) {
        cell.written = true;
        cell.value = input ? "input" : "sum";
        cell.adds = !input;
      }
      spaces_[3].push_back(std::move(space));
    });
  }

  template <class Visit>
  void for_each_global(Visit&& visit) {
    for (auto* tensor : {&data_.q, &data_.k, &data_.v, &data_.dout}) {
      visit(tensor->data(), tensor->size() * 2, true);
    }
    for (auto* tensor : {&data_.lse_log2, &data_.delta}) {
      visit(tensor->data(), tensor->size() * 4, true);
    }
    for (auto* tensor : {&data_.dq, &data_.dk, &data_.dv}) {
      visit(tensor->data(), tensor->size() * 4, false);
    }
  }

  void read_back() {
    std::size_t tensor = 0;
    for_each_global([&](void* target, std::size_t bytes, bool) {
      std::memcpy(target, spaces_[3][tensor++].bytes.data(), bytes);
    });
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

  std::string who(int index) {
    if (index < 0) {
      return "the caller";
    }
    return fmt::format("{} of CTA {}", agent(index).name, agent(index).cta);
  }

  Space& space(const View& view) {
    return spaces_[static_cast<std::size_t>(view.store)][static_cast<std::size_t>(view.owner)];
  }

  std::vector<std::size_t> cells(const View& view) {
    std::vector<std::size_t> list;
    const int columns = view.fold > 0 ? view.fold : view.columns;
    const int rows = view.store == Store::kTensor ? 1 : view.rows;
    for (int row = 0; row < rows; ++row) {
      const std::size_t begin = address(view, row, 0);
      const std::size_t end = begin + static_cast<std::size_t>(columns * size_of(view.element));
      const std::size_t size = view.store == Store::kTensor ? 4 : kCellBytes;
      for (std::size_t cell = begin / size; cell * size < end; ++cell) {
        if (list.empty() || list.back() < cell) {
          list.push_back(cell);
        }
      }
    }
    return list;
  }

  void check_read(const Operation& operation, const Access& access, int reader) {
    const auto describe = [&](const std::string& what) {
      return fmt::format("tile {}: {} ({}) reads {} of tile {} in {}: {}", operation.step,
                         operation.name, who(reader), access.value, access.step, access.view.place,
                         what);
    };
    bool reported = false;
    for (const std::size_t index : cells(access.view)) {
      Cell& cell = space(access.view).cells[index];
      if (reported) {
        continue;
      }
      if (!cell.written) {
        fault(Fault::Kind::kReadBeforeWrite, describe("nothing was written there"));
        reported = true;
      } else if (cell.value != access.value || cell.step != access.step) {
        const bool was_here = std::find(cell.before.begin(), cell.before.end(),
                                        std::pair(access.value, access.step)) != cell.before.end();
        fault(was_here ? Fault::Kind::kOverwritten : Fault::Kind::kReadBeforeWrite,
              describe(fmt::format("{} {} of tile {}, written by {}",
                                   was_here ? "it was overwritten by" : "it still holds",
                                   cell.value, cell.step, who(cell.write.agent))));
        reported = true;
      } else if (!is_before(cell.write, agent(reader).clock)) {
        fault(Fault::Kind::kUnordered,
              describe(fmt::format("no barrier orders it after the write by {}",
                                   who(cell.write.agent))));
        reported = true;
      }
    }
    for (const std::size_t index : cells(access.view)) {
      std::vector<Moment>& reads = space(access.view).cells[index].reads;
      const Moment now{reader, agent(reader).clock[static_cast<std::size_t>(reader)]};
      const auto same = std::find_if(reads.begin(), reads.end(),
                                     [&](const Moment& m) { return m.agent == reader; });
      if (same == reads.end()) {
        reads.push_back(now);
      } else {
        *same = now;
      }
    }
  }

  void check_write(const Operation& operation, const Access& access, int writer) {
    const Clock& clock = agent(writer).clock;
    bool reported = access.adds;
    for (const std::size_t index : cells(access.view)) {
      Cell& cell = space(access.view).cells[index];
      const auto complain = [&](const char* what, int other) {
        if (!reported) {
          fault(Fault::Kind::kUnordered,
                fmt::format("tile {}: {} ({}) writes {} to {} while {} may still {} {} of tile {}",
                            operation.step, operation.name, who(writer), access.value,
                            access.view.place, who(other), what, cell.value, cell.step));
          reported = true;
        }
      };
      if (!is_before(cell.write, clock)) {
        complain("write", cell.write.agent);
      }
      for (const Moment& read : cell.reads) {
        if (!is_before(read, clock)) {
          complain("read", read.agent);
        }
      }
      if (cell.written && (cell.value != access.value || cell.step != access.step)) {
        cell.before.emplace_back(cell.value, cell.step);
      }
      cell.value = access.value;
      cell.step = access.step;
      cell.written = true;
      cell.adds = access.adds;
      cell.write = {writer, clock[static_cast<std::size_t>(writer)]};
      cell.reads.clear();
    }
  }

  Matrix load(const View& view) {
    const std::vector<std::uint8_t>& bytes = space(view).bytes;
    Matrix matrix(view.rows, view.columns);
    for (int row = 0; row < view.rows; ++row) {
      for (int column = 0; column < view.columns; ++column) {
        const std::uint8_t* from = bytes.data() + address(view, row, column);
        if (view.element == Element::kBf16) {
          std::uint16_t bits = 0;
          std::memcpy(&bits, from, 2);
          matrix.at(row, column) = bf16_to_f32(bits);
        } else {
          std::memcpy(&matrix.at(row, column), from, 4);
        }
      }
    }
    return matrix;
  }

  void save(const View& view, const Matrix& matrix, bool adds) {
    std::vector<std::uint8_t>& bytes = space(view).bytes;
    for (int row = 0; row < view.rows; ++row) {
      for (int column = 0; column < view.columns; ++column) {
        std::uint8_t* to = bytes.data() + address(view, row, column);
        float value = matrix.at(row, column);
        if (view.element == Element::kBf16) {
          const std::uint16_t bits = f32_to_bf16(value);
          std::memcpy(to, &bits, 2);
        } else {
          if (adds) {
            float before = 0;
            std::memcpy(&before, to, 4);
            value += before;
          }
          std::memcpy(to, &value, 4);
        }
      }
    }
  }

  void count(const Access& access) {
    if (access.view.store == Store::kShared && access.use >= 0) {
      result_.shared_bytes[static_cast<std::size_t>(access.view.owner)]
                          [static_cast<std::size_t>(access.use)] += access.view.bytes();
    }
  }

  void execute(const Operation& operation, int by) {
    std::vector<Matrix> inputs;
    for (const Access& access : operation.reads) {
      check_read(operation, access, by);
      count(access);
      inputs.push_back(load(access.view));
    }
    const std::vector<Matrix> outputs =
        operation.function ? operation.function(inputs)
                           : std::vector<Matrix>(operation.writes.size(), inputs.at(0));
    for (std::size_t i = 0; i < operation.writes.size(); ++i) {
      check_write(operation, operation.writes[i], by);
      count(operation.writes[i]);
      save(operation.writes[i].view, outputs.at(i), operation.writes[i].adds);
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
        execute(operation, self);
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
      execute(*job.operation, self);
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
    execute(*taken.operation, taken.agent);
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
  HeadData& data_;
  std::uint64_t random_;
  std::array<std::vector<Space>, 4> spaces_;  // by Store
  std::vector<Agent> agents_;                 // roles, pipes, then copies
  std::vector<std::vector<Phase>> phases_;    // of each barrier
  std::vector<std::deque<Job>> pipes_;
  std::vector<std::vector<Clock>> pipe_groups_;  // of each pipe: clocks of its finished groups
  std::vector<std::size_t> position_;            // of each role
  std::vector<std::vector<Job>> copies_;         // of each role; agent -1: done
  std::map<std::size_t, std::vector<Clock>> done_copies_;
  std::map<const void*, Clock> issued_clocks_;
  SimulationResult result_;
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
