// SPDX-License-Identifier: Apache-2.0
// The memories of the simulator: bytes, and beside them what each few bytes hold, who wrote it and
// who has read it since.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan/simulator.hpp"

namespace flashgrad::plan {

using Clock = std::vector<std::uint32_t>;  // of agents; an agent beyond its end stands at 0

void join(Clock& clock, const Clock& other);

struct Moment {
  int agent = -1;  // -1: before all
  std::uint32_t time = 0;
};

// Somebody who does things in an order of their own.
struct Agent {
  std::string name;
  int cta = 0;
  Clock clock;
};

class Memories {
 public:
  // `agents` grows while the program runs; `faults` takes what is found.
  Memories(const Program& program, HeadData& data, const std::vector<Agent>& agents,
           std::vector<Fault>& faults);

  // Checks the access by agent `reader` for `operation` and gives the numbers.
  Matrix read(const Operation& operation, const Access& access, int reader);
  void write(const Operation& operation, const Access& access, const Matrix& matrix, int writer);

  // The results, back into the head's tensors.
  void read_back();

 private:
  struct Cell {
    std::string value;
    int step = -1;
    bool written = false;
    Moment write;
    std::vector<Moment> reads;
    std::vector<std::pair<std::string, int>> before;  // values that were overwritten
  };
  struct Space {
    std::vector<std::uint8_t> bytes;
    std::vector<Cell> cells;
  };

  Space& space(const View& view) {
    return spaces_[static_cast<std::size_t>(view.store)][static_cast<std::size_t>(view.owner)];
  }
  static std::vector<std::size_t> cells(const View& view);
  [[nodiscard]] std::string who(int agent) const;
  [[nodiscard]] const Clock& clock_of(int agent) const {
    return agents_[static_cast<std::size_t>(agent)].clock;
  }
  [[nodiscard]] Moment now(int agent) const {
    return {agent, clock_of(agent)[static_cast<std::size_t>(agent)]};
  }
  void report(Fault::Kind kind, const std::string& message);
  void check_read(const Operation& operation, const Access& access, int reader);
  // False if the cell holds what the access means and the reader may know it.
  [[nodiscard]] bool find_fault(const Cell& cell, const Access& access, int reader,
                                Fault::Kind* kind, std::string* what) const;
  void check_write(const Operation& operation, const Access& access, int writer);

  HeadData& data_;
  const std::vector<Agent>& agents_;
  std::vector<Fault>& faults_;
  std::array<std::vector<Space>, 4> spaces_;  // by Store
};

}  // namespace flashgrad::plan
